"""The bytes of a journal batch, version 1: fixed for ever, refused where they are not whole."""

from __future__ import annotations

import json
import struct
from zlib import crc32

import pytest

from keylane.core.journal_record import (
    OUTCOMES,
    BatchHead,
    Columns,
    JournalRecord,
    PinTenure,
    in_sample,
    open_batch,
    pack,
    sample_limit,
    seal,
)
from keylane.errors import BrokenJournal, InvalidInput, JournalError, JournalTooNew

HEAD = BatchHead(
    writer="0123456789abcdef",
    batch=7,
    stream="ORDERS",
    group="billing",
    member="alice",
    instance="i-1",
    sample=0.5,
    dropped=3,
)
START_NS = 1_790_000_000_000_000_000

COLUMNS = Columns(
    sequences=[11, 12, 13],
    source_sequences=[101, 102, 12],
    started_ns=[START_NS, START_NS + 5, START_NS + 10],
    ended_ns=[START_NS + 1_000, START_NS + 2_000, START_NS + 3_000],
    keys=["k1", "é", "k1"],
    partitions=[4, 0, 4],
    delivered=[1, 2, 300],
    tenures=[("PinA", 9), ("PinA", 9), ("", 10)],
    outcomes=[0, 1, 5],
)

GOLDEN = bytes.fromhex(
    "4b4c4a01c80000007b22777269746572223a2230313233343536373839616263646566222c226261746368223a372c22"
    "73747265616d223a224f5244455253222c2267726f7570223a2262696c6c696e67222c226d656d626572223a22616c69"
    "6365222c22696e7374616e6365223a22692d31222c2273616d706c65223a302e352c2264726f70706564223a332c2272"
    "65636f726473223a332c226b657973223a322c226b65795f6279746573223a342c2274656e75726573223a5b5b225069"
    "6e41222c395d2c5b22222c31305d5d7d0b000000000000000c000000000000000d000000000000006500000000000000"
    "66000000000000000c000000000000000000f323845bd7180500f323845bd7180a00f323845bd718e803f323845bd718"
    "d007f323845bd718b80bf323845bd7180000000001000000000000000000000004000000000000000400000000000000"
    "01000000020000002c010000000000000000000001000000000105000000000000000000020000000400000000000000"
    "6b31c3a90000000059060e0c"
)


