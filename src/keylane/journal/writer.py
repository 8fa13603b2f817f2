"""The journal's writer: sends records of what members did to a stream in batches, and never makes a handler wait.

Owns the states of a note: pending → sealed (a list that is full or old enough) → waiting (packed) → in flight → stored.
At most `max_waiting` records are in these states, besides the pending ones. Beyond that the oldest are dropped, and the
next batch carries their number. If no batch follows, one without records carries it, so that an incomplete journal
never looks complete.

A batch gets its number and its final bytes when it is first sent, and keeps both: the server recognises a repeated
batch by its id and stores it once. A batch that may already be stored is never dropped, but repeated until the server
answers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self
from zlib import crc32

from keylane.core.journal_record import OUTCOME_NUMBERS, BatchHead, Columns, Packed, pack, sample_limit, seal
from keylane.core.run_state import RunState
from keylane.errors import InvalidInput, NotStored, OutcomeUnknown, PublishDenied
from keylane.jetstream import ConnectionHooks, PublishAck, Publisher, check_seconds, open_publisher
from keylane.journal.columns import Handled, Line, Lines, Note, RecordOrigin
from keylane.journal.stream import journal_stream, prepare

if TYPE_CHECKING:
    from keylane.jetstream import Connection

_log = logging.getLogger("keylane.journal")

MAX_BATCH_RECORDS = 10_000
_WINDOW = 16
_ANSWER_S = 2.0
_HEAD_ROOM_BYTES = 4096
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_EVERY_KEY = 1 << 32
_NO_RECORDS = pack(Columns(*[()] * len(Columns._fields)))


@dataclass(slots=True, eq=False)
class _Batch:
    line: Line
    packed: Packed
    turn: int
    data: bytes = b""
    message_id: str = ""
    told: int = 0
    """Dropped records that its head counts."""
    may_be_stored: bool = False

    @property
    def records(self) -> int:
        return self.packed.records


class Journal:
    """Records the outcome of every message.

        async with Journal(connection, stream="ORDERS") as journal:
            async with groups.join(connection, "ORDERS", "billing", "alice", handler, journal=journal) as member:
                await member.wait()

    One journal serves any number of groups and members on its stream. Close it after they have stopped.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        stream: str,
        sample: float = 1.0,
        batch_records: int = 1000,
        flush_s: float = 0.2,
        max_waiting: int = 100_000,
        max_age_s: float | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.stream = stream
        self.journal_stream = journal_stream(stream)
        if isinstance(batch_records, bool) or not isinstance(batch_records, int):
            raise InvalidInput(f"batch_records is {batch_records!r}: give a whole number")
        if not 1 <= batch_records <= MAX_BATCH_RECORDS:
            raise InvalidInput(f"batch_records is {batch_records}: a batch has 1 to {MAX_BATCH_RECORDS} records")
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < batch_records:
            raise InvalidInput(f"max_waiting is {max_waiting!r}: give at least one batch, {batch_records} records")
        self.sample = sample
        self._limit = sample_limit(sample)
        self._sampled = self._limit < _EVERY_KEY
        self._flush_s = check_seconds(flush_s, "flush_s")
        self._batch_records = batch_records
        self._max_waiting = max_waiting
        self._limits = max_age_s, max_bytes
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._writer = secrets.token_hex(8)
        # Read once: setting the system clock must not distort a handler's duration.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._lines = Lines(stream)
        self._last_origin: RecordOrigin | None = None
        self._pending: list[Note] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sealed: deque[list[Note]] = deque()
        self._waiting: deque[_Batch] = deque()
        self._in_flight: set[_Batch] = set()
        self._failed: list[_Batch] = []
        self._held = 0
        self._turns = 0
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._told_trouble = self._told_drops = False
        self._stirred = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self.stored = 0
        """Records that the server has confirmed."""
        self.dropped = 0
        """Records that were lost because the server was too slow or away, or because the journal was closed."""

    def __repr__(self) -> str:
        held = self._held + len(self._pending)
        return f"<Journal {self.journal_stream} {self.state} held={held} dropped={self.dropped}>"

    # ---- start and end ------------------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        if self._task is None:
            return RunState.ENDED if self._closed else RunState.NEW
        if self._task.done():
            return RunState.ENDED
        return RunState.STOPPING if self._closed else RunState.RUNNING

    async def start(self) -> Self:
        """Create the journal's stream if it is missing, and begin. Raises `JournalConflict` if it cannot be used."""
        assert self._task is None, "a journal is started once"
        await prepare(self._connection, self.stream, max_age_s=self._limits[0], max_bytes=self._limits[1])
        self._task = asyncio.create_task(self._run(), name=f"journal {self.stream}")
        return self

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def flush(self, timeout_s: float = 5.0) -> bool:
        """Store all records so far; False if `timeout_s` was too short, or some were dropped meanwhile."""
        check_seconds(timeout_s, "timeout_s")
        dropped_before = self.dropped
        self._seal()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return self._empty.is_set() and self.dropped == dropped_before

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Store all records, and end. Records that are not sent within `timeout_s` are lost, which is logged.

        Waits at most two more seconds for the answers to sent batches.
        """
        check_seconds(timeout_s, "timeout_s")
        if self._task is None:
            self._closed = True
            return
        if not self._closed:
            await self.flush(timeout_s)
        self._end()
        await self._task

    def _end(self) -> None:
        self._seal()
        self._closed = True
        self._stirred.set()

    # ---- noting -------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Nanoseconds since the epoch, by a clock that never jumps: use it for the start and end of `note`."""
        return self._epoch_ns + time.monotonic_ns()

    def note(self, message: Handled, outcome: str, started_ns: int, ended_ns: int) -> None:
        """Record one try at a message. Returns at once; call it on the event loop only."""
        place = message.place
        if self._sampled and crc32(place.key.encode("utf-8", "surrogateescape")) >= self._limit:
            return
        number = OUTCOME_NUMBERS.get(outcome)
        if number is None:
            raise InvalidInput(f"outcome is {outcome!r}: use one of {', '.join(OUTCOME_NUMBERS)}")
        origin, delivery, pending = message.origin, message.delivery, self._pending
        if origin is not self._last_origin:
            self._meet(origin)
        # References only, and nothing that is decoded on first use, which would cost several microseconds here.
        pending.append(
            (
                origin,
                origin.revision,
                place,
                delivery.sequence,
                delivery.reply,
                delivery.raw_headers,
                number,
                started_ns,
                ended_ns,
            )
        )
        size = len(pending)
        if size >= self._batch_records:
            self._seal()
        elif size == 1:
            self._begin()

    def _meet(self, origin: RecordOrigin) -> None:
        if origin.stream != self.stream:
            raise InvalidInput(
                f"a message of stream {origin.stream!r} for the journal of {self.stream!r}: each stream has its own"
            )
        self._lines.line_of(origin)
        self._last_origin = origin

    def _begin(self) -> None:
        if self._closed:
            self._seal()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._flush_s, self._seal)

    def _seal(self) -> None:
        """Turn the pending notes into a batch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        notes, self._pending = self._pending, []
        if not notes:
            return
        self._sealed.append(notes)
        self._held += len(notes)
        self._empty.clear()
        if self._closed:
            self._drop_notes(self._sealed.pop())
            self._tell_drops("it is closed; further records are lost")
        while self._held > self._max_waiting and self._drop_oldest():
            pass
        self._stirred.set()

    # ---- dropping -----------------------------------------------------------------------------------

    def _drop_oldest(self) -> bool:
        batch = next((one for one in self._waiting if not one.may_be_stored), None)
        if batch is not None:
            self._waiting.remove(batch)
            self._drop_batch(batch)
        elif self._sealed:
            self._drop_notes(self._sealed.popleft())
        else:
            return False
        self._tell_drops(
            f"the server is away or too slow, and {self._max_waiting} records are waiting: the oldest are dropped from "
            "now on. The next batch carries their number"
        )
        return True

    def _tell_drops(self, text: str) -> None:
        if not self._told_drops:
            self._told_drops = True
            _log.warning("journal %s: %s", self.journal_stream, text)

    def _drop_batch(self, batch: _Batch) -> None:
        batch.line.dropped += batch.told
        self._count_dropped(batch.line, batch.records)

    def _drop_notes(self, notes: list[Note]) -> None:
        for line, own in self._lines.sort(notes):
            self._count_dropped(line, len(own))

    def _count_dropped(self, line: Line, records: int) -> None:
        line.dropped += records
        self.dropped += records
        self._let_go(records)

    def _let_go(self, records: int) -> None:
        self._held -= records
        if self._held or self._waiting or self._in_flight or self._failed:
            return
        if not self._closed:
            for line in self._lines.with_dropped():  # no other batch follows that could carry the number
                self._add(line, _NO_RECORDS)
        if not self._waiting:
            self._empty.set()

    # ---- sending ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        unobserve = self._connection.observe(
            ConnectionHooks(on_reconnect=lambda _: self._stirred.set(), on_close=lambda _: self._end())
        )
        try:
            async with open_publisher(self._connection, max_in_flight=_WINDOW, timeout_s=_ANSWER_S) as publisher:
                while not self._closed:
                    await self._stirred.wait()
                    self._stirred.clear()
                    await self._send_some(publisher)
                    for _ in range(len(self._sealed)):  # not those added meanwhile: let other tasks run
                        self._pack_oldest()
                        await self._send_some(publisher)
                    if self._sealed:
                        self._stirred.set()
                        await asyncio.sleep(0)
        except Exception:
            _log.exception("journal %s failed; nothing is written from now on", self.journal_stream)
            raise
        finally:
            unobserve()
            self._closed = True
            self._give_up_the_rest()

    def _pack_oldest(self) -> None:
        if self._sealed:
            for line, notes in self._lines.sort(self._sealed.popleft()):
                self._pack(line, notes)

    def _pack(self, line: Line, notes: list[Note]) -> None:
        packed = pack(self._lines.columns(notes))
        if len(packed.body) + _HEAD_ROOM_BYTES + 64 * len(packed.tenures) <= self._connection.nats.max_payload:
            self._add(line, packed)
        elif len(notes) > 1:
            half = len(notes) // 2
            self._pack(line, notes[:half])
            self._pack(line, notes[half:])
        else:
            _log.error("journal %s: one record has %d bytes and was dropped", self.journal_stream, len(packed.body))
            self._count_dropped(line, 1)

    def _add(self, line: Line, packed: Packed) -> None:
        self._turns += 1
        self._waiting.append(_Batch(line, packed, self._turns))

    async def _send_some(self, publisher: Publisher) -> None:
        while self._waiting and len(self._in_flight) < _WINDOW and self._may_send():
            batch = self._waiting.popleft()
            self._number(batch)
            try:
                answer = await publisher.send(batch.line.subject, batch.data, {"Nats-Msg-Id": batch.message_id})
            except NotStored:
                self._waiting.appendleft(batch)  # the link is down; its return wakes this task
                return
            except PublishDenied as error:
                self._not_stored(batch, error)
                return
            self._in_flight.add(batch)
            answer.add_done_callback(partial(self._answered, batch))

    def _may_send(self) -> bool:
        return self._connection.is_connected and not self._failed and self._loop.time() >= self._paused_until

    def _number(self, batch: _Batch) -> None:
        if batch.data:
            return
        line = batch.line
        line.batches += 1
        head = BatchHead(
            writer=self._writer,
            batch=line.batches,
            stream=self.stream,
            group=line.group,
            member=line.member,
            instance=line.instance,
            sample=self.sample,
            dropped=line.dropped,
        )
        batch.told, line.dropped = line.dropped, 0
        batch.data = seal(head, batch.packed)
        batch.message_id = f"{self._writer}.{line.group}.{line.member}.{line.instance}.{line.batches}"

    def _answered(self, batch: _Batch, answer: asyncio.Future[PublishAck]) -> None:
        self._in_flight.discard(batch)
        error = answer.exception()
        if error is None:
            self.stored += batch.records
            self._let_go(batch.records)
            self._pause_s = 0.0
            if not self._held:
                self._all_well()
            if self._failed and not self._in_flight:
                self._try_again()
        else:
            self._not_stored(batch, error)
        self._stirred.set()

    def _not_stored(self, batch: _Batch, error: BaseException) -> None:
        batch.may_be_stored |= isinstance(error, OutcomeUnknown)
        self._failed.append(batch)
        self._tell_trouble(error)
        if not self._in_flight:
            self._try_again()

    def _try_again(self) -> None:
        """Send the failed batches again, after a pause and in their original order."""
        self._failed.sort(key=lambda batch: batch.turn)
        self._waiting.extendleft(reversed(self._failed))
        self._failed.clear()
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, self._pause_s * 2))
        self._paused_until = self._loop.time() + self._pause_s
        self._loop.call_later(self._pause_s + 0.001, self._stirred.set)

    def _tell_trouble(self, error: BaseException) -> None:
        level = logging.DEBUG if self._told_trouble or isinstance(error, OutcomeUnknown) else logging.WARNING
        _log.log(level, "journal %s: a batch was not stored and is retried: %s", self.journal_stream, error)
        self._told_trouble |= level == logging.WARNING

    def _all_well(self) -> None:
        if self._told_trouble or self._told_drops:
            _log.info("journal %s is written again; %d records were dropped", self.journal_stream, self.dropped)
        self._told_trouble = self._told_drops = False

    def _give_up_the_rest(self) -> None:
        dropped_before, unknown = self.dropped, 0
        batches = [*self._waiting, *self._failed, *self._in_flight]
        self._waiting.clear()
        self._failed.clear()
        self._in_flight.clear()
        while self._sealed:
            self._drop_notes(self._sealed.popleft())
        for batch in batches:
            unknown += batch.records if batch.may_be_stored else 0
            self._drop_batch(batch)
        lost = self.dropped - dropped_before
        if lost:
            _log.error(
                "journal %s is closed: its last %d records were not stored%s",
                self.journal_stream,
                lost,
                f", of which {unknown} may be stored after all" if unknown else "",
            )
        if untold := sum(line.dropped for line in self._lines.with_dropped()) - lost:
            _log.error(
                "journal %s is closed: no batch carries the number of %d dropped records", self.journal_stream, untold
            )
