"""The bytes of the five messages: as the Go implementation writes them, and nothing else taken for one."""

from __future__ import annotations

import pytest

from keylane.core.claim_records import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    Placing,
    ReleaseGroup,
    ReleasingPartition,
    Unreadable,
    coordinating_partition,
    decode,
    encode,
    split,
    split_roughly,
)
from keylane.errors import InvalidInput

WRITTEN: list[tuple[Message, bytes]] = [
    (Heartbeat("ii", "cl", "gr", "t", 3, 5, 2), b"Heartbeat/1/2/ii/cl/gr/t/3/5"),
    (ClaimingPartition("ii", "cl", "gr", "t", 3, 2), b"ClaimingPartition/1/2/ii/cl/gr/t/3"),
    (ReleasingPartition("ii", "cl", "gr", "t", 3, 7, 2), b"ReleasingPartition/1/2/ii/cl/gr/t/3/7"),
    (ClaimingMessages("ii", "cl", "gr", "t", 3, 9, 2), b"ClaimingMessages/1/2/ii/cl/gr/t/3/9"),
    (ReleaseGroup("ii", "cl", "gr", 11, 2), b"ReleaseGroup/1/2/ii/cl/gr//0/11"),
]


@pytest.mark.parametrize(("message", "value"), WRITTEN)
def test_the_format(message: Message, value: bytes) -> None:
    assert encode(message) == value
    assert decode(value) == message


def test_messages_of_different_types_are_never_equal() -> None:
    same_fields = b"/1/3/i/c/g/t/1/2"
    kinds = (b"Heartbeat", b"ReleasingPartition", b"ClaimingMessages")
    assert len({decode(kind + same_fields) for kind in kinds}) == 3


def test_the_go_admin_leaves_the_version_at_zero() -> None:
    assert decode(b"ReleaseGroup/0/2/ii/cl/gr//0/11") == ReleaseGroup("ii", "cl", "gr", 11, 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"Heartbeat/4/2/ii/cl/gr/t/1/5", Heartbeat("ii", "cl", "gr", "t", 1, 5, 2)),
        (b"ClaimingPartition/4/2/ii/cl/gr/t/1", ClaimingPartition("ii", "cl", "gr", "t", 1, 2)),
        (b"ReleasingPartition/4/2/ii/cl/gr/t/1/9", ReleasingPartition("ii", "cl", "gr", "t", 1, 9, 2)),
        (b"ClaimingMessages/4/2/ii/cl/gr/t/1/2", ClaimingMessages("ii", "cl", "gr", "t", 1, 2, 2)),
        (b"ReleaseGroup/4/2/ii/cl/gr//0/12", ReleaseGroup("ii", "cl", "gr", 12, 2)),
        (b"ReleaseGroup/1/2/ii/cl/gr/t/4/11", ReleaseGroup("ii", "cl", "gr", 11, 2)),
        (b"Heartbeat/-1/2/ii/cl/gr/t/3/5", Heartbeat("ii", "cl", "gr", "t", 3, 5, 2)),
        (b"Heartbeat/+1/+2/ii/cl/gr/t/+3/+5", Heartbeat("ii", "cl", "gr", "t", 3, 5, 2)),
        (b"Heartbeat/01/02/ii/cl/gr/t/03/" + b"0" * 50 + b"5", Heartbeat("ii", "cl", "gr", "t", 3, 5, 2)),
        (b"Heartbeat/1/-2/ii/cl/gr/t/3/-1", Heartbeat("ii", "cl", "gr", "t", 3, -1, -2)),
        (b"Heartbeat/1/2/ii/cl/gr//3/5", Heartbeat("ii", "cl", "gr", "", 3, 5, 2)),
    ],
)
def test_what_the_go_library_reads_is_read(value: bytes, message: Message) -> None:
    """It takes any whole number for a version, and numbers as `strconv.Atoi` does."""
    assert decode(value) == message


