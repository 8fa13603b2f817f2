"""Dead letters: into their stream, out of it again, and what must not get lost or pass for something else."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import pytest
from nats.js.api import StorageType, StreamConfig, StreamSource

from keylane import Connection
from keylane.core.names import check_group_name
from keylane.dead_letters import (
    DeadLetter,
    DeadLetters,
    dead_letter_stream,
    drop,
    list_dead_letters,
    read_dead_letter,
    replay,
)
from keylane.dispatch import error_line
from keylane.errors import (
    GroupConflict,
    GroupError,
    InvalidInput,
    KeylaneError,
    NotFound,
    PublishRejected,
)
from keylane.groups import GroupMessage
from keylane.jetstream import Outgoing, PublishAck, publish_many, publish_raw, streams
from keylane.processing.dead_letters import header_lines
from keylane.server import NatsServer
from tests.integration.groups.conftest import MakeGround
from tests.integration.groups.rig import Ground, delete_quietly
from tests.waiter import until

BAD = ValueError("no such customer")


async def gathered(ground: Ground, count: int, **options: Any) -> list[GroupMessage]:
    """The messages that a member of group `g` is given."""
    got: list[GroupMessage] = []

    async def handler(message: GroupMessage) -> None:
        got.append(message)

    member = await ground.join("alice", handler, **options)
    await until(lambda: len(got) >= count, deadline_s=20)
    await member.stop()
    return sorted(got, key=lambda one: one.delivery_sequence)


async def given(ground: Ground, subjects: Sequence[str] = ("k1",)) -> list[GroupMessage]:
    """Messages of an elastic group that were published on these subjects."""
    await ground.elastic(members=["alice"])
    await ground.publish(subjects)
    return await gathered(ground, len(subjects))


def letters_of(ground: Ground, connection: Connection | None = None, group: str = "g") -> DeadLetters:
    ground.stack.push_async_callback(delete_quietly, ground.connection, dead_letter_stream(ground.stream))
    return DeadLetters(connection or ground.connection, ground.stream, group)


async def put(letters: DeadLetters, message: GroupMessage, error: BaseException = BAD) -> None:
    await letters.put(message, member="alice", tries=3, error=error)


async def listed(ground: Ground, **which: Any) -> list[DeadLetter]:
    return [one async for one in list_dead_letters(ground.connection, ground.stream, **which)]


async def raw_of(connection: Connection, stream: str, sequence: int) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Header lines and data as the server has them."""
    wire = (await connection.api.request(f"STREAM.MSG.GET.{stream}", {"seq": sequence}))["message"]
    return list(header_lines(base64.b64decode(wire.get("hdrs", "")))), base64.b64decode(wire.get("data", ""))


async def publish_bytes(ground: Ground, key: str, head: bytes, data: bytes = b"") -> PublishAck:
    block = b"NATS/1.0\r\n" + head + b"\r\n"
    return await publish_raw(ground.connection, f"{ground.stream}.{key}".encode(), block, data, 5.0)


# ---- in -----------------------------------------------------------------------------------------------


async def test_a_dead_letter_is_the_message_and_what_happened(ground: Ground) -> None:
    data = bytes(range(256)) + b"\r\n\x00"
    await ground.publish(["before"])
    await publish_bytes(
        ground, "k%41é", b"Colour: green\r\nColour: blue\r\nOdd: \xff\xfe\r\nNats-Msg-Id: mine\r\n", data
    )
    await ground.elastic(members=["alice"])
    [_, message] = await gathered(ground, 2)
    await letters_of(ground).put(message, member="alice", tries=5, error=BAD)

    [letter] = await listed(ground)
    assert letter == await read_dead_letter(ground.connection, ground.stream, 1)
    assert (letter.sequence, letter.stream, letter.source_sequence) == (1, ground.stream, 2)
    assert (letter.subject, letter.key) == (f"{ground.stream}.k%41é", "k%41é")
    assert (letter.group, letter.member, letter.partition) == ("g", "alice", message.partition)
    assert (letter.tries, letter.error) == (5, "ValueError: no such customer")
    assert letter.headers == {"Colour": "green", "Odd": "\ufffd\ufffd", "Nats-Msg-Id": "mine"}
    assert letter.data == data

    lines, kept = await raw_of(ground.connection, dead_letter_stream(ground.stream), 1)
    assert kept == data
    names = [name.decode() for name, _ in lines]
    assert names[:11] == [
        "Keylane-Subject", "Keylane-Stream", "Keylane-Sequence", "Keylane-Group", "Keylane-Member",
        "Keylane-Partition", "Keylane-Key", "Keylane-Tries", "Keylane-Error", "Keylane-Time",
        "Keylane-Traceback",
    ]  # fmt: skip
    assert lines[13:] == [
        (b"Colour", b"green"),
        (b"Colour", b"blue"),
        (b"Odd", b"\xff\xfe"),
        (b"Keylane-Original-Nats-Msg-Id", b"mine"),
    ]


