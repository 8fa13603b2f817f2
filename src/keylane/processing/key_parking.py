"""Parks keys: a message that had all its tries stops its key, and later messages of the key are stored behind it.

Parked messages are dead letters on a subject of their key, in the order in which they were parked. A key is parked as
long as it has one. An operator releases a key by a wish in the same stream; the owner of the key's partition then runs
the parked messages in order, while newer ones are still stored behind them, and lets the key go on when none is left.

Only the owner of a partition parks its keys. It proves that with a fence: before its first message of a partition an
owner writes a record of its own, and every parked message is stored on the condition that this record is the last one.
So an owner that was replaced, and does not know it yet, parks nothing behind the back of the next one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from keylane.core.parked_keys import (
    AfterTries,
    KeyGate,
    ParkedKeys,
    check_after_tries,
    fence_subject,
    key_token,
    parked_subject,
    release_subject,
)
from keylane.errors import (
    Fenced,
    GroupError,
    InvalidInput,
    KeylaneError,
    NotFound,
    PermissionDenied,
    PublishRejected,
)
from keylane.jetstream import Message, parse_headers, parse_time, publish_raw, streams
from keylane.processing.dead_letters import (
    DeadLetter,
    DeadLetters,
    dead_letter_stream,
    ensure_dead_letter_stream,
    header_block,
    original_lines,
    read_letter,
)
from keylane.processing.handler_options import HandlerOptions, MessageJournal
from keylane.processing.message import GroupMessage, Place
from keylane.processing.message_processor import MessageProcessor
from keylane.processing.origin import MessageOrigin
from keylane.processing.settlement import KeyIsParked
from keylane.retrying import Backoff, backoff_s

if TYPE_CHECKING:
    from keylane.jetstream import Client, Connection

_log = logging.getLogger("keylane.groups")

_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 5.0
_LOOK_AGAIN_S = 0.05
_FENCE_TRIES = 10
_STREAM_NOT_FOUND = 10059
_WRONG_LAST = 10071
_IN_FLIGHT = 10164
"""A cluster refuses a second write under one condition while the first is on its way."""


class KeyRelease(NamedTuple):
    """A wish that a key be released."""

    token: str
    key: str
    subject: str
    """What one of its messages was published on."""
    partition: int
    sequence: int
    """Of the wish itself."""


class KeyOwner(NamedTuple):
    """Who handles a key now."""

    partition: str
    processor: MessageProcessor
    origin: MessageOrigin


@dataclass(slots=True)
class _Hold:
    """One partition while one owner has it."""

    mark: tuple[int, str | None]
    fence: int
    """The sequence of the owner's fence."""
    keys: ParkedKeys
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ReleasedMessage(GroupMessage):
    """A parked message that is handled now. It is deleted when its handler returns."""

    __slots__ = ()

    async def ack_confirmed(self, timeout_s: float = 5.0) -> None:
        raise InvalidInput("a released message is settled when the handler returns: return, or raise")

    def _say(self, outcome: object, send: Callable[[], None]) -> None:
        raise InvalidInput("a released message is settled when the handler returns: return, or raise")


