"""Publishing with acknowledgement: pipelined with bounds, and atomic batches.

Owns the answers to publishes. It never sends a message twice: what to do with a failure is the caller's
decision, because a repeat may be stored after a later message of the same key.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from keylane.core.run_state import RunState
from keylane.core.subjects import check_subject
from keylane.errors import (
    InvalidInput,
    NotStored,
    OutcomeUnknown,
    PermissionDenied,
    PublishDenied,
    PublishFailed,
    PublishRejected,
)
from keylane.jetstream.headers import encode_headers, status_of
from keylane.jetstream.settings import check_seconds

if TYPE_CHECKING:
    from keylane.jetstream.client import Client
    from keylane.jetstream.connection import Connection

MAX_ATOMIC_BATCH = 1000
_SWEEP_S = 0.25
_PUSH_EVERY = 128  # so that the server works on the first messages while the later ones are made
_UNKNOWN = "; the message may or may not be stored"
_PLAIN_ACK = re.compile(rb'\{"stream":"([^"\\]+)", ?"seq":(\d{1,20})\}')


@lru_cache(maxsize=16_384)
def _checked(subject: str) -> bytes:
    """Keys repeat: a subject is checked and encoded once."""
    return check_subject(subject).encode()


class Outgoing(NamedTuple):
    """A message to publish. Use the server's headers for expectations and deduplication (`Nats-Msg-Id`)."""

    subject: str
    data: bytes = b""
    headers: Mapping[str, str] | None = None


class PublishAck(NamedTuple):
    """Where the message is stored. `duplicate`: it was there before, by its `Nats-Msg-Id`."""

    stream: str
    sequence: int
    duplicate: bool = False


class _InFlight(NamedTuple):
    future: asyncio.Future[PublishAck]
    subject: str
    size: int
    deadline: float