@pytest.mark.parametrize("storage", [StorageType.FILE, StorageType.MEMORY])
async def test_the_stream_is_like_its_source_and_drops_nothing(make: MakeGround, storage: StorageType) -> None:
    ground = await make(storage=storage)
    [message] = await given(ground)
    await put(letters_of(ground), message)
    config = (await streams.info(ground.connection, dead_letter_stream(ground.stream))).config
    assert (config.storage, config.num_replicas, config.retention, config.discard) == (storage, 1, "limits", "new")
    assert (config.max_msgs, config.max_bytes, config.max_age) == (-1, -1, 0)
    assert config.subjects == [f"keylane.dlq.{ground.stream}.>"]


@pytest.mark.parametrize("stream", ["ORDERS", "keylane-dlq", "a-b-c", "x@dlq"])
def test_no_group_has_a_queue_of_that_name(stream: str) -> None:
    name = dead_letter_stream(stream)
    for index, char in enumerate(name):
        if char == "-":
            with pytest.raises(InvalidInput):
                check_group_name(name[index + 1 :])


async def test_several_members_put_at_once_and_make_the_stream_once(cluster_ground: Ground) -> None:
    messages = await given(cluster_ground, [f"k{number}" for number in range(4)])
    puts = [letters_of(cluster_ground, await cluster_ground.client()) for _ in messages]
    await asyncio.gather(*(put(letters, message) for letters, message in zip(puts, messages, strict=True)))
    # A replica that lags behind may answer first.
    found = await until(lambda: listed(cluster_ground), lambda found: len(found) >= 4)
    assert sorted(one.source_sequence for one in found) == [1, 2, 3, 4]
    config = (await streams.info(cluster_ground.connection, dead_letter_stream(cluster_ground.stream))).config
    assert (config.storage, config.num_replicas) == ("file", 3)


async def test_the_same_message_from_two_members_is_stored_once(ground: Ground) -> None:
    [message] = await given(ground)
    first, second = letters_of(ground), letters_of(ground, await ground.client())
    await asyncio.gather(put(first, message), put(second, message))
    await put(first, message, RuntimeError("another reason"))
    await put(letters_of(ground, group="other"), message)
    assert sorted(one.group for one in await listed(ground)) == ["g", "other"]


async def test_a_stream_made_anew_has_other_messages(make: MakeGround, unique: Any) -> None:
    stream = unique("again")
    for _ in range(2):
        ground = await make(stream=stream, partitions=4)
        await ground.static(members=["alice"])
        await ground.publish(["k1"])
        [message] = await gathered(ground, 1)
        assert message.delivery_sequence == 1
        await put(letters_of(ground), message)
        await streams.delete(ground.connection, stream)
    assert [one.source_sequence for one in await listed(ground)] == [1, 1]


async def test_the_sequence_is_that_of_the_groups_own_stream(make: MakeGround, unique: Any) -> None:
    """A stream that copies another one carries the other one's sequences in a header."""
    up = await make(stream=unique("up"), partitions=4)
    await up.publish(["gone", "gone", "k1"])
    await streams.purge(up.connection, up.stream, before_sequence=3)
    down = await make(stream=unique("down"), subjects=None, sources=[StreamSource(name=up.stream)])
    await down.static(members=["alice"])
    [message] = await gathered(down, 1)
    await put(letters_of(down), message)
    [letter] = await listed(down)
    assert (message.delivery_sequence, letter.source_sequence) == (1, 1)


