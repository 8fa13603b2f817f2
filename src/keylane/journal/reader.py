"""Reading a journal: batches as they are stored, or records one by one.

Reads everything that was stored when the reading began, or raises an error. Never silently skips what it cannot read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from keylane.core.journal_record import JournalBatch, JournalRecord, open_batch
from keylane.errors import BrokenJournal, InvalidInput, JournalError, NotFound, ReadIncomplete
from keylane.jetstream import StoredMessage, check_seconds, read_batch, streams
from keylane.journal.stream import journal_stream, journal_subject

if TYPE_CHECKING:
    from keylane.jetstream import Connection

_MESSAGES_A_REQUEST = 64
"""Each holds a thousand records or more: this bounds the memory of a reader to a few megabytes."""
_LOOK_AGAIN_S = 0.05

OnBroken = Callable[[int, JournalError], None]


async def read_journal(
    connection: Connection,
    stream: str,
    *,
    group: str | None = None,
    member: str | None = None,
    from_sequence: int = 1,
    on_broken: OnBroken | None = None,
    timeout_s: float = 10.0,
) -> AsyncIterator[JournalRecord]:
    """Yield every record that the journal of a stream holds now.

    The records of one instance come in the order in which it wrote them, unless the journal's stream has them in
    another order: sort by `batch` and `row` if that matters. The rest is as in `read_batches`.

        async for record in read_journal(connection, "ORDERS", group="billing"):
            print(record.key, record.sequence, record.outcome)
    """
    reading = read_batches(
        connection,
        stream,
        group=group,
        member=member,
        from_sequence=from_sequence,
        on_broken=on_broken,
        timeout_s=timeout_s,
    )
    async for _, batch in reading:
        for record in batch.rows():
            yield record


async def read_batches(
    connection: Connection,
    stream: str,
    *,
    group: str | None = None,
    member: str | None = None,
    from_sequence: int = 1,
    on_broken: OnBroken | None = None,
    timeout_s: float = 10.0,
) -> AsyncIterator[tuple[int, JournalBatch]]:
    """Yield every batch that the journal holds now, with its sequence in the journal's stream.

    A batch that was stored twice, which can happen after the server was away for minutes, comes once. A message that
    cannot be read raises `BrokenJournal` or `JournalTooNew`; `on_broken` gets it instead, and reading continues.
    Raises `ReadIncomplete` if not everything could be read, and `NotFound` if the stream has no journal.
    """
    if member is not None and group is None:
        raise InvalidInput(f"member is {member!r} without a group: name the group that the member is in")
    check_seconds(timeout_s, "timeout_s")
    seen = _Seen()
    async for stored in _stored(
        connection, journal_stream(stream), journal_subject(stream, group, member), from_sequence, timeout_s
    ):
        try:
            batch = open_stored(stored.sequence, stored.subject, stored.data)
        except JournalError as error:
            if on_broken is None:
                raise
            on_broken(stored.sequence, error)
            continue
        if seen.is_new(batch):
            yield stored.sequence, batch


def open_stored(sequence: int, subject: str, data: bytes) -> JournalBatch:
    """The batch in a message of the journal's stream; raises `BrokenJournal` or `JournalTooNew`."""
    try:
        batch = open_batch(data)
    except JournalError as error:
        raise type(error)(f"sequence {sequence} on {subject!r}: {error}") from error
    head = batch.head
    if subject != f"keylane.journal.{head.stream}.{head.group}.{head.member}":
        raise BrokenJournal(
            f"sequence {sequence} on {subject!r} holds a batch of group {head.group!r}, member "
            f"{head.member!r} of stream {head.stream!r}: it was not published by a journal"
        )
    return batch


class _Seen:
    """Which batches of each writer were read, as ranges of numbers: almost always one."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, ...], list[range]] = {}

    def is_new(self, batch: JournalBatch) -> bool:
        head, number = batch.head, batch.head.batch
        ranges = self._lines.setdefault((head.writer, head.group, head.member, head.instance), [])
        if any(number in one for one in ranges):
            return False
        before = next((one for one in ranges if one.stop == number), range(number, number))
        after = next((one for one in ranges if one.start == number + 1), range(number + 1, number + 1))
        ranges[:] = [one for one in ranges if one not in (before, after)]
        ranges.append(range(before.start, after.stop))
        return True


async def _stored(
    connection: Connection, name: str, subject: str, sequence: int, timeout_s: float
) -> AsyncIterator[StoredMessage]:
    """Yield all messages up to the leader's current last one; ask again if a replica lags."""
    last = await _last(connection, name, subject)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while sequence <= last:
        messages, _ = await read_batch(
            connection,
            name,
            sequence=sequence,
            batch=_MESSAGES_A_REQUEST,
            subject_filter=subject,
            timeout_s=timeout_s,
        )
        for message in messages:
            if message.sequence > last:
                return
            yield message
        if messages:
            sequence = messages[-1].sequence + 1
            deadline = loop.time() + timeout_s
        elif not await _is_there(connection, name, last):
            return
        elif loop.time() >= deadline:
            raise ReadIncomplete(
                f"gave up after {timeout_s:g} s reading the journal in {name!r} from sequence {sequence} on: it has "
                f"messages up to {last}, so a replica lags; read again"
            )
        else:
            await asyncio.sleep(_LOOK_AGAIN_S)


async def _last(connection: Connection, name: str, subject: str) -> int:
    """The sequence of the last message on these subjects; 0 if there is none."""
    try:
        found = await streams.get_message(connection, name, last_by_subject=subject)
    except NotFound as error:
        if error.err_code != 10037:  # no message found
            raise
        return 0
    return int(found["seq"])


async def _is_there(connection: Connection, name: str, sequence: int) -> bool:
    try:
        await streams.get_message(connection, name, sequence=sequence)
    except NotFound:
        return False
    return True