class KeyParking:
    """Parks and releases the keys of one group or fleet, for one member or worker."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        group: str,
        *,
        max_tries: int,
        journal: MessageJournal | None = None,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._group = group
        self._max_tries = max_tries
        self._journal = journal
        self._name = dead_letter_stream(stream)
        self._letters = DeadLetters(connection, stream, group)
        self._holds: dict[str, _Hold] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._releasing: set[str] = set()

    def __repr__(self) -> str:
        return f"<KeyParking of {self._stream}/{self._group}>"

    async def start(self) -> None:
        await ensure_dead_letter_stream(self._connection, self._stream, like=self._stream)

    # ---- parking --------------------------------------------------------------------------------------------

    async def gate(self, message: GroupMessage) -> KeyGate:
        """Whether the handler is called with this message."""
        partition, origin = _partition_of(message), message.origin
        hold = self._holds.get(partition)
        if hold is None or hold.mark != (origin.revision, origin.pin_id):
            hold = await self._hold(partition, origin)
        if hold.keys.is_plain:
            return KeyGate.RUN
        return hold.keys.gate(key_token(message.key), message.sequence)

    async def give_up(self, message: GroupMessage, error: BaseException, tries: int) -> None:
        """Park a message. Returns when it is stored; else raises, and may be called again."""
        partition, token = _partition_of(message), key_token(message.key)
        hold = await self._hold(partition, message.origin)
        async with hold.lock:
            if message.sequence > await self._newest(hold, token):
                await self._store(hold, partition, token, message, error, tries)
        is_behind = isinstance(error, KeyIsParked)
        hold.keys.stored(token, message.sequence, behind=is_behind)
        if not is_behind:
            _log.error(
                "key %r of %s/%s is parked after %d tries of sequence %d: keylane dlq release %s %s %s",
                message.key,
                self._stream,
                self._group,
                tries,
                message.sequence,
                self._stream,
                self._group,
                message.key,
            )

    async def _newest(self, hold: _Hold, token: str) -> int:
        """The newest sequence that is parked for a key: what comes again after a crash is not parked twice."""
        newest = hold.keys.newest(token)
        if newest is not None:
            return newest
        try:
            letter, _ = await self._letter(last_by_subject=parked_subject(self._stream, self._group, token))
        except NotFound:
            return 0
        return letter.source_sequence

    async def _store(  # noqa: PLR0917 - what is stored, where, and why
        self, hold: _Hold, partition: str, token: str, message: GroupMessage, error: BaseException, tries: int
    ) -> None:
        conditions = {
            "Nats-Expected-Last-Subject-Sequence": str(hold.fence),
            "Nats-Expected-Last-Subject-Sequence-Subject": fence_subject(self._stream, self._group, partition),
        }
        while True:
            try:
                await self._letters.store(
                    message,
                    parked_subject(self._stream, self._group, token),
                    member=message.origin.member,
                    tries=tries,
                    error=error,
                    conditions=conditions,
                )
            except PublishRejected as refused:
                if refused.err_code == _IN_FLIGHT:
                    await asyncio.sleep(_LOOK_AGAIN_S)
                    continue
                if refused.err_code != _WRONG_LAST:
                    raise
                self._holds.pop(partition, None)
                raise _replaced(message.origin, partition) from refused
            return

    # ---- ownership ------------------------------------------------------------------------------------------

    async def _hold(self, partition: str, origin: MessageOrigin) -> _Hold:
        """The partition as its owner of now has it. Raises `Fenced` if that is somebody else."""
        async with self._opening.setdefault(partition, asyncio.Lock()):
            mark = origin.revision, origin.pin_id
            hold = self._holds.get(partition)
            if hold is None or hold.mark != mark:
                fence = await self._write_fence(partition, origin)
                parked = parked_subject(self._stream, self._group, "*")
                found = await streams.subjects(self._connection, self._name, parked)
                hold = _Hold(mark, fence, ParkedKeys(subject.rpartition(".")[2] for subject in found))
                self._holds[partition] = hold
            return hold

    async def _write_fence(self, partition: str, origin: MessageOrigin) -> int:
        subject = fence_subject(self._stream, self._group, partition)
        for _ in range(_FENCE_TRIES):
            before, owner = await self._fence(subject)
            source, token = await origin.source(), await origin.fence(anew=True)
            if owner.get("bucket") == source.bucket and tuple(owner["token"]) > token:
                raise _replaced(origin, partition)
            head = header_block(
                [
                    (b"Nats-Expected-Last-Subject-Sequence", str(before).encode()),
                    (b"Nats-Expected-Stream", self._name.encode()),
                ]
            )
            mine = json.dumps({"bucket": source.bucket, "token": token, "member": origin.member}).encode()
            try:
                written = await publish_raw(self._connection, subject.encode(), head, mine, _TIMEOUT_S)
            except PublishRejected as refused:
                if refused.err_code not in (_WRONG_LAST, _IN_FLIGHT):
                    raise
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            if before:
                with suppress(KeylaneError):  # it only takes space
                    await streams.delete_message(self._connection, self._name, before)
            return written.sequence
        raise Fenced(f"partition {partition} of {self._stream}/{self._group}: others write its fence again and again")

    async def _fence(self, subject: str) -> tuple[int, dict[str, Any]]:
        try:
            wire = await streams.get_message(self._connection, self._name, last_by_subject=subject)
        except NotFound as error:
            if error.err_code == _STREAM_NOT_FOUND:
                await self.start()
            return 0, {}
        return int(wire["seq"]), json.loads(base64.b64decode(wire["data"]))

    # ---- releasing ------------------------------------------------------------------------------------------

    async def watch(
        self, owner_of: Callable[[KeyRelease], KeyOwner | None], run: Callable[[GroupMessage], Awaitable[object]]
    ) -> None:
        """KeyRelease the keys that are wished for and handled here, until cancelled. `run`: calls the handler."""
        hinted = asyncio.Event()
        client = self._connection.nats
        route = await client.route(release_subject(self._stream, self._group, "*"), _Hints(hinted.set))
        backoff = Backoff(f"keys to release of {self._stream}/{self._group}", log=_log)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    hinted.clear()
                    found = await backoff.call(self._wishes)
                    await backoff.call(self._unpark_dropped)
                    for wish in found:
                        owner = owner_of(wish) if wish.token not in self._releasing else None
                        if owner is not None:
                            self._releasing.add(wish.token)
                            tasks.create_task(self._release(wish, owner, owner_of, run))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_EVERY_S if not found else 2 * _LOOK_AGAIN_S):
                            await hinted.wait()
                            await asyncio.sleep(_LOOK_AGAIN_S)  # a hint may come before what it is about is stored
        finally:
            await client.unroute(route)

    async def _unpark_dropped(self) -> None:
        """A key whose parked messages somebody has dropped goes on."""
        looks = {
            (partition, token): hold.keys.stores(token)
            for partition, hold in self._holds.items()
            for token in hold.keys
            if token not in self._releasing
        }
        if not looks:
            return
        parked = parked_subject(self._stream, self._group, "*")
        try:
            found = await streams.subjects(self._connection, self._name, parked)
        except NotFound:
            found = []
        there = {subject.rpartition(".")[2] for subject in found}
        for (partition, token), stores in looks.items():
            hold = self._holds.get(partition)
            if token not in there and token not in self._releasing and hold is not None:
                hold.keys.found_empty(token, stores)

    async def _wishes(self) -> list[KeyRelease]:
        return await wishes(self._connection, self._stream, self._group)

    async def _release(
        self,
        wish: KeyRelease,
        owner: KeyOwner,
        owner_of: Callable[[KeyRelease], KeyOwner | None],
        run: Callable[[GroupMessage], Awaitable[object]],
    ) -> None:
        try:
            if await self._release_all(wish, owner, lambda: owner_of(wish) == owner, run):
                with suppress(NotFound):
                    await streams.delete_message(self._connection, self._name, wish.sequence)
        except asyncio.CancelledError:
            if not (task := asyncio.current_task()) or task.cancelling():
                raise  # else the handler was cancelled, as somebody else has the partition
        except KeylaneError as error:
            _log.warning("key %r is not released yet, and tried again: %s", wish.key, error)
        finally:
            self._releasing.discard(wish.token)

    async def _release_all(
        self,
        wish: KeyRelease,
        owner: KeyOwner,
        is_owner: Callable[[], bool],
        run: Callable[[GroupMessage], Awaitable[object]],
    ) -> bool:
        """Handle what is parked, in order. Returns whether the wish is met, also if a message failed again; False: the
        partition went away meanwhile."""
        keys = (await self._hold(owner.partition, owner.origin)).keys
        subject = parked_subject(self._stream, self._group, wish.token)
        released = 0
        while is_owner():
            stores = keys.stores(wish.token)
            try:
                letter, raw = await self._letter(next_by_subject=subject, sequence=1)
            except NotFound:
                if keys.found_empty(wish.token, stores):
                    _log.info("key %r goes on: %d parked messages were handled", wish.key, released)
                    return True
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            message = _released_message(letter, raw, owner.origin, self._name)
            for tries in range(1, self._max_tries + 1):
                if not is_owner():
                    return False
                started_ns = self._journal.now_ns() if self._journal is not None else 0
                try:
                    await owner.processor.run_beside(message, self._handle(message, letter, keys, wish, run))
                except Fenced:
                    raise
                except Exception as error:  # noqa: BLE001 - a handler may raise anything
                    _log.warning("released %r failed (try %d): %s", message, tries, error, exc_info=error)
                    self._note(message, "parked" if tries == self._max_tries else "failed", started_ns)
                    if tries == self._max_tries:
                        _log.error("key %r stays parked: sequence %d failed again", wish.key, letter.source_sequence)
                        return True
                    await asyncio.sleep(backoff_s(tries))
                else:
                    self._note(message, "done", started_ns)
                    released += 1
                    break
        return False

    def _note(self, message: GroupMessage, outcome: str, started_ns: int) -> None:
        if self._journal is not None:
            self._journal.note(message, outcome, started_ns, self._journal.now_ns())

    async def _handle(
        self,
        message: GroupMessage,
        letter: DeadLetter,
        keys: ParkedKeys,
        wish: KeyRelease,
        run: Callable[[GroupMessage], Awaitable[object]],
    ) -> None:
        await run(message)
        keys.handled(wish.token, letter.source_sequence)
        backoff = Backoff(f"deleting the parked message {letter.sequence} of stream {self._name}", log=_log)
        with suppress(NotFound):
            await backoff.call(lambda: streams.delete_message(self._connection, self._name, letter.sequence))

    async def _letter(self, **which: Any) -> tuple[DeadLetter, bytes]:
        return await _stored_letter(self._connection, self._name, **which)


async def _stored_letter(connection: Connection, name: str, **which: Any) -> tuple[DeadLetter, bytes]:
    """A parked message as the leader has it, and its header block. `which`: as for `streams.get_message`."""
    wire = await streams.get_message(connection, name, **which)
    raw, data = (base64.b64decode(wire.get(part, "")) for part in ("hdrs", "data"))
    return read_letter(int(wire["seq"]), parse_time(wire["time"]), wire["subject"], parse_headers(raw), data), raw


class _Hints:
    def __init__(self, hinted: Callable[[], None]) -> None:
        self._hinted = hinted

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self._hinted()

    def received(self) -> None:
        """Each hint is taken in `receive`."""


def _partition_of(message: GroupMessage) -> str:
    """A fleet names its partitions; the same number may be in two generations of them."""
    return getattr(message.origin, "partition", None) or str(message.partition)


def _replaced(origin: MessageOrigin, partition: str) -> Fenced:
    return Fenced(
        f"{origin.member} of {origin.stream}/{origin.group} does not own partition {partition} any more: the next "
        "owner has begun"
    )


def _released_message(letter: DeadLetter, raw: bytes, origin: MessageOrigin, stream: str) -> ReleasedMessage:
    reply = f"$JS.ACK.{stream}.released.1.{letter.source_sequence}.1.{letter.stored_ns}.0"
    subject = letter.subject.encode("utf-8", "surrogateescape")
    head = header_block(original_lines(raw))
    delivery = Message(cast("Client", None), subject, reply.encode(), head, letter.data)
    return ReleasedMessage(delivery, Place.of(letter.partition, letter.subject, letter.key), origin)


# ---- an operator's side ---------------------------------------------------------------------------------


async def release(connection: Connection, stream: str, group: str, key: str) -> int:
    """Ask for the release of a parked key; returns how many messages are parked for it. Raises `NotFound`.

    The member or worker that owns the key's partition handles them, in order, as soon as one runs.
    """
    name, token = dead_letter_stream(stream), key_token(key)
    subject = parked_subject(stream, group, token)
    try:
        waiting = await parked_count(connection, stream, group, key)
        letter, _ = await _stored_letter(connection, name, last_by_subject=subject)
    except NotFound as error:
        raise NotFound(
            error.code, error.err_code, f"key {key!r} of {stream}/{group} is not parked: look with `keylane dlq ls`"
        ) from error
    await _wish(connection, stream, group, letter)
    return waiting


async def _wish(connection: Connection, stream: str, group: str, letter: DeadLetter) -> None:
    wish = json.dumps({"key": letter.key, "subject": letter.subject, "partition": letter.partition}).encode()
    head = header_block([(b"Nats-Expected-Stream", dead_letter_stream(stream).encode())])
    subject = release_subject(stream, group, key_token(letter.key))
    await publish_raw(connection, subject.encode(), head, wish, _TIMEOUT_S)


async def wishes(connection: Connection, stream: str, group: str) -> list[KeyRelease]:
    """The keys that are to be released and were not yet."""
    name, found = dead_letter_stream(stream), []
    try:
        subjects = await streams.subjects(connection, name, release_subject(stream, group, "*"))
    except NotFound:
        return []
    for subject in subjects:
        with suppress(NotFound):  # it was met meanwhile
            wire = await streams.get_message(connection, name, last_by_subject=subject)
            wish = json.loads(base64.b64decode(wire["data"]))
            token, sequence = subject.rpartition(".")[2], int(wire["seq"])
            found.append(KeyRelease(token, wish["key"], wish["subject"], wish["partition"], sequence))
    return found


class ReleaseResult(NamedTuple):
    """How far a release came."""

    left: int
    """Messages that are still parked."""
    is_wished: bool
    """Whether it is still to be done: nobody has, or somebody is at it."""


async def wait_for_release(
    connection: Connection, stream: str, group: str, key: str, timeout_s: float
) -> ReleaseResult:
    """Wait until a wish is met, one way or the other."""
    end, token = asyncio.get_running_loop().time() + timeout_s, key_token(key)
    while True:
        is_wished = any(one.token == token for one in await wishes(connection, stream, group))
        left = await parked_count(connection, stream, group, key)
        if not left or not is_wished or asyncio.get_running_loop().time() > end:
            return ReleaseResult(left, is_wished)
        await asyncio.sleep(2 * _LOOK_AGAIN_S)


async def parked_count(connection: Connection, stream: str, group: str, key: str) -> int:
    """How many messages of a key are parked."""
    subject = parked_subject(stream, group, key_token(key))
    try:
        info = await streams.info_json(connection, dead_letter_stream(stream), subjects_filter=subject)
    except NotFound:
        return 0
    return int((info["state"].get("subjects") or {}).get(subject, 0))


async def with_parking(
    connection: Connection, stream: str, group: str, options: HandlerOptions, after_tries: AfterTries
) -> tuple[HandlerOptions, KeyParking | None]:
    """The options of a member or worker that parks; of one that does not, unless keys are parked."""
    check_after_tries(after_tries, max_tries=options.max_tries, order=options.order, manual_ack=options.manual_ack)
    if after_tries != "park":
        await _refuse_parked(connection, stream, group)
        return options, None
    assert options.max_tries is not None
    parking = KeyParking(connection, stream, group, max_tries=options.max_tries, journal=options.journal)
    await parking.start()
    return replace(options, give_up=parking.give_up, gate=parking.gate), parking


async def _refuse_parked(connection: Connection, stream: str, group: str) -> None:
    """Raise if keys are parked: a member that does not park would handle their later messages first."""
    try:
        found = await streams.subjects(connection, dead_letter_stream(stream), parked_subject(stream, group, "*"))
    except (NotFound, PermissionDenied):
        return
    if found:
        raise GroupError(
            f"{len(found)} keys of {stream}/{group} are parked: join with after_tries='park', or first release or drop "
            f"what is parked (keylane dlq ls {stream} {group})"
        )