async def test_no_text_becomes_a_header_of_its_own(partitioned: Ground) -> None:
    evil = "x\r\nKeylane-Tries: 99\r\n\r\nbody"
    await publish_bytes(
        partitioned, "k1", b"Own: a\nKeylane-Group: forged\r\nKeylane-Key: forged\r\nkeylane-key: f\r\n"
    )
    await partitioned.static(members=["alice"])
    [message] = await gathered(partitioned, 1, key=lambda _: evil)
    await letters_of(partitioned).put(message, member=evil, tries=3, error=ValueError(evil))
    [letter] = await listed(partitioned)
    assert (letter.key, letter.member, letter.group, letter.tries) == (evil, evil, "g", 3)
    assert letter.error == "ValueError: x Keylane-Tries: 99 body"
    assert letter.traceback == "ValueError: x\r\nKeylane-Tries: 99\r\n\r\nbody"
    assert letter.data == b""
    lines, _ = await raw_of(partitioned.connection, dead_letter_stream(partitioned.stream), 1)
    names = [name for name, _ in lines]
    assert names.count(b"Keylane-Tries") == names.count(b"Keylane-Group") == names.count(b"Keylane-Key") == 1
    assert names[13:] == [
        b"Own",
        b"Keylane-Original-Keylane-Group",
        b"Keylane-Original-Keylane-Key",
        b"Keylane-Original-keylane-key",
    ]


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\r\n b\tc"), "ValueError: a b c"),
        (ValueError(), "ValueError"),
        (TimeoutError("é\x1b[2J\udc80\u2028end"), "TimeoutError: é?[2J? end"),
        (Mute(), "Mute: (no text: RuntimeError)"),
        (ValueError("x" * 10_000), f"ValueError: {'x' * 487}…"),
    ],
)
def test_an_error_is_one_short_line(error: BaseException, line: str) -> None:
    assert error_line(error) == line
    assert len(line) <= 500


def deep(depth: int) -> None:
    if depth:
        deep(depth - 1)
    else:
        raise ValueError("é" * 3000)


async def test_a_dead_letter_has_the_end_of_a_long_traceback(ground: Ground) -> None:
    [message] = await given(ground)
    try:
        deep(300)
    except ValueError as error:
        await letters_of(ground).put(message, member="alice", tries=1, error=error)
    [letter] = await listed(ground)
    assert letter.traceback.startswith("…")
    assert letter.traceback.endswith("ééé")
    lines, _ = await raw_of(ground.connection, dead_letter_stream(ground.stream), 1)
    [value] = [value for name, value in lines if name == b"Keylane-Traceback"]
    assert 2_000 < len(value) <= 8_000


async def test_a_traceback_can_be_read_in_the_header_too(ground: Ground) -> None:
    [message] = await given(ground)
    try:
        deep(0)
    except ValueError as error:
        error.args = ("100% wrong",)
        await letters_of(ground).put(message, member="alice", tries=1, error=error)
    [letter] = await listed(ground)
    assert letter.traceback.startswith("Traceback (most recent call last):\n  File ")
    assert letter.traceback.endswith("\nValueError: 100% wrong")
    lines, _ = await raw_of(ground.connection, dead_letter_stream(ground.stream), 1)
    [value] = [value for name, value in lines if name == b"Keylane-Traceback"]
    assert value.startswith(b"Traceback (most recent call last):%0A  File ")


# ---- in, when something is wrong ------------------------------------------------------------------------


async def test_a_full_stream_refuses_and_loses_nothing(ground: Ground) -> None:
    first, second = await given(ground, ["k1", "k2"])
    letters, name = letters_of(ground), dead_letter_stream(ground.stream)
    await put(letters, first)
    config = (await streams.info(ground.connection, name)).config
    await streams.update(ground.connection, config.evolve(max_msgs=1))
    with pytest.raises(PublishRejected, match="maximum messages exceeded"):
        await put(letters, second)
    assert [one.source_sequence for one in await listed(ground)] == [1]
    await streams.update(ground.connection, config)
    await put(letters, second)
    assert [one.source_sequence for one in await listed(ground)] == [1, 2]