def batch_bytes(**changes: object) -> bytes:
    """A whole batch whose head says something else."""
    text = GOLDEN[8 : 8 + struct.unpack_from("<I", GOLDEN, 4)[0]]
    fields = {**json.loads(text), **changes}
    for name in [name for name, value in fields.items() if value is None]:
        del fields[name]
    head = json.dumps(fields, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return signed(GOLDEN[:4] + struct.pack("<I", len(head)) + head + GOLDEN[8 + len(text) : -4])


def signed(body: bytes) -> bytes:
    return body + struct.pack("<I", crc32(body))


def with_last(code: str, name: str, value: int) -> bytes:
    """A whole batch in which the last number of a column is another one."""
    span = open_batch(GOLDEN).spans[name]
    changed = bytearray(GOLDEN[:-4])
    struct.pack_into(f"<{code}", changed, span.start + (span.length - 1) * struct.calcsize(code), value)
    return signed(bytes(changed))


def test_version_1_is_these_bytes() -> None:
    assert seal(HEAD, pack(COLUMNS)) == GOLDEN


def test_the_layout_by_hand() -> None:
    """The description in docs/journal.md, followed step by step without the code under test."""
    assert GOLDEN[:4] == b"KLJ\x01"
    (head_bytes,) = struct.unpack_from("<I", GOLDEN, 4)
    assert head_bytes % 8 == 0
    assert json.loads(GOLDEN[8 : 8 + head_bytes]) == {
        "writer": "0123456789abcdef",
        "batch": 7,
        "stream": "ORDERS",
        "group": "billing",
        "member": "alice",
        "instance": "i-1",
        "sample": 0.5,
        "dropped": 3,
        "records": 3,
        "keys": 2,
        "key_bytes": 4,
        "tenures": [["PinA", 9], ["", 10]],
    }
    at = 8 + head_bytes
    assert struct.unpack_from("<3Q", GOLDEN, at) == (11, 12, 13)
    assert struct.unpack_from("<3Q", GOLDEN, at + 24) == (101, 102, 12)
    assert struct.unpack_from("<3q", GOLDEN, at + 48) == (START_NS, START_NS + 5, START_NS + 10)
    assert struct.unpack_from("<3q", GOLDEN, at + 72) == (START_NS + 1_000, START_NS + 2_000, START_NS + 3_000)
    assert struct.unpack_from("<3I4x", GOLDEN, at + 96) == (0, 1, 0)
    assert struct.unpack_from("<3I4x", GOLDEN, at + 112) == (4, 0, 4)
    assert struct.unpack_from("<3I4x", GOLDEN, at + 128) == (1, 2, 300)
    assert struct.unpack_from("<3H2x", GOLDEN, at + 144) == (0, 0, 1)
    assert struct.unpack_from("<3B5x", GOLDEN, at + 152) == (0, 1, 5)
    assert struct.unpack_from("<3I4x", GOLDEN, at + 160) == (0, 2, 4)
    assert GOLDEN[at + 176 : at + 184] == "k1é".encode() + bytes(4)
    assert struct.unpack_from("<I", GOLDEN, at + 184) == (crc32(GOLDEN[:-4]),)
    assert len(GOLDEN) == at + 188


def test_what_was_packed_is_read() -> None:
    batch = open_batch(GOLDEN)
    assert batch.head == HEAD
    assert repr(batch) == "<JournalBatch billing/alice 0123456789abcdef.7: 3 records>"
    where = "ORDERS", "billing", "alice", "i-1"
    assert list(batch.rows()) == [
        JournalRecord(
            *where, "PinA", 9, 11, 101, "k1", 4, 1, START_NS, START_NS + 1_000, "done", "0123456789abcdef", 7, 0
        ),
        JournalRecord(
            *where, "PinA", 9, 12, 102, "é", 0, 2, START_NS + 5, START_NS + 2_000, "failed", "0123456789abcdef", 7, 1
        ),
        JournalRecord(
            *where, "", 10, 13, 12, "k1", 4, 300, START_NS + 10, START_NS + 3_000, "cancelled", "0123456789abcdef", 7, 2
        ),
    ]
    assert batch.tenures == (PinTenure("PinA", 9), PinTenure("", 10))


def test_outcomes_keep_their_numbers() -> None:
    assert OUTCOMES[:7] == ("done", "failed", "dead", "terminated", "returned", "cancelled", "parked")
    assert OUTCOMES[7:] == ("delayed", "retried", "retried_dead")


def test_keys_that_are_not_utf8_keep_their_bytes() -> None:
    key = b"\xff\xfeodd".decode("utf-8", "surrogateescape")
    batch = open_batch(seal(HEAD, pack(COLUMNS._replace(keys=[key, "", "b" * 4000]))))
    assert batch.key_values() == [b"\xff\xfeodd", b"", b"b" * 4000]
    assert [record.key for record in batch.rows()] == [key, "", "b" * 4000]


def test_another_version_is_refused_whatever_follows() -> None:
    for version in (0, 2, 255):
        with pytest.raises(JournalTooNew, match=rf"version {version}: this keylane reads version 1"):
            open_batch(b"KLJ" + bytes([version]) + b"anything at all")


@pytest.mark.parametrize("data", [b"", b"KLJ", b"{}", b'{"version": 1, "records": []}', b"klj\x01" + GOLDEN[4:]])
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(BrokenJournal, match="are not a journal batch"):
        open_batch(data)


def test_every_cut_and_every_changed_byte_is_found() -> None:
    for length in range(len(GOLDEN)):
        with pytest.raises(BrokenJournal):
            open_batch(GOLDEN[:length])
    for at in range(len(GOLDEN)):
        changed = bytearray(GOLDEN)
        changed[at] ^= 0x10
        with pytest.raises(JournalError):
            open_batch(bytes(changed))
    with pytest.raises(BrokenJournal):
        open_batch(GOLDEN + b"\0")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (batch_bytes(records=4), "4 records should end at byte"),
        (batch_bytes(records=-1), "records is -1"),
        (batch_bytes(batch=True), "batch is True"),
        (batch_bytes(keys=None), "KeyError"),
        (batch_bytes(batch=2**63), "batch is 9223372036854775808"),
        (batch_bytes(records=10**300), "records is 1000.*…"),
        (batch_bytes(records=2**62), "should end at byte"),
        (batch_bytes(sample=10**400), "sample is 1000.*…"),
        (batch_bytes(sample=float("inf")), "sample is inf"),
        (batch_bytes(sample=float("nan")), "sample is nan"),
        (batch_bytes(sample="0.5"), "sample is '0.5'"),
        (batch_bytes(tenures=[["PinA", 1e400], ["", 10]]), "a revision is inf"),
        (batch_bytes(tenures=[["PinA", -1], ["", 10]]), "a revision is -1"),
        (batch_bytes(tenures=[[9, 9], ["", 10]]), "a pin is 9"),
        (batch_bytes(tenures=5), "head of a journal batch cannot be read"),
        (batch_bytes(group=["billing"]), "group is \\['billing'\\]"),
        (batch_bytes(member="\ud800"), "head of a journal batch cannot be read"),
        (signed(GOLDEN[:4] + struct.pack("<I", 2**32 - 1) + b"[" * 5000), "head of a journal batch cannot be read"),
        (batch_bytes(tenures=[["PinA"]]), "head of a journal batch cannot be read"),
        (batch_bytes(tenures=[["PinA", 9]]), "refers to tenure number 1, but the batch has 1"),
        (with_last("I", "key", 2), "refers to key number 2, but the batch has 2"),
        (with_last("B", "outcome", 10), "refers to outcome number 10, but the batch has 10"),
        (with_last("I", "key_offsets", 3), "offsets are wrong"),
        (signed(GOLDEN[:8] + b"[" + GOLDEN[9:-4]), "head of a journal batch cannot be read"),
    ],
)
def test_a_whole_checksum_does_not_excuse_nonsense(data: bytes, said: str) -> None:
    with pytest.raises(BrokenJournal, match=said):
        open_batch(data)


def test_fields_that_later_writers_add_to_the_head_are_passed_over() -> None:
    batch = open_batch(batch_bytes(zone="eu"))
    assert batch.head == HEAD
    assert [record.sequence for record in batch.rows()] == [11, 12, 13]


@pytest.mark.parametrize(
    ("key", "share"), [("alice", 0.154521), ("carol", 0.415016), ("dave", 0.596318), ("bob", 0.960139)]
)
def test_a_key_is_in_every_sample_above_its_place(key: str, share: float) -> None:
    assert not in_sample(key, share)
    assert in_sample(key, share + 0.00001)
    assert in_sample(key, 1.0)


def test_a_sample_holds_its_share_of_keys() -> None:
    kept = sum(in_sample(f"customer-{number}", 0.1) for number in range(20_000))
    assert 1_900 < kept < 2_100


@pytest.mark.parametrize("sample", [0, -0.1, 1.01, True, "1", float("nan")])
def test_what_is_no_share_is_refused(sample: float) -> None:
    with pytest.raises(InvalidInput, match="above 0 and at most 1"):
        sample_limit(sample)