@pytest.mark.parametrize(
    "value",
    [
        b"Heartbeat/1/2/ii//gr/t/3/5",
        b"Heartbeat/1/2//cl/gr/t/3/5",
        b"Heartbeat/1/2/ii/a b/gr/t/3/5",
        b"Heartbeat/1/2/ii/a\x01/gr/t/3/5",
        "Heartbeat/1/2/ii/zoë/gr/t/3/5".encode(),
    ],
)
def test_ids_that_we_would_not_write_are_somebodys_claim_all_the_same(value: bytes) -> None:
    assert isinstance(decode(value), Heartbeat)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "unknown type ''"),
        (b"Hello/1", "unknown type 'Hello'"),
        (b"heartbeat/1/2/ii/cl/gr/t/3/5", "unknown type"),
        (b" Heartbeat/1/2/ii/cl/gr/t/3/5", "unknown type"),
        (b"Heartbeat", "1 fields in a Heartbeat, not 9"),
        (b"Heartbeat/1/2/ii/cl/gr/t/3", "8 fields in a Heartbeat, not 9"),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/5/6", "10 fields in a Heartbeat, not 9"),
        (b"Heartbeat/1/2/ii/c/l/gr/t/3/5", "10 fields in a Heartbeat, not 9"),
        (b"ClaimingPartition/1/2/ii/cl/gr/t/3/5", "9 fields in a ClaimingPartition, not 8"),
        (b"ReleaseGroup/1/2/ii/cl/gr//0", "8 fields in a ReleaseGroup, not 9"),
        (b"Heartbeat/x/2/ii/cl/gr/t/3/5", "unknown version 'x'"),
        (b"Heartbeat/1.1/2/ii/cl/gr/t/3/5", "unknown version '1.1'"),
        (b"Heartbeat/2/2/ii/cl/gr/t/3/5/new", "10 fields in a Heartbeat, not 9"),
        (b"Handover/2/2/ii/cl/gr/t/3/5", "unknown type 'Handover'"),
        (b"Heartbeat//2/ii/cl/gr/t/3/5", "unknown version ''"),
        (b"Heartbeat/1//ii/cl/gr/t/3/5", "digits"),
        (b"Heartbeat/1/2/ii/cl/gr/t//5", "digits"),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/", "digits"),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/--5", "digits"),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/-", "digits"),
        (b"Heartbeat/1/2/ii/cl/gr/t/-3/5", "negative"),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/5.0", "digits"),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/1_000", "digits"),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/ 5", "digits"),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/5\n", "digits"),
        ("Heartbeat/1/2/ii/cl/gr/t/3/٣".encode(), "digits"),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/9223372036854775808", "too large"),
        (b"Heartbeat/1/2/ii/cl/gr/t/2147483648/5", "too large"),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/" + b"9" * 10_000, "too large"),
        (b"Heartbeat/1/2/ii/\xff/gr/t/3/5", "not UTF-8"),
    ],
)
def test_what_does_not_parse_is_a_value(value: bytes, reason: str) -> None:
    found = decode(value)
    assert isinstance(found, Unreadable)
    assert reason in found.reason
    assert value.startswith(found.value)
    assert len(found.value) <= 200


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b"Heartbeat/1/2/ii/cl/gr/t/3/5", (b"Heartbeat", b"ii/cl/gr/t/3", 5)),
        (b"ReleasingPartition/1/2/ii/cl/gr/t/3/5", (b"ReleasingPartition", b"ii/cl/gr/t/3", 5)),
        (b"ClaimingMessages/1/2/ii/cl/gr/t/3/5", (b"ClaimingMessages", b"ii/cl/gr/t/3", 5)),
        (b"ClaimingPartition/1/2/ii/cl/gr/t/3", (b"ClaimingPartition", b"ii/cl/gr/t/3", 0)),
        (b"ReleaseGroup/1/2/ii/cl/gr//0/5", None),
        (b"Hello/1/2/ii/cl/gr/t/3/5", None),
        (b"Heartbeat/0/2/ii/cl/gr/t/3/5", None),
        (b"Heartbeat/1/x/ii/cl/gr/t/3/5", None),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/-5", None),
        (b"Heartbeat/1/2/ii/cl/gr/t/3/9223372036854775808", None),
        (b"Heartbeat/1/2", None),
    ],
)
def test_the_short_way_to_read_a_record(value: bytes, found: tuple[bytes, bytes, int] | None) -> None:
    assert split_roughly(value) == found
    if found is not None:
        assert split(value) == (found[0].decode(), "ii", "cl", "gr", "t", 3, found[2], 2)