async def test_an_operators_limits_are_left_alone(ground: Ground) -> None:
    [message] = await given(ground)
    name = dead_letter_stream(ground.stream)
    made = StreamConfig(name=name, subjects=[f"keylane.dlq.{ground.stream}.>"], max_msgs=7, allow_direct=True)
    await streams.create(ground.connection, made)
    await put(letters_of(ground), message)
    assert (await streams.info(ground.connection, name)).config.max_msgs == 7
    assert len(await listed(ground)) == 1


async def test_another_stream_of_that_name_or_subject_is_refused(ground: Ground) -> None:
    [message] = await given(ground)
    letters, name = letters_of(ground), dead_letter_stream(ground.stream)
    await streams.create(ground.connection, StreamConfig(name=name, subjects=[f"{ground.stream}-mine"]))
    with pytest.raises(GroupConflict, match="it is not for dead letters"):
        await put(letters, message)
    await streams.delete(ground.connection, name)
    wide = StreamConfig(name=f"{ground.stream}_wide", subjects=[f"keylane.dlq.{ground.stream}.*.*"])
    ground.stack.push_async_callback(delete_quietly, ground.connection, f"{ground.stream}_wide")
    await streams.create(ground.connection, wide)
    with pytest.raises(GroupConflict, match="which another stream takes"):
        await put(letters, message)
    await streams.delete(ground.connection, f"{ground.stream}_wide")
    await put(letters, message)
    assert len(await listed(ground)) == 1


async def test_a_deleted_stream_is_made_again(ground: Ground) -> None:
    first, second = await given(ground, ["k1", "k2"])
    letters = letters_of(ground)
    await put(letters, first)
    await streams.delete(ground.connection, dead_letter_stream(ground.stream))
    await put(letters, second)
    assert [one.source_sequence for one in await listed(ground)] == [2]


async def test_a_message_without_room_for_headers_is_refused(partitioned: Ground) -> None:
    await partitioned.static(members=["alice"])
    await partitioned.publish(["k1"], b"x" * partitioned.connection.nats.max_payload)
    [message] = await gathered(partitioned, 1)
    with pytest.raises(InvalidInput, match="raise max_payload"):
        await put(letters_of(partitioned), message)


async def test_a_large_message_is_kept_whole(partitioned: Ground) -> None:
    data = b"x" * (partitioned.connection.nats.max_payload - 2_000)
    await partitioned.static(members=["alice"])
    await partitioned.publish(["k1"], data)
    [message] = await gathered(partitioned, 1)
    try:
        deep(100)
    except ValueError as error:  # its traceback does not fit beside the data
        await letters_of(partitioned).put(message, member="alice", tries=1, error=error)
    letter = await read_dead_letter(partitioned.connection, partitioned.stream, 1)
    assert (letter.data, letter.traceback) == (data, "")
    ack = await replay(partitioned.connection, partitioned.stream, 1)
    assert (await raw_of(partitioned.connection, partitioned.stream, ack.sequence))[1] == data


async def test_a_put_that_the_server_did_not_answer_can_be_repeated(
    own_server_ground: tuple[Ground, NatsServer],
) -> None:
    ground, server = own_server_ground
    first, second = await given(ground, ["k1", "k2"])
    letters = letters_of(ground)
    await put(letters, first)
    server.kill()
    with pytest.raises(KeylaneError):
        await letters.put(second, member="alice", tries=3, error=BAD)
    server.restart()
    async with asyncio.timeout(20):
        for message in (first, second):
            while True:
                try:
                    await put(letters, message)
                    break
                except KeylaneError:
                    await asyncio.sleep(0.1)  # the link comes back by itself; nobody tells when
    assert [one.source_sequence for one in await listed(ground)] == [1, 2]


# ---- look ---------------------------------------------------------------------------------------------