class Publisher:
    """Publishes many messages at once; each has a result of its own.

    At the end of the block all results are there.

    >>> async with Publisher(connection) as publisher:
    ...     pending = await publisher.send("orders.eu.42", b"...")  # waits only while too much is in flight
    ...     ack = await pending
    """

    def __init__(
        self,
        connection: Connection,
        *,
        max_in_flight: int = 4000,
        max_in_flight_bytes: int = 16 * 1024 * 1024,
        timeout_s: float = 5.0,
    ) -> None:
        if max_in_flight < 1:
            raise InvalidInput(f"max_in_flight is {max_in_flight}: at least 1 message must be allowed")
        if max_in_flight_bytes < 1:
            raise InvalidInput(f"max_in_flight_bytes is {max_in_flight_bytes}: at least 1 byte must be allowed")
        check_seconds(timeout_s, "timeout_s")
        self._client = connection.nats
        self._max_in_flight = max_in_flight
        self._max_bytes = max_in_flight_bytes
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._inbox = self._client.new_inbox()
        self._reply_prefix = f"{self._inbox}.".encode()
        self._in_flight: dict[bytes, _InFlight] = {}
        self._bytes = 0
        self._count = 0
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._room.set()
        self._subscription: Subscription | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._no_answers: PermissionDenied | None = None
        self.state = RunState.NEW

    def __repr__(self) -> str:
        return f"<Publisher {self.state}, in flight: {len(self._in_flight)} messages, {self._bytes} bytes>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        self._client.listen_for_denials(self._hear_denial)
        self._subscription = await self._client.route(f"{self._inbox}.*", self)
        self._client.listen(self._link_changed)
        self._sweep = self._loop.call_later(_SWEEP_S, self._expire)
        self.state = RunState.RUNNING

    async def stop(self) -> None:
        """Wait for the outstanding answers (each has its deadline), then end."""
        self.state = RunState.STOPPING
        await self.flush()
        if self._sweep is not None:
            self._sweep.cancel()
        self._client.unlisten(self._link_changed)
        self._client.unlisten_for_denials(self._hear_denial)
        if self._subscription is not None:
            await self._client.unroute(self._subscription)
        self.state = RunState.ENDED

    async def send(
        self, subject: str, data: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> asyncio.Future[PublishAck]:
        """Publish; the returned future has the ack, or raises a `PublishFailed`."""
        target, head = _encoded(self._client, subject, data, headers)
        size = len(head) + len(data)
        while len(self._in_flight) >= self._max_in_flight or (self._in_flight and self._bytes + size > self._max_bytes):
            self._room.clear()
            self._client.push()
            await self._room.wait()
        if not self._client.is_connected:
            raise NotStored(f"publish to {subject!r}: the connection to the server is down; nothing was sent")
        if self._no_answers is not None:
            raise publish_denied(subject, self._no_answers)
        future: asyncio.Future[PublishAck] = self._loop.create_future()
        self._count += 1
        token = b"%d" % self._count
        self._in_flight[token] = _InFlight(future, subject, size, self._loop.time() + self._timeout_s)
        self._bytes += size
        self._idle.clear()
        self._client.post(publish_command(target, self._reply_prefix + token, head, data))
        if self._count % _PUSH_EVERY == 0:
            self._client.push()
        return future

    async def flush(self) -> None:
        """Wait until every message sent so far has its result."""
        self._client.push()
        await self._idle.wait()

    # ---- the server's side --------------------------------------------------------------------------

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        entry = self._in_flight.pop(subject[len(self._reply_prefix) :], None)
        if entry is None:
            return
        self._bytes -= entry.size
        if entry.future.done():
            return
        try:
            entry.future.set_result(read_answer(entry.subject, headers, data))
        except PublishFailed as failure:
            entry.future.set_exception(failure)

    def received(self) -> None:
        if not self._in_flight:
            self._idle.set()
        self._room.set()

    def _link_changed(self, up: bool) -> None:
        if not up:
            self._no_answers = None  # the next link may have other permissions
            self._fail(self._withdrawn(), NotStored, "the connection was lost before it was sent")
            self._fail(list(self._in_flight), OutcomeUnknown, f"the connection was lost{_UNKNOWN}")

    def _hear_denial(self, denied: PermissionDenied) -> None:
        if denied.operation == "publish":
            tokens = [token for token, entry in self._in_flight.items() if entry.subject == denied.subject]
            self._end(tokens, lambda subject: publish_denied(subject, denied))
        elif denied.subject == f"{self._inbox}.*":
            self._no_answers = denied
            self._fail(list(self._in_flight), OutcomeUnknown, f"no answer can come: {denied}{_UNKNOWN}")

    def _withdrawn(self) -> list[bytes]:
        """Take back what has not left yet: it must not be stored after its failure was told."""
        tokens: list[bytes] = []
        kept: list[bytes] = []
        for command in self._client.outbox:
            reply = command.split(b" ", 3)[2]
            if reply.startswith(self._reply_prefix):
                tokens.append(reply.removeprefix(self._reply_prefix))
            else:
                kept.append(command)
        self._client.outbox[:] = kept
        return tokens

    def _expire(self) -> None:
        now = self._loop.time()
        late = []
        for token, entry in self._in_flight.items():  # oldest first
            if entry.deadline > now:
                break
            late.append(token)
        self._fail(late, OutcomeUnknown, f"no answer within {self._timeout_s} s{_UNKNOWN}")
        self._sweep = self._loop.call_later(_SWEEP_S, self._expire)

    def _fail(self, tokens: list[bytes], kind: type[NotStored | OutcomeUnknown], why: str) -> None:
        self._end(tokens, lambda subject: kind(f"publish to {subject!r}: {why}"))

    def _end(self, tokens: list[bytes], failure: Callable[[str], PublishFailed]) -> None:
        for token in tokens:
            entry = self._in_flight.pop(token)
            self._bytes -= entry.size
            if not entry.future.done():
                entry.future.set_exception(failure(entry.subject))
        if tokens:
            self.received()


def open_publisher(
    connection: Connection,
    *,
    max_in_flight: int = 4000,
    max_in_flight_bytes: int = 16 * 1024 * 1024,
    timeout_s: float = 5.0,
) -> Publisher:
    """A publisher for as long as the block lasts. At its end all results are there."""
    return Publisher(
        connection, max_in_flight=max_in_flight, max_in_flight_bytes=max_in_flight_bytes, timeout_s=timeout_s
    )


async def publish(
    connection: Connection,
    subject: str,
    data: bytes = b"",
    *,
    message_id: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
) -> PublishAck:
    """Publish one message and wait until a stream has stored it. For many use a `Publisher`.

    A message with an id that the stream has seen within its duplicate window is not stored again: `ack.duplicate`.

    >>> ack = await keylane.publish(connection, "orders.eu.42", b"...", message_id="order-42")
    """
    sent = dict(headers or {})
    if message_id is not None:
        sent["Nats-Msg-Id"] = message_id
    target, head = _encoded(connection.nats, subject, data, sent)
    return await publish_raw(connection, target, head, data, timeout_s)


async def publish_many(
    connection: Connection, messages: Iterable[Outgoing], *, max_in_flight: int = 4000, timeout_s: float = 5.0
) -> list[PublishAck | PublishFailed]:
    """Publish all, pipelined. One result per message, in their order; a failure of one stops no other.

    All are checked before the first one is sent. Without an end in sight use `open_publisher`.
    """
    outgoing = list(messages)
    for subject, data, headers in outgoing:
        _encoded(connection.nats, subject, data, headers)
    pending: list[asyncio.Future[PublishAck] | PublishFailed] = []
    async with open_publisher(connection, max_in_flight=max_in_flight, timeout_s=timeout_s) as publisher:
        for subject, data, headers in outgoing:
            try:
                pending.append(await publisher.send(subject, data, headers))
            except PublishFailed as failure:
                pending.append(failure)
    return [one if isinstance(one, PublishFailed) else _result(one) for one in pending]


async def publish_atomic(
    connection: Connection, messages: Sequence[Outgoing], *, timeout_s: float = 5.0
) -> list[PublishAck]:
    """Store all messages, next to each other and in order, or none.

    All go to one stream, which must have `allow_atomic`; 1000 at most.
    """
    connection.require("atomic_batch")
    if not 1 <= len(messages) <= MAX_ATOMIC_BATCH:
        raise InvalidInput(f"an atomic batch has 1 to {MAX_ATOMIC_BATCH} messages, not {len(messages)}")
    client = connection.nats
    batch = secrets.token_hex(12)
    parts = [
        _in_batch(message, batch, number, last=number == len(messages))
        for number, message in enumerate(messages, start=1)
    ]
    encoded = [_encoded(client, *part) for part in parts]
    subjects, refused = {part.subject for part in parts}, list[PermissionDenied]()

    def hear(denied: PermissionDenied) -> None:
        if denied.operation == "publish" and denied.subject in subjects:
            refused.append(denied)

    client.listen_for_denials(hear)
    try:
        async with open_publisher(connection, timeout_s=timeout_s) as publisher:
            if client.is_connected:
                # Only the commit is answered: it fails if any message before it was refused.
                for part, (target, head) in zip(parts[:-1], encoded[:-1], strict=True):
                    client.post(publish_command(target, b"", head, part.data))
            pending = await publisher.send(*parts[-1])
        commit = await pending
    except PublishFailed as failure:
        with suppress(NatsError):
            await client.flush()  # messages go to their route at once, a refusal before them is handled a turn later
        if refused:
            raise publish_denied(refused[0].subject, refused[0]) from failure
        raise
    finally:
        client.unlisten_for_denials(hear)
    first = commit.sequence - len(messages) + 1
    return [PublishAck(commit.stream, first + index) for index in range(len(messages))]


class _Confirmation:
    """The server's answer to one publish."""

    def __init__(self, subject: str, inbox: str) -> None:
        self._subject = subject
        self._inbox = inbox
        self.answer: asyncio.Future[PublishAck] = asyncio.get_running_loop().create_future()

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        if self.answer.done():
            return
        try:
            self.answer.set_result(read_answer(self._subject, headers, data))
        except PublishFailed as failure:
            self.answer.set_exception(failure)

    def received(self) -> None:
        """The one answer is taken in `receive`."""

    def denied(self, denied: PermissionDenied) -> None:
        if self.answer.done():
            return
        if denied.subject == self._subject:
            self.answer.set_exception(publish_denied(self._subject, denied))
        elif denied.subject == self._inbox:
            self.answer.set_exception(
                OutcomeUnknown(f"publish to {self._subject!r}: no answer can come: {denied}{_UNKNOWN}")
            )

    def link_changed(self, up: bool) -> None:
        if not up and not self.answer.done():
            self.answer.set_exception(
                OutcomeUnknown(
                    f"publish to {self._subject!r}: the connection was lost; the message may or may not be stored"
                )
            )


async def publish_raw(connection: Connection, subject: bytes, head: bytes, data: bytes, timeout_s: float) -> PublishAck:
    """Publish a subject and a header block that are bytes already, and wait for the answer of the stream.

    For what a stream holds and text cannot carry: bytes that are not UTF-8, repeated header names. The caller checks
    the subject and the header block.
    """
    client = connection.nats
    target = subject.decode("utf-8", "backslashreplace")
    if (size := len(head) + len(data)) > client.max_payload:
        raise InvalidInput(
            f"publish to {target!r}: with its headers it has {size} bytes, and the server takes {client.max_payload}: "
            "raise max_payload in the server"
        )
    if not client.is_connected:
        raise NotStored(f"publish to {target!r}: the connection to the server is down; nothing was sent")
    inbox = client.new_inbox()
    confirmation = _Confirmation(target, inbox)
    client.listen_for_denials(confirmation.denied)
    subscription = await client.route(inbox, confirmation)
    client.listen(confirmation.link_changed)
    try:
        client.post(publish_command(subject, inbox.encode(), head, data))
        client.push()
        await asyncio.wait({confirmation.answer}, timeout=timeout_s)
    finally:
        client.unlisten(confirmation.link_changed)
        client.unlisten_for_denials(confirmation.denied)
        await client.unroute(subscription)
    if not confirmation.answer.done():
        raise OutcomeUnknown(f"publish to {target!r}: no answer within {timeout_s:g} s{_UNKNOWN}")
    return confirmation.answer.result()


def _in_batch(message: Outgoing, batch: str, number: int, *, last: bool) -> Outgoing:
    subject, data, headers = message
    headers = dict(headers or {})
    for name in headers:
        if name.lower().startswith("nats-batch-"):
            raise InvalidInput(f"header {name!r} of message {number}: the batch sets it itself; leave it out")
    headers |= {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
    if last:
        headers["Nats-Batch-Commit"] = "1"
    return Outgoing(subject, data, headers)


def _encoded(client: Client, subject: str, data: bytes, headers: Mapping[str, str] | None) -> tuple[bytes, bytes]:
    """Subject and header block as they are sent, or `InvalidInput`."""
    target = _checked(subject)
    if not isinstance(data, bytes):
        raise InvalidInput(f"publish to {subject!r}: the data is {type(data).__name__}, not bytes; encode it")
    head = encode_headers(headers) if headers else b""
    size = len(head) + len(data)
    if size > client.max_payload:
        raise InvalidInput(
            f"publish to {subject!r}: {size} bytes are more than the server takes ({client.max_payload}): "
            "split the message or raise max_payload in the server"
        )
    return target, head


def publish_command(subject: bytes, reply: bytes, headers: bytes, data: bytes) -> bytes:
    """A publish as the server reads it."""
    if headers:
        return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
            subject,
            reply,
            len(headers),
            len(headers) + len(data),
            headers,
            data,
        )
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(data), data)