@pytest.mark.parametrize("what", ["instance", "client", "group", "topic"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a/b", "holds '/' at position 2: a slash separates the fields"),
        ("", "is empty"),
        ("a\nb", "control characters"),
        ("a\x00", "control characters"),
        ("a\u2028", "control characters"),
        ("a\udc80", "UTF-8"),
        (7, "is int, not text"),
    ],
)
def test_ids_that_cannot_be_written(what: str, text: object, said: str) -> None:
    values: dict[str, object] = {"instance": "ii", "client": "cl", "group": "gr", "topic": "t", what: text}
    with pytest.raises(InvalidInput) as refused:
        encode(ClaimingPartition(**values, partition=3, seconds=2))  # type: ignore[arg-type]
    assert said in str(refused.value)
    assert str(refused.value).startswith({"topic": "topic"}.get(what, f"{what} id"))


@pytest.mark.parametrize("number", [-1, 1 << 63, True, 1.0, "5", None])
def test_numbers_that_cannot_be_written(number: object) -> None:
    for bad in (
        Heartbeat("ii", "cl", "gr", "t", 3, number, 2),  # type: ignore[arg-type]
        Heartbeat("ii", "cl", "gr", "t", number, 5, 2),  # type: ignore[arg-type]
        Heartbeat("ii", "cl", "gr", "t", 3, 5, number),  # type: ignore[arg-type]
        ClaimingMessages("ii", "cl", "gr", "t", 3, number, 2),  # type: ignore[arg-type]
        ReleaseGroup("ii", "cl", "gr", number, 2),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInput, match="give a whole number from 0"):
            encode(bad)


# The first 8 bytes of `printf <text> | md5sum`, read backwards, modulo n by `bc`.
@pytest.mark.parametrize(
    ("topic", "partition", "placing", "eight_bytes"),
    [
        ("orders", 3, "topic_partition", "caf2734f06ad7cdb"),
        ("orders", 3, "topic", "12c500ed0b787910"),
        ("orders", 99, "topic", "12c500ed0b787910"),
    ],
)
@pytest.mark.parametrize("partitions", [1, 2, 4, 7, 64, 1000])
def test_the_coordinating_partition(
    topic: str, partition: int, placing: Placing, eight_bytes: str, partitions: int
) -> None:
    backwards = "".join(reversed([eight_bytes[at : at + 2] for at in range(0, 16, 2)]))
    assert coordinating_partition(topic, partition, partitions, placing=placing) == int(backwards, 16) % partitions


@pytest.mark.parametrize(
    ("topic", "partition", "partitions", "by_both", "by_topic"),
    [("orders", 0, 64, 26, 18), ("orders", 3, 64, 10, 18), ("orders", 3, 7, 0, 0), ("zoë", 12, 10, 1, 4)],
)
def test_known_places(topic: str, partition: int, partitions: int, by_both: int, by_topic: int) -> None:
    assert coordinating_partition(topic, partition, partitions) == by_both
    assert coordinating_partition(topic, partition, partitions, placing="topic") == by_topic


def test_places_are_spread() -> None:
    places = [coordinating_partition("orders", number, 4) for number in range(400)]
    assert all(60 <= places.count(place) <= 140 for place in range(4))
    assert len({coordinating_partition("orders", number, 4, placing="topic") for number in range(400)}) == 1


def test_wrong_ways_to_ask_for_a_place() -> None:
    with pytest.raises(InvalidInput, match="it has at least 1"):
        coordinating_partition("orders", 0, 0)
    with pytest.raises(InvalidInput, match="use one of topic_partition, topic"):
        coordinating_partition("orders", 0, 1, placing="md5")  # type: ignore[arg-type]
