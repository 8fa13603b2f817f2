"""`TestApp`: the handlers of an app in memory, with the lanes, retries, decoding and dead letters of real ones.

No server: messages are delivered as soon as they are published, and what handlers return is published in turn. Retries
do not wait. What needs a server or several processes (moves of partitions, kills) is tested with `keylane_app`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from keylane.app import App, AppHandler, Results
from keylane.app.payloads import encode
from keylane.app.running import called
from keylane.app.stream_partitions import PARTITIONS
from keylane.core.partitions import PartitionBy, insert_partition
from keylane.core.subjects import check_subject, matches
from keylane.dispatch import HandlerCall
from keylane.errors import InvalidInput
from keylane.jetstream import Message, encode_headers
from keylane.processing.handler_options import HandlerOptions
from keylane.processing.message import GroupMessage, OriginFacts, placing_by
from keylane.processing.message_processor import MessageProcessor, handler_call

if TYPE_CHECKING:
    from keylane.jetstream import Client
    from keylane.processing.origin import MessageOrigin

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
        """Wait until everything is handled, also what handlers have published."""
        try:
            async with asyncio.timeout(deadline_s):
                while busy := [one for one in self._handlers if one.processor.has_messages]:
                    await busy[0].processor.finish()
                    busy[0].check()
        except TimeoutError:
            names = ", ".join(one.handler.name for one in self._handlers if one.processor.has_messages)
            raise TimeoutError(f"not everything was handled within {deadline_s:g} s: {names}") from None

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
        if handler.options.get("after_tries", "dead_letter") != "dead_letter":
            raise InvalidInput(f"handler {handler.signature.name}: TestApp does not park keys; test it on a server")
        self.handler = handler
        self._test = test
        by = handler.partition_by or PartitionBy(">")
        self._partitioning = by.over(handler.partitions or PARTITIONS)
        self._place = placing_by([self._partitioning], whole_subject=not self._partitioning.wildcards)
        results = Results(handler.publish, test.result, "") if handler.publish is not None else None
        options = HandlerOptions(
            order="key",
            ack_wait_s=_ACK_WAIT_S,
            remember=1000,
            give_up=self._give_up,
            on_failure=handler.hooks.on_failure,
            backoff=lambda _: 0.0,
            **{name: handler.options[name] for name in _OWN_OPTIONS if name in handler.options},
        )
        self._call: HandlerCall[GroupMessage] = handler_call(handler.bound(results), options)
        self.processor = MessageProcessor(self._call, options, handler.name, on_crash=lambda: None)

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
        self.processor.offer([GroupMessage(delivery, self._place(stored), cast("MessageOrigin", origin))])

    def check(self) -> None:
        if self.processor.crash is not None:
            raise self.processor.crash

    async def close(self) -> None:
        await self.processor.close()
        await self._call.close()

    async def _give_up(self, message: GroupMessage, error: BaseException, tries: int) -> None:
        self._test.dead_letters.append(TestedDeadLetter(self.handler.group, message, error, tries))


class _NoClient:
    """Takes acks, and does nothing with them."""

    def __init__(self) -> None:
        self.outbox: list[bytes] = []
        self.push_handle = self

    def post(self, command: bytes) -> None:
        self.outbox.append(command)
