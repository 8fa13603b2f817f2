"""`TestApp`: the handlers of an app in memory, with the lanes, retries, decoding and dead letters of real ones.

No server: messages are delivered as soon as they are published, and what handlers return is published in turn. Retries
do not wait; delayed ones run, in the order of their times, when nothing else is left to do. Keys are parked and
released by the rules of real ones. What needs a server or several processes (moves of partitions, kills) is tested with
`keylane_app`.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from keylane.app import App, AppHandler, Results
from keylane.app.payloads import encode
from keylane.app.running import called
from keylane.app.stream_partitions import PARTITIONS
from keylane.core.parked_keys import KeyGate, ParkedKeys, check_after_tries, key_token
from keylane.core.partitions import PartitionBy, insert_partition
from keylane.core.retry_delays import delay_after, total_tries
from keylane.core.subjects import check_subject, matches
from keylane.dispatch import HandlerCall
from keylane.errors import InvalidInput
from keylane.jetstream import Message, encode_headers
from keylane.processing.delayed_retries import RetriedMessage
from keylane.processing.handler_options import HandlerOptions
from keylane.processing.message import GroupMessage, OriginFacts, placing_by
from keylane.processing.message_processor import MessageProcessor, handler_call
from keylane.processing.settlement import KeyIsParked

if TYPE_CHECKING:
    from keylane.jetstream import Client
    from keylane.processing.origin import MessageOrigin

_log = logging.getLogger("keylane.testing")

_ACK_WAIT_S = 30.0
_SETTLED_S = 10.0
_OWN_OPTIONS = ("concurrency", "max_tries", "time_limit_s")


class TestedMessage(NamedTuple):
    """A message that was published."""

    subject: str
    data: bytes
    message_id: str | None = None


@dataclass(frozen=True, slots=True)
class TestedDeadLetter:
    """A message that was given up."""

    group: str
    message: GroupMessage
    error: BaseException
    tries: int


@dataclass(frozen=True, slots=True)
class TestedDelay:
    """A message that failed and was to be tried again later."""

    group: str
    message: GroupMessage
    error: BaseException
    tries: int
    """How often it had failed."""
    delay_s: float


@dataclass(frozen=True, slots=True)
class TestedParked:
    """A message that is parked."""

    group: str
    message: GroupMessage
    error: BaseException
    tries: int
    """0: it did not run; an earlier message of its key is parked."""


class TestApp:
    """Runs an app's handlers in memory.

    >>> async with TestApp(app) as test:
    ...     await test.publish("orders.42", Order(cents=5))
    ...     await test.settled()
    ...     assert test.published == [...]
    """

    __test__ = False  # pytest takes a class of such a name for tests

    def __init__(self, app: App) -> None:
        self._app = app
        self._handlers: list[_HandlerRun] = []
        self._sequences: Counter[str] = Counter()
        self._ids: set[str] = set()
        self.published: list[TestedMessage] = []
        """What handlers have returned, in order; a repeat is not published a second time."""
        self.dead_letters: list[TestedDeadLetter] = []
        self.delays: list[TestedDelay] = []
        """Each failure after which a message was to be tried again later, by `retry_delays`, in order."""
        self._clock_s = 0.0
        self._due: list[tuple[float, int, _HandlerRun, RetriedMessage]] = []
        self._numbers = count(1)

    async def __aenter__(self) -> Self:
        for call in self._app.starting:
            await called(call)
        self._handlers = [_HandlerRun(one, self) for one in self._app.handlers.values()]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._handlers:
            await one.close()
        for call in reversed(self._app.stopping):
            await called(call)

    async def publish(
        self, subject: str, payload: Any = b"", *, headers: dict[str, str] | None = None, stream: str | None = None
    ) -> None:
        """Publish a message: bytes as they are, anything else as a handler's result.

        Handlers whose `partition_by` selects the subject get it; those without one only where `stream` names theirs.
        """
        check_subject(subject)
        if not self._deliver(subject, encode(payload), headers or {}, stream):
            raise InvalidInput(
                f"no handler takes {subject!r}: look at partition_by, or name the stream of a handler without one"
            )

    async def settled(self, deadline_s: float = _SETTLED_S) -> None:
        """Wait until everything is handled, also what handlers have published, and delayed retries.

        Nobody waits for the delays: when nothing else is left, the next retry is due.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    while busy := [one for one in self._handlers if one.has_messages]:
                        await busy[0].finish()
                    if not self._due:
                        return
                    self._clock_s, _, run, message = heapq.heappop(self._due)
                    run.retry(message)
        except TimeoutError:
            names = ", ".join(one.handler.name for one in self._handlers if one.has_messages)
            raise TimeoutError(f"not everything was handled within {deadline_s:g} s: {names}") from None

    @property
    def parked(self) -> list[TestedParked]:
        """What is parked now: key by key, each in its order."""
        return [letter for one in self._handlers for letters in one.parked.values() for letter in letters]

    async def release(self, group: str, key: str) -> int:
        """Release a parked key of a group: its messages are handled in order. Returns how many are left.

        As `keylane dlq release`: one that fails again, after its tries, keeps the key parked.
        """
        for one in self._handlers:
            if one.handler.group == group and key_token(key) in one.parked:
                return await one.release(key_token(key))
        raise InvalidInput(f"key {key!r} of group {group!r} is not parked: `parked` has what is")

    def delay(self, run: _HandlerRun, message: GroupMessage, error: BaseException, tries: int, delay_s: float) -> None:
        """Take a message that is to be tried again later."""
        self.delays.append(TestedDelay(run.handler.group, message, error, tries, delay_s))
        number = next(self._numbers)
        reply = f"$JS.ACK.{run.handler.stream}.retry.1.{number}.{number}.0.0".encode()
        due = Message(cast("Client", _NoClient()), message.delivery.raw_subject, reply, b"", message.data)
        again = RetriedMessage(due, message.place, message.origin, original=_tried(message, tries), tries=tries)
        heapq.heappush(self._due, (self._clock_s + delay_s, number, run, again))

    async def result(self, subject: str, data: bytes, message_id: str) -> None:
        """Take what a handler returned."""
        if message_id not in self._ids:
            self._ids.add(message_id)
            self.published.append(TestedMessage(subject, data, message_id))
            self._deliver(subject, data, {"Nats-Msg-Id": message_id}, None)

    def _deliver(self, subject: str, data: bytes, headers: dict[str, str], stream: str | None) -> bool:
        takers = [one for one in self._handlers if one.takes(subject, stream)]
        for name in dict.fromkeys(one.handler.stream for one in takers):
            self._sequences[name] += 1
        for one in takers:
            one.deliver(subject, data, headers, self._sequences[one.handler.stream])
        return bool(takers)