async def test_many_are_read_in_pages_and_chosen_from(ground: Ground) -> None:
    messages = await given(ground, [f"k{number % 7}" for number in range(300)])
    letters = letters_of(ground)
    for message in messages:
        await put(letters, message)
    await put(letters_of(ground, group="other"), messages[0])
    found = await listed(ground)
    assert [one.sequence for one in found] == list(range(1, 302))
    assert [one.source_sequence for one in found[:300]] == list(range(1, 301))
    assert [one.sequence for one in await listed(ground, group="other")] == [301]
    assert [one.sequence for one in await listed(ground, group="g", key="k3")] == list(range(4, 301, 7))
    partition = messages[3].partition
    in_partition = [one.sequence for one in messages if one.partition == partition]
    assert [one.source_sequence for one in await listed(ground, group="g", partition=partition)] == in_partition
    assert [one.sequence for one in await listed(ground, first=99, last=230)] == list(range(99, 231))
    assert [one.sequence for one in await listed(ground, first=250, limit=3)] == [250, 251, 252]
    assert await listed(ground, first=302) == []
    assert await listed(ground, first=999, last=9_999) == []
    assert await listed(ground, key="nobody") == []


async def test_none_at_all(ground: Ground) -> None:
    assert await listed(ground) == []
    with pytest.raises(NotFound, match="has no dead letter 1"):
        await read_dead_letter(ground.connection, ground.stream, 1)
    with pytest.raises(NotFound, match="has no dead letter 1"):
        await replay(ground.connection, ground.stream, 1)
    with pytest.raises(NotFound, match="has no dead letter 1"):
        await drop(ground.connection, ground.stream, 1)


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ({"group": "a.b"}, "'a.b'"),
        ({"partition": -1}, "partition is -1"),
        ({"first": 0}, "sequences start at 1"),
        ({"first": 5, "last": 4}, "the lower one comes first"),
        ({"limit": 0}, "limit is 0"),
    ],
)
async def test_wrong_input_is_refused(ground: Ground, which: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        await listed(ground, **which)


async def test_wrong_names_and_sequences_are_refused(connection: Connection) -> None:
    for stream, group in (("a.b", "g"), ("", "g"), ("S", "a b"), ("S", "a@b"), ("S" * 255, "g")):
        with pytest.raises(InvalidInput):
            DeadLetters(connection, stream, group)
    with pytest.raises(InvalidInput, match="timeout_s"):
        DeadLetters(connection, "S", "g", timeout_s=0)
    for call in (read_dead_letter, replay, drop):
        with pytest.raises(InvalidInput, match="sequences start at 1"):
            await call(connection, "S", 0)


async def test_what_others_wrote_into_the_stream_hides_nothing(ground: Ground) -> None:
    [message] = await given(ground)
    await put(letters_of(ground), message)
    await publish_many(ground.connection, [Outgoing(f"keylane.dlq.{ground.stream}.g.x", b"?", {"Keylane-Tries": "-1"})])
    ours, theirs = await listed(ground)
    assert ours.tries == 3
    assert (theirs.group, theirs.partition, theirs.tries, theirs.subject, theirs.data) == ("g", 0, 0, "", b"?")
    with pytest.raises(GroupError, match="is '', which is no subject"):
        await replay(ground.connection, ground.stream, theirs.sequence)
    await drop(ground.connection, ground.stream, theirs.sequence)
    assert await listed(ground) == [ours]


# ---- out ----------------------------------------------------------------------------------------------


async def test_a_replay_is_the_original_again(ground: Ground) -> None:
    data = b"\x00\xff\r\n"
    head = b"Colour: green\r\nColour: blue\r\nOdd: \xff\r\nNats-Msg-Id: mine\r\nKeylane-Key: own\r\n"
    await publish_bytes(ground, "k1", head, data)
    await ground.elastic(members=["alice"])
    [message] = await gathered(ground, 1)
    await put(letters_of(ground), message)
    ack = await replay(ground.connection, ground.stream, 1)
    assert ack == PublishAck(ground.stream, 2)
    lines, stored = await raw_of(ground.connection, ground.stream, 2)
    assert stored == data
    assert [line for line in lines if not line[0].startswith(b"Nats-")] == [
        (b"Colour", b"green"),
        (b"Colour", b"blue"),
        (b"Odd", b"\xff"),
        (b"Keylane-Key", b"own"),
    ]
    assert (b"Nats-Msg-Id", b"mine") not in lines
    assert await listed(ground) == []


async def test_a_replayed_message_reaches_the_group_and_may_fail_again(ground: Ground) -> None:
    await ground.elastic(members=["alice"])
    await ground.publish(["k1"])
    letters = letters_of(ground)
    broken, healed = asyncio.Event(), asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        if message.sequence < 3:
            await put(letters, message)
            broken.set()
        else:
            healed.set()

    await ground.join("alice", handler)
    async with asyncio.timeout(20):
        await broken.wait()
        broken.clear()
        await replay(ground.connection, ground.stream, 1)
        await broken.wait()
        [again] = await listed(ground)
        assert (again.sequence, again.source_sequence, again.subject) == (2, 2, f"{ground.stream}.k1")
        await replay(ground.connection, ground.stream, 2)
        await healed.wait()
    assert await listed(ground) == []


async def test_a_replay_goes_through_the_streams_transform_again(partitioned: Ground) -> None:
    await partitioned.static(members=["alice"])
    await partitioned.publish(["k1"])
    [message] = await gathered(partitioned, 1)
    await put(letters_of(partitioned), message)
    ack = await replay(partitioned.connection, partitioned.stream, 1)
    wire = await partitioned.connection.api.request(f"STREAM.MSG.GET.{partitioned.stream}", {"seq": ack.sequence})
    assert wire["message"]["subject"] == message.delivery.subject


async def test_a_replay_happens_once(ground: Ground) -> None:
    first, second = await given(ground, ["k1", "k2"])
    letters = letters_of(ground)
    await put(letters, first)
    await put(letters, second)
    await replay(ground.connection, ground.stream, 1)
    with pytest.raises(NotFound, match="has no dead letter 1"):
        await replay(ground.connection, ground.stream, 1)
    others = [await ground.client() for _ in range(5)]
    await asyncio.gather(*(replay(one, ground.stream, 2) for one in others), return_exceptions=True)
    assert (await streams.state(ground.connection, ground.stream)).messages == 4
    assert await listed(ground) == []


async def test_a_subject_that_another_stream_took_is_not_replayed(ground: Ground) -> None:
    [message] = await given(ground)
    await put(letters_of(ground), message)
    config = (await streams.info(ground.connection, ground.stream)).config
    await streams.update(ground.connection, config.evolve(subjects=[f"{ground.stream}.new.>"]))
    other = f"{ground.stream}_other"
    await streams.create(ground.connection, StreamConfig(name=other, subjects=[f"{ground.stream}.k1"]))
    ground.stack.push_async_callback(delete_quietly, ground.connection, other)
    with pytest.raises(GroupError, match="belongs to another stream"):
        await replay(ground.connection, ground.stream, 1)
    assert (await streams.state(ground.connection, other)).messages == 0
    assert len(await listed(ground)) == 1


async def test_a_forged_subject_sends_nothing(ground: Ground) -> None:
    [message] = await given(ground)
    await put(letters_of(ground), message)
    forged = f"{ground.stream}.a 0%0D%0A%0D%0APUB {ground.stream}.b 0%0D%0A%0D%0A"
    outgoing = Outgoing(f"keylane.dlq.{ground.stream}.g.0", b"", {"Keylane-Subject": forged})
    [ack] = await publish_many(ground.connection, [outgoing])
    assert isinstance(ack, PublishAck)
    with pytest.raises(GroupError, match="which is no subject"):
        await replay(ground.connection, ground.stream, ack.sequence)
    await ground.connection.nats.flush()
    assert (await streams.state(ground.connection, ground.stream)).messages == 1


async def test_dropping(ground: Ground) -> None:
    messages = await given(ground, ["k1", "k2", "k3"])
    letters = letters_of(ground)
    for message in messages:
        await put(letters, message)
    await drop(ground.connection, ground.stream, 2)
    for missing in (2, 99):
        with pytest.raises(NotFound, match=f"has no dead letter {missing}"):
            await drop(ground.connection, ground.stream, missing)
    assert [one.sequence for one in await listed(ground)] == [1, 3]
