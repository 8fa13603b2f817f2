"""Reading stored messages straight from a stream, many per request, without a consumer.

Needs a stream with `allow_direct` and server 2.11. Any replica may answer, so a lagging one may not know the
newest messages yet: whoever needs completeness compares with the leader's state.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from keylane.core.names import check_stream_name
from keylane.core.subjects import check_filter
from keylane.errors import ApiError, InvalidInput, NotFound, PermissionDenied, ReadIncomplete
from keylane.jetstream.consumers import parse_time
from keylane.jetstream.headers import header_items, number_in, status_of
from keylane.jetstream.settings import check_seconds
from keylane.jetstream.streams import direct_subject

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection

MOST_BYTES = 8 * 1024 * 1024
"""Of a batch. Left to itself the server sends 64 MiB, which is also where it ends a link that lags behind."""
MOST_LAST = 1024
"""Subjects that the server answers at once when it is asked for the newest message of each."""
OWN_HEADERS = (
    "Nats-Stream",
    "Nats-Subject",
    "Nats-Sequence",
    "Nats-Time-Stamp",
    "Nats-Num-Pending",
    "Nats-Last-Sequence",
)
"""What the server adds to a stored message, in its order."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as the stream keeps it."""

    subject: str
    sequence: int
    timestamp: datetime
    headers: dict[str, str]
    data: bytes


class _Answer:
    """Collects one batch and checks that no part of it is missing."""

    def __init__(self, stream: str, target: str, inbox: str) -> None:
        self._target = target
        self._inbox = inbox
        self.messages: list[StoredMessage] = []
        self.pending = 0
        self.stream = stream
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heard = asyncio.Event()

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        if self.done.done():
            return
        code, text = status_of(headers)
        fields, stored = _split(headers)
        last = self.messages[-1].sequence if self.messages else 0
        if code == 204:
            self._end(fields, last)
        elif code == 404:
            self.done.set_result(None)
        elif code:
            self.done.set_exception(ApiError(code, 0, text, doing="direct get"))
        elif (message := _stored_message(fields, stored, data)) is None:
            self.done.set_exception(
                ReadIncomplete(f"what answers on stream {self.stream!r} is no stored message: {str(fields)[:200]}")
            )
        elif _last_of(fields, last) != last:
            self.done.set_exception(
                ReadIncomplete(f"messages between {last} and {message.sequence} did not arrive: read again")
            )
        else:
            self.messages.append(message)

    def received(self) -> None:
        self.heard.set()

    def link_changed(self, up: bool) -> None:
        if not up and not self.done.done():
            self.done.set_exception(
                ReadIncomplete(
                    f"direct get on stream {self.stream!r}: the connection was lost after "
                    f"{len(self.messages)} messages: read again"
                )
            )
        self.heard.set()

    def denied(self, denied: PermissionDenied) -> None:
        if denied.subject in (self._target, self._inbox) and not self.done.done():
            self.done.set_exception(denied)
            self.heard.set()

    def _end(self, fields: dict[str, str], last: int) -> None:
        pending = number_in(fields.get("Nats-Num-Pending", "0"))
        if pending is None or _last_of(fields, last) != last:
            self.done.set_exception(
                ReadIncomplete(
                    f"the end of the batch says {str(fields)[:200]}, and the last seen is {last}: read again"
                )
            )
        else:
            self.pending = pending
            self.done.set_result(None)


def _stored_message(fields: dict[str, str], stored: dict[str, str], data: bytes) -> StoredMessage | None:
    """None where the server's own headers are missing or cannot be read."""
    sequence, subject = number_in(fields.get("Nats-Sequence")), fields.get("Nats-Subject")
    try:
        timestamp = parse_time(fields.get("Nats-Time-Stamp", ""))
    except (ValueError, OverflowError):
        return None
    return None if sequence is None or subject is None else StoredMessage(subject, sequence, timestamp, stored, data)


def _last_of(fields: dict[str, str], otherwise: int) -> int | None:
    """The sequence of the message before, as the server sent it."""
    return number_in(fields.get("Nats-Last-Sequence", str(otherwise)))


