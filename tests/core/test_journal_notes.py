"""What the journal reads from deliveries: the source's sequence, the pin, and whose batch a note belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from keylane.core.journal_record import Columns
from keylane.errors import InvalidInput
from keylane.journal.columns import Lines, Note


@dataclass
class Instance:
    group: str = "billing"
    member: str = "alice"
    instance: str = "i-1"
    stream: str = "ORDERS"
    revision: int = 1


@dataclass
class Spot:
    partition: int = 3
    key: str = "k"


def note(sequence: int, headers: bytes = b"", origin: Instance | None = None, revision: int = 1) -> Note:
    reply = b"$JS.ACK.ORDERS-billing.alice.2.%d.%d.1.0" % (sequence, sequence)
    return (origin or Instance(), revision, Spot(), sequence, reply, headers, 0, 10, 20)


def block(*lines: bytes) -> bytes:
    return b"".join([b"NATS/1.0\r\n", *[line + b"\r\n" for line in lines], b"\r\n"])


SOURCED = b"Nats-Stream-Source: ORDERS 77 orders.* {{Partition(4,1)}}.orders.{{Wildcard(1)}} orders.1 anFCrzUP"


def columns(*notes: Note) -> Columns:
    return Lines("ORDERS").columns(list(notes))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (b"", 5),
        (block(b"A: b"), 5),
        (block(SOURCED), 77),
        (block(b"A: b", SOURCED, b"Nats-Pin-Id: x"), 77),
        (block(b"Nats-Stream-Source: ORDERS 77"), 77),
        (block(b"Nats-Stream-Source: ORDERS2 77 >"), 5),
        (block(b"Nats-Stream-Source: OTHER 77 >"), 5),
        (block(b"Nats-Stream-Source: ORDERS many"), 5),
        (block(b"X-Nats-Stream-Source: ORDERS 77"), 5),
    ],
)
def test_the_sequence_in_the_stream_that_the_group_was_made_on(headers: bytes, expected: int) -> None:
    found = columns(note(5, headers))
    assert (list(found.sequences), found.source_sequences) == ([5], [expected])


def test_a_stream_name_is_no_pattern() -> None:
    found = Lines("a+b").columns([note(5, block(b"Nats-Stream-Source: a+b 9 >")), note(6, block(SOURCED))])
    assert found.source_sequences == [9, 6]


def test_each_record_has_the_pin_of_its_own_delivery() -> None:
    first, second = block(b"A: b", b"Nats-Pin-Id: pin1"), block(b"Nats-Pin-Id: pin2")
    plain = block(b"A: Nats-Pin-Id: pin1")
    found = columns(note(1, first), note(2, first), note(3, plain), note(4, second), note(5), note(6, first))
    assert [pin for pin, _ in found.tenures] == ["pin1", "pin1", "", "pin2", "", "pin1"]


def test_the_revision_is_the_one_of_the_time_of_the_note() -> None:
    origin = Instance(revision=9)
    found = columns(note(1, origin=origin, revision=7), note(2, origin=origin, revision=9))
    assert [revision for _, revision in found.tenures] == [7, 9]


def test_the_rest_is_taken_over() -> None:
    found = columns(note(5))
    assert (found.delivered, found.partitions, found.keys) == ([2], [3], ["k"])
    assert (found.outcomes, found.started_ns, found.ended_ns) == ((0,), (10,), (20,))


def test_deliveries_are_counted_in_both_forms_of_the_ack_subject() -> None:
    origin, spot = Instance(), Spot()
    replies = (
        b"$JS.ACK.S.c.3.5.5.1.0",
        b"$JS.ACK.S.c.3.6.6.1.0",
        b"$JS.ACK.S.c.31.7.7.1.0",
        b"$JS.ACK.hub.ACCOUNT.S.c.4.5.5.1.0",
        b"$JS.ACK._.ACCOUNT.S.c.6.5.5.1.0.token",
    )
    found = columns(*((origin, 1, spot, 5, reply, b"", 0, 10, 20) for reply in replies))
    assert found.delivered == [3, 3, 31, 4, 6]


def test_notes_are_sorted_by_instance_and_keep_their_order() -> None:
    lines = Lines("ORDERS")
    alice, again, bob = Instance(), Instance(), Instance(member="bob")
    notes = [note(1, origin=alice), note(2, origin=bob), note(3, origin=again), note(4, origin=bob)]
    sorted_notes = [(line.subject, line.instance, [one[3] for one in own]) for line, own in lines.sort(notes)]
    assert sorted_notes == [
        ("keylane.journal.ORDERS.billing.alice", "i-1", [1, 3]),
        ("keylane.journal.ORDERS.billing.bob", "i-1", [2, 4]),
    ]
    assert lines.line_of(alice) is lines.line_of(again)
    assert lines.line_of(Instance(instance="i-2")) is not lines.line_of(alice)


def test_a_name_that_is_no_subject_is_refused() -> None:
    with pytest.raises(InvalidInput, match="group name"):
        Lines("ORDERS").line_of(Instance(group="a.b"))