class _HandlerRun:
    """One handler, and its messages."""

    def __init__(self, handler: AppHandler, test: TestApp) -> None:
        self.handler = handler
        self.parked: dict[str, list[TestedParked]] = {}
        """By the token of their key."""
        self._keys = ParkedKeys([])
        self._parks = handler.options.get("after_tries") == "park"
        self._delays = handler.options.get("retry_delays")
        self._test = test
        by = handler.partition_by or PartitionBy(">")
        self._partitioning = by.over(handler.partitions or PARTITIONS)
        self._place = placing_by([self._partitioning], whole_subject=not self._partitioning.wildcards)
        results = Results(handler.publish, test.result, "") if handler.publish is not None else None
        own = {name: handler.options[name] for name in _OWN_OPTIONS if name in handler.options}
        if not handler.signature.is_async:
            own.pop("time_limit_s", None)  # of a process: a thread cannot be ended
        options = HandlerOptions(
            order="key",
            ack_wait_s=_ACK_WAIT_S,
            remember=1000,
            give_up=self._give_up,
            on_failure=handler.hooks.on_failure,
            backoff=lambda _: 0.0,
            gate=self._gate if self._parks else None,
            delay=self._delay if self._delays is not None else None,
            **own,
        )
        if self._delays is not None:
            options = replace(options, max_tries=total_tries(self._delays, options.max_tries))
        if self._parks:
            check_after_tries("park", max_tries=options.max_tries, order=options.order, manual_ack=False)
        self._max_tries = options.max_tries
        self._call: HandlerCall[GroupMessage] = handler_call(handler.bound(results, may_leave=False), options)
        self._lanes = MessageProcessor(self._call, options, handler.name, on_crash=lambda: None)
        apart = replace(options, order="none")
        self._retries = MessageProcessor(self._call, apart, handler.name, on_crash=lambda: None)

    def takes(self, subject: str, stream: str | None) -> bool:
        by = self.handler.partition_by
        if stream is not None and stream != self.handler.stream:
            return False
        return matches(by.filter, subject) if by is not None else stream is not None

    def deliver(self, subject: str, data: bytes, headers: dict[str, str], sequence: int) -> None:
        stored = insert_partition(self._partitioning.partition(subject), subject).encode()
        stream, group = self.handler.stream, self.handler.group
        reply = f"$JS.ACK.{stream}.{group}.1.{sequence}.{sequence}.{time.time_ns()}.0".encode()
        raw = encode_headers(headers) if headers else b""
        delivery = Message(cast("Client", _NoClient()), stored, reply, raw, data)
        origin = OriginFacts(stream, group, self.handler.member or "test", "test", 1, None, from_queue=False)
        self._lanes.offer([GroupMessage(delivery, self._place(stored), cast("MessageOrigin", origin))])

    def retry(self, message: RetriedMessage) -> None:
        """The time of a delayed retry has come."""
        self._retries.offer([message])

    @property
    def has_messages(self) -> bool:
        return self._lanes.has_messages or self._retries.has_messages

    async def finish(self) -> None:
        for one in (self._lanes, self._retries):
            await one.finish()
            if one.crash is not None:
                raise one.crash

    async def close(self) -> None:
        await self._lanes.close()
        await self._retries.close()
        await self._call.close()

    async def release(self, token: str) -> int:
        letters = self.parked[token]
        while True:
            stores = self._keys.stores(token)
            if letters:
                message = letters[0].message
                if not await self._handle_released(message):
                    return len(letters)
                self._keys.handled(token, message.sequence)
                del letters[0]
            elif self._keys.found_empty(token, stores):
                del self.parked[token]
                return 0
            else:
                await self.finish()  # a later message is on its way to be parked

    async def _handle_released(self, message: GroupMessage) -> bool:
        assert self._max_tries is not None
        for tries in range(1, self._max_tries + 1):
            try:
                await self._call.handle(message)
            except Exception as error:  # noqa: BLE001 - a handler may raise anything
                _log.warning("released %r failed (try %d): %s", message, tries, error, exc_info=error)
            else:
                return True
        return False

    async def _gate(self, message: GroupMessage) -> KeyGate:
        return self._keys.gate(key_token(message.key), message.sequence)

    async def _delay(self, message: GroupMessage, error: BaseException, tries: int) -> None:
        assert self._delays is not None
        self._test.delay(self, message, error, tries, delay_after(self._delays, tries))

    async def _give_up(self, message: GroupMessage, error: BaseException, tries: int) -> None:
        if not self._parks:
            self._test.dead_letters.append(TestedDeadLetter(self.handler.group, message, error, tries))
            return
        token = key_token(message.key)
        self.parked.setdefault(token, []).append(TestedParked(self.handler.group, message, error, tries))
        self._keys.stored(token, message.sequence, behind=isinstance(error, KeyIsParked))


def _tried(message: GroupMessage, tries: int) -> Message:
    """The original as it looks after so many tries."""
    one = message.original
    words = one.reply.split(b".")
    words[4] = str(tries + 1).encode()
    return Message(cast("Client", _NoClient()), one.raw_subject, b".".join(words), one.raw_headers, one.data)


class _NoClient:
    """Takes acks, and does nothing with them."""

    def __init__(self) -> None:
        self.outbox: list[bytes] = []
        self.push_handle = self

    def post(self, command: bytes) -> None:
        self.outbox.append(command)