def publish_denied(subject: str, denied: PermissionDenied) -> PublishDenied:
    """The error of a publish that the server does not allow, or whose answer it would not send."""
    return PublishDenied(
        f"publish to {subject!r}: nothing was stored: {denied}", operation=denied.operation, subject=denied.subject
    )


def read_answer(subject: str, headers: bytes, data: bytes) -> PublishAck:
    """The server's answer to a publish, as an ack or as the fitting error."""
    if headers and status_of(headers)[0] == 503:
        raise NotStored(
            f"publish to {subject!r}: no stream took it. Check that a stream has this subject; "
            "in a cluster its leader may be away for a moment: try again"
        )
    plain = _PLAIN_ACK.fullmatch(data)
    if plain is not None:  # nearly always: json would take three times as long
        return PublishAck(plain[1].decode(errors="replace"), int(plain[2]))
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    match answer:
        case {"error": {"code": int(code), "err_code": int(err_code), "description": str(said)}}:
            raise PublishRejected(code, err_code, said, doing=f"publish to {subject!r}")
        case {"error": {"code": int(code), "description": str(said)}}:
            raise PublishRejected(code, 0, said, doing=f"publish to {subject!r}")
        case {"stream": str(stream), "seq": int(sequence)} if not answer.get("error"):
            return PublishAck(stream, sequence, answer.get("duplicate") is True)
    raise OutcomeUnknown(
        f"publish to {subject!r}: what answered is not a stream ({data[:80]!r}){_UNKNOWN}. "
        "Check who else replies on this subject"
    )


def _result(future: asyncio.Future[PublishAck]) -> PublishAck | PublishFailed:
    failure = future.exception()
    if failure is None:
        return future.result()
    assert isinstance(failure, PublishFailed)
    return failure
