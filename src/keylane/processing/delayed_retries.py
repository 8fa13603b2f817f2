"""Delayed retries: a failed message waits in a stream of its own, and its key goes on without it.

The retries of a stream are in one other stream, `<stream>@retry`. A message waits there as a schedule of the server
(nats-server 2.12), on a subject of its own; when its time has come, the server stores it on the subject of what is due,
which the workers of the group read with one consumer (`retry_reader`). A stream of our own, because the server takes no
schedules beside sources or with discard new, demands a target in the same stream, and a message that is published again
into the user's stream would reach every group.

Stored first, then acked: a process that is killed in between fails on the message again, and the server recognises the
id of the retry. Never settles the original: whoever calls `delay` does, and only after it has returned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

from keylane.core.names import check_stream_name
from keylane.core.retry_delays import (
    check_retry_delays,
    checked_delays,
    delay_after,
    due_subject,
    retry_subjects,
    total_tries,
    waiting_subject,
)
from keylane.errors import ApiUnavailable, BrokenRetry, Fenced, NotFound, NotStored, RequestTimeout
from keylane.jetstream import ConsumerConfig, Message, consumers, publish_raw, streams
from keylane.processing.dead_letters import escaped, header_block, letter_head, number, original_lines, unescaped
from keylane.processing.handler_options import HandlerOptions
from keylane.processing.message import GroupMessage, Place
from keylane.processing.origin import GroupSource, MessageOrigin
from keylane.processing.side_streams import ensure_side_stream

if TYPE_CHECKING:
    from keylane.jetstream import Client, Connection

ACK_WAIT_S = 15.0
MAX_ACK_PENDING = 1000
"""Of the consumer that all workers of a group share."""
_TIMEOUT_S = 5.0
_LONGEST_S = 10.0
_LOOK_AGAIN_S = 0.05


def retry_stream(stream: str) -> str:
    """The name of the stream that has the delayed retries of a stream."""
    return check_stream_name(f"{check_stream_name(stream)}@retry")


class RetryOrigin:
    """Who has a message that is tried again off its lane. Nobody owns its partition for it: it has no fencing token."""

    __slots__ = ("_member", "from_queue", "group", "instance", "pin_id", "stream")

    def __init__(self, stream: str, group: str, member: Callable[[], str], *, instance: str, from_queue: bool) -> None:
        self.stream, self.group = stream, group
        self._member = member
        self.instance = instance
        self.from_queue = from_queue
        self.pin_id: str | None = None

    def __repr__(self) -> str:
        return f"<RetryOrigin {self.stream}/{self.group} {self.member}>"

    @property
    def member(self) -> str:
        return self._member()

    @property
    def revision(self) -> int:
        return 0

    @property
    def version(self) -> tuple[int, str]:
        return 0, self.instance

    def wait(self, waiting_for: str | None) -> None:
        """Nothing waits for a delayed retry."""

    async def source(self) -> GroupSource:
        self._refuse()

    async def fence(self, *, anew: bool = False) -> tuple[int, int]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise Fenced("a delayed retry runs beside its key's lane and has no fencing token: leave out retry_delays")


class RetriedMessage(GroupMessage):
    """A message that failed and is tried again off its lane. To the handler it looks as it did the first time."""

    __slots__ = ("_original", "_tries")

    def __init__(self, due: Message, place: Place, origin: MessageOrigin, *, original: Message, tries: int) -> None:
        super().__init__(due, place, origin, time.time())
        self._original = original
        self._tries = tries

    @classmethod
    def of(cls, due: Message, origin: MessageOrigin) -> RetriedMessage:
        """From the message of the retry stream. Raises `BrokenRetry` if it is none."""
        head = due.headers
        subject, sequence = unescaped(head.get("Keylane-Subject", "")), number(head.get("Keylane-Sequence", ""))
        tries = number(head.get("Keylane-Tries", ""))
        if not subject or not sequence or not tries:
            raise BrokenRetry(
                f"message {due.sequence} of stream {due.delivery.stream!r} is no retry: it lacks Keylane-Subject, "
                "Keylane-Sequence or Keylane-Tries; who else publishes there?"
            )
        stored_ns = number(head.get("Keylane-Stored", ""))
        partition = number(head.get("Keylane-Partition", ""))
        key = unescaped(head.get("Keylane-Key", ""))
        reply = f"$JS.ACK.{origin.stream}.retry.{tries + 1}.{sequence}.{tries + 1}.{stored_ns}.0"
        original = Message(
            cast("Client", None),
            subject.encode("utf-8", "surrogateescape"),
            reply.encode(),
            header_block(original_lines(due.raw_headers)),
            due.data,
        )
        return cls(due, Place.of(partition, subject, key), origin, original=original, tries=tries)

    @property
    def original(self) -> Message:
        return self._original

    @property
    def earlier_tries(self) -> int:
        return self._tries

    @property
    def headers(self) -> dict[str, str]:
        return self._original.headers

    @property
    def sequence(self) -> int:
        return self._original.sequence

    @property
    def delivered_count(self) -> int:
        return self._tries + 1

    @property
    def timestamp(self) -> datetime:
        return self._original.timestamp


class DelayedRetries:
    """The delayed retries of one group or fleet."""

    def __init__(self, connection: Connection, stream: str, group: str, delays: Sequence[float]) -> None:
        self.connection = connection
        self.stream, self.group = stream, group
        self.delays = tuple(delays)
        self.name = retry_stream(stream)

    def __repr__(self) -> str:
        return f"<DelayedRetries of {self.stream}/{self.group} after {self.delays} s>"

    async def start(self) -> None:
        """Create the stream and the consumer of what is due, if they are missing."""
        await ensure_side_stream(
            self.connection,
            self.name,
            retry_subjects(self.stream, "*"),
            purpose="delayed retries",
            like=self.stream,
            description=f"failed messages of {self.stream} that wait for their next try: keylane dlq ls {self.stream}",
            retention="workqueue",
            discard="old",
            allow_msg_schedules=True,
        )
        await consumers.create(
            self.connection,
            self.name,
            ConsumerConfig(
                durable_name=self.group,
                filter_subject=due_subject(self.stream, self.group, ">"),
                ack_wait_s=ACK_WAIT_S,
                max_ack_pending=MAX_ACK_PENDING,
            ),
        )

    async def delay(self, message: GroupMessage, error: BaseException, tries: int) -> None:
        """Store the message for its next try. Returns when the server has confirmed it; else raises, and may be called
        again: it is stored once."""
        at = datetime.now(UTC) + timedelta(seconds=delay_after(self.delays, tries))
        stored_ns = message.original.delivery.timestamp_ns
        subject = waiting_subject(self.stream, self.group, message.sequence, stored_ns, tries)
        head = letter_head(
            {
                "Subject": message.subject,
                "Sequence": message.sequence,
                "Stored": stored_ns,
                "Member": message.origin.member,
                "Partition": message.partition,
                "Key": message.key,
                "Tries": tries,
            },
            error,
            f"{escaped(self.stream)} {escaped(self.group)} {message.sequence} {stored_ns} {tries}",
            self.name,
            message.original.raw_headers,
            conditions={
                "Nats-Schedule": f"@at {at.isoformat(timespec='milliseconds').replace('+00:00', 'Z')}",
                "Nats-Schedule-Target": due_subject(self.stream, self.group, message.partition),
            },
        )
        end = time.monotonic() + _LONGEST_S
        while True:
            try:
                await publish_raw(self.connection, subject.encode(), head, message.data, _TIMEOUT_S)
            except (NotStored, ApiUnavailable, RequestTimeout):
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(_LOOK_AGAIN_S)
            else:
                return


async def with_delayed_retries(
    connection: Connection,
    stream: str,
    group: str,
    options: HandlerOptions,
    retry_delays: Sequence[float] | None,
    *,
    after_tries: str,
    order: str,
    needs_order: bool,
) -> tuple[HandlerOptions, DelayedRetries | None]:
    """The options of a member or worker that retries later; its retry stream and consumer exist then.

    `order`: as it was asked for. `needs_order`: of the handler, which then takes no delayed retries.
    """
    delays = checked_delays(retry_delays)
    if delays is None:
        return options, None
    check_retry_delays(
        after_tries=after_tries,
        order=order,
        manual_ack=options.manual_ack,
        acks=options.acks,
        needs_order=needs_order,
    )
    tries = total_tries(delays, options.max_tries)
    connection.require("message_schedules")
    retries = DelayedRetries(connection, stream, group, delays)
    await retries.start()
    return replace(options, delay=retries.delay, max_tries=tries), retries


class RetryCounts(NamedTuple):
    """How many messages of a group are in the retry stream."""

    waiting: int
    """Their time has not come."""
    due: int
    """Their time has come, and no worker has finished them."""


async def retry_counts(connection: Connection, stream: str, group: str = "*") -> dict[str, RetryCounts]:
    """By group, those that have any."""
    try:
        subjects = await streams.subject_counts(connection, retry_stream(stream), retry_subjects(stream, group))
    except NotFound:
        return {}
    found: dict[str, RetryCounts] = {}
    for subject, messages in subjects.items():
        _, _, _, of, state, *_ = subject.split(".")
        before = found.get(of, RetryCounts(0, 0))
        found[of] = before._replace(**{state: getattr(before, state) + messages})
    return found


async def delete_retries(connection: Connection, stream: str, group: str) -> None:
    """Delete what waits for a retry of a group, and its consumer: the group is deleted."""
    try:
        await streams.purge(connection, retry_stream(stream), subject_filter=retry_subjects(stream, group))
        await consumers.delete(connection, retry_stream(stream), group)
    except NotFound:
        return