async def read_batch(
    connection: Connection,
    stream: str,
    *,
    sequence: int = 1,
    batch: int = 10_000,
    subject_filter: str | None = None,
    timeout_s: float = 10.0,
) -> tuple[list[StoredMessage], int]:
    """Up to `batch` messages from `sequence` on, in order, and how many matching ones come after them.

    `timeout_s` is the longest silence, not the whole time.
    """
    connection.require("direct_get_batch")
    check_stream_name(stream)
    check_seconds(timeout_s, "timeout_s")
    if sequence < 1:
        raise InvalidInput(f"read from sequence {sequence}: sequences start at 1")
    if batch < 1:
        raise InvalidInput(f"a batch of {batch}: read at least 1 message")
    request: dict[str, object] = {"seq": sequence, "batch": batch, "max_bytes": MOST_BYTES}
    if subject_filter is not None:
        request["next_by_subj"] = check_filter(subject_filter)
    return await _ask(connection, stream, request, timeout_s)


async def read_last(
    connection: Connection, stream: str, filters: Sequence[str], *, timeout_s: float = 10.0
) -> list[StoredMessage]:
    """The newest message of every subject that one of the filters matches, in the order of their sequences.

    A filter may be a subject. All filters together may match 1,024 subjects; the server refuses more.
    """
    connection.require("direct_get_batch")
    check_stream_name(stream)
    check_seconds(timeout_s, "timeout_s")
    asked = [check_filter(one) for one in filters]
    messages, pending = await _ask(
        connection, stream, {"multi_last": asked, "batch": MOST_LAST, "max_bytes": MOST_BYTES}, timeout_s
    )
    if pending:
        raise ReadIncomplete(f"direct get on stream {stream!r}: {pending} messages did not fit: ask for fewer subjects")
    return messages


async def _ask(
    connection: Connection, stream: str, request: dict[str, object], timeout_s: float
) -> tuple[list[StoredMessage], int]:
    client = connection.nats
    inbox = client.new_inbox()
    target = direct_subject(connection, stream)
    answer = _Answer(stream, target, inbox)
    client.listen_for_denials(answer.denied)
    subscription = await client.route(inbox, answer)
    client.listen(answer.link_changed)
    try:
        payload = json.dumps(request).encode()
        client.post(b"PUB %b %b %d\r\n%b\r\n" % (target.encode(), inbox.encode(), len(payload), payload))
        client.push()
        await _complete(answer, stream, timeout_s)
    except ApiError as error:
        if error.code == 503:
            raise NotFound(
                404,
                0,
                f"nobody answers for stream {stream!r}: it does not exist or lacks allow_direct",
                doing="direct get",
            ) from error
        raise
    finally:
        client.unlisten(answer.link_changed)
        client.unlisten_for_denials(answer.denied)
        await client.unroute(subscription)
    return answer.messages, answer.pending


async def read_all(
    connection: Connection,
    stream: str,
    *,
    sequence: int = 1,
    subject_filter: str | None = None,
    batch: int = 10_000,
    timeout_s: float = 10.0,
) -> AsyncIterator[StoredMessage]:
    """Every message that the answering replica has now, from `sequence` on."""
    pending = 1
    while pending:
        messages, pending = await read_batch(
            connection,
            stream,
            sequence=sequence,
            batch=batch,
            subject_filter=subject_filter,
            timeout_s=timeout_s,
        )
        if not messages:
            return
        for message in messages:
            yield message
        sequence = messages[-1].sequence + 1


def _split(raw: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """The fields that the server adds, and the headers that are stored.

    A stored message may carry the same names, for example when it was republished from another stream. The
    server puts its own behind them.
    """
    items = list(header_items(raw))
    fields: dict[str, str] = {}
    while items and items[-1][0] in OWN_HEADERS and items[-1][0] not in fields:
        name, value = items.pop()
        fields[name] = value
    stored: dict[str, str] = {}
    for name, value in items:
        stored.setdefault(name, value)
    return fields, stored


async def _complete(answer: _Answer, stream: str, timeout_s: float) -> None:
    while not answer.done.done():
        answer.heard.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await answer.heard.wait()
        except TimeoutError:
            raise ReadIncomplete(
                f"direct get on stream {stream!r}: silence for {timeout_s} s after {len(answer.messages)} messages"
            ) from None
    answer.done.result()
