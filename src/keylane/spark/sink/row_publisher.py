"""Publishes rows one by one, with an ack for each, so that no retry can change the order within a subject.

Of every subject one row is on its way at a time; the next one follows when that one is confirmed. A row that has to be
sent again is therefore never overtaken by a later one of its subject, whoever refused or lost it. Hundreds of subjects
fill the pipe as well as no order at all would; a single subject makes one round trip a row.

Owns what an answer of the server means for a row: stored, to be sent again, or never to be stored. `batch_publisher`
hands over here whatever did not go smoothly. `Outlet` is the way out and back of any publisher of rows: an inbox and
its subscription. It takes back what has not left when the connection is lost: sent later, it would be stored ahead of
what is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from nats.aio.subscription import Subscription

from keylane.core.subjects import matches, shown
from keylane.errors import (
    Disconnected,
    KeylaneError,
    NotStored,
    PermissionDenied,
    PublishFailed,
    PublishRejected,
    WriteFailed,
)
from keylane.jetstream import Connection, read_answer, streams
from keylane.spark.tasks import Target

EncodedRow = tuple[bytes, bytes, bytes]
"""Subject, header block with the message id, data: as they are sent."""


class RowSender(Protocol):
    """Who publishes through an outlet."""

    def confirmed(self, tokens: Sequence[bytes]) -> None:
        """The server gave the plain answer to the commands whose replies were the outlet's prefix and these tokens."""

    def answered(self, token: bytes, headers: bytes, data: bytes) -> None:
        """The server gave another answer to a command."""

    def all_answered(self) -> None:
        """The buffer is used up: act on what was answered."""

    def link_changed(self, up: bool) -> None:
        """The link is lost, or there again."""

    def refused(self, error: PermissionDenied) -> None:
        """The server forbids this user a subject."""


class Outlet:
    """The way out and back of one publisher, for as long as it is open."""

    def __init__(self, connection: Connection, publisher: RowSender, plain: bytes | None = None) -> None:
        """`plain` is what most answers look like, as a regular expression: these come many at a time, and only their
        tokens, which are numbers."""
        self._client = connection.nats
        self._publisher = publisher
        self._inbox = self._client.new_inbox()
        self.prefix = f"{self._inbox}.".encode()
        if plain is not None:
            start = b"MSG " + re.escape(self.prefix)
            self._one = re.compile(start + rb"(\d+) \d+ \d+\r\n" + plain + b"\r\n")
            self._many = re.compile(b"(?:" + start + rb"\d+ \d+ \d+\r\n" + plain + b"\r\n)+")
        self._is_bulk = plain is not None
        self._subscription: Subscription | None = None

    def __repr__(self) -> str:
        return f"<Outlet {self._inbox} {'up' if self.is_up else 'down'}>"

    @property
    def is_up(self) -> bool:
        return self._client.is_connected

    async def open(self) -> None:
        listen = self._client.route_bulk if self._is_bulk else self._client.route
        self._subscription = await listen(f"{self._inbox}.>", self)
        self._client.listen(self._link_changed)
        self._client.listen_for_denials(self._publisher.refused)

    async def close(self) -> None:
        self._withdraw()
        self._client.unlisten(self._link_changed)
        self._client.unlisten_for_denials(self._publisher.refused)
        if self._subscription is not None:
            await self._client.unroute(self._subscription)

    def send(self, commands: bytes) -> None:
        """Send publishes, of which the first has a reply with the outlet's prefix, now."""
        self._client.post(commands)
        self._client.push()

    # ---- the server's side --------------------------------------------------------------------------

    def take(self, data: bytes, position: int) -> int:
        found = self._many.match(data, position)
        if found is None:
            return position
        self._publisher.confirmed(self._one.findall(data, position, found.end()))
        return found.end()

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self._publisher.answered(subject[len(self.prefix) :], headers, data)

    def received(self) -> None:
        self._publisher.all_answered()

    def _link_changed(self, up: bool) -> None:
        if not up:
            self._withdraw()
        self._publisher.link_changed(up)

    def _withdraw(self) -> None:
        outbox = self._client.outbox
        outbox[:] = [command for command in outbox if not self._is_ours(command)]

    def _is_ours(self, command: bytes) -> bool:
        words = command[:8192].split(b" ", 3)
        return len(words) > 2 and words[2].startswith(self.prefix)


def publish(subject: bytes, reply: bytes, head: bytes, data: bytes) -> bytes:
    """A publish as the server reads it. Rows always have headers: their ids."""
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, len(head), len(head) + len(data), head, data)


# ---- one by one ----------------------------------------------------------------------------------------------


_log = logging.getLogger("keylane.spark")

ANSWER_S = 5.0
"""After so long without an answer a row is sent again: its id makes that harmless."""
_SWEEP_S = 0.05
_LONGEST_PAUSE_S = 1.0
_OTHER_STREAM = 10060
_CONTENT = {
    10054: "it is larger than the stream takes",
    10097: "its headers have more than 64 kB",
    _OTHER_STREAM: "its subject belongs to another stream",
}
"""Refusals that are about the row itself. Everything else may pass: limits, elections, a full stream, a full queue."""


class RefusedRow(NamedTuple):
    """A row that the stream will never take, and why."""

    row: EncodedRow
    reason: str


class RowPublisher:
    """Publishes rows; `finish` returns when each is stored or refused."""

    def __init__(
        self, connection: Connection, target: Target, *, max_rows: int, max_bytes: int, timeout_s: float
    ) -> None:
        self._connection = connection
        self._target = target
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._answer_s = min(ANSWER_S, timeout_s / 3)
        self._loop = asyncio.get_running_loop()
        stored = rb'\{"stream":"%b", ?"seq":[1-9]\d*(?:,"duplicate": true)?\}' % re.escape(target.stream.encode())
        self._outlet = Outlet(connection, self, plain=stored)
        self._count = 0
        self._rows: dict[int, EncodedRow] = {}
        """Not confirmed yet: on their way, waiting for the one before, or to be sent again."""
        self._bytes = 0
        self._last: dict[bytes, int] = {}
        self._behind: dict[int, int] = {}
        self._due: dict[int, float] = {}
        """When the answer to what is on its way is overdue, soonest first."""
        self._since: dict[int, float] = {}
        """When those that had to be sent again were sent for the first time."""
        self._again: set[int] = set()
        self._again_at = 0.0
        self._pause_s = _SWEEP_S
        self._homeless: set[int] = set()
        """No stream answered for them, and ours did not take their subjects when it was looked at."""
        self._next: list[int] = []
        """Their turn has come with the answers that are being read."""
        self._changed = asyncio.Event()
        self._trouble = "no answer came"
        self._failure: KeylaneError | None = None
        self._tending: asyncio.Task[None] | None = None
        self.refused_rows: list[RefusedRow] = []
        """The caller takes them out."""
        self.stored = 0

    def __repr__(self) -> str:
        return f"<RowPublisher to {self._target.stream!r}: {len(self._rows)} rows of {len(self._last)} subjects>"

    async def open(self) -> None:
        await self._outlet.open()
        self._tending = asyncio.create_task(self._tend())

    async def close(self) -> None:
        """End; what is not confirmed yet may be stored or not."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.gather(self._tending, return_exceptions=True)
        await self._outlet.close()

    async def send(self, rows: Sequence[EncodedRow]) -> None:
        """Publish; waits while too much is on its way. Raises `WriteFailed` when a row was not stored in time."""
        for piece, size in self._pieces(rows):
            while self._rows and not self._has_room(len(piece), size):
                await self._change()
            self._admit(piece)
        self._check()

    async def finish(self) -> None:
        """Wait until every row is stored or refused."""
        self._check()
        while self._rows:
            await self._change()

    def _has_room(self, rows: int, size: int) -> bool:
        return len(self._rows) + rows <= self._max_rows and self._bytes + size <= self._max_bytes

    def _pieces(self, rows: Sequence[EncodedRow]) -> Iterator[tuple[list[EncodedRow], int]]:
        piece: list[EncodedRow] = []
        size = 0
        for row in rows:
            more = len(row[1]) + len(row[2])
            if piece and (len(piece) >= self._max_rows or size + more > self._max_bytes):
                yield piece, size
                piece, size = [], 0
            piece.append(row)
            size += more
        if piece:
            yield piece, size

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: KeylaneError) -> None:
        if self._failure is None:
            self._failure = failure
        self._changed.set()

    # ---- out ----------------------------------------------------------------------------------------

    def _admit(self, rows: Sequence[EncodedRow]) -> None:
        ready: list[int] = []
        for row in rows:
            self._count += 1
            number = self._count
            subject, head, data = row
            self._rows[number] = row
            self._bytes += len(head) + len(data)
            before = self._last.get(subject)
            self._last[subject] = number
            if before is None:
                ready.append(number)
            else:
                self._behind[before] = number
        self._send_now(ready)

    def _send_now(self, numbers: Sequence[int]) -> None:
        now = self._loop.time()
        if not self._outlet.is_up:
            for number in numbers:
                self._send_again(number, now)
            return
        rows, due, prefix = self._rows, self._due, self._outlet.prefix
        overdue = now + self._answer_s
        commands = []
        for number in numbers:
            due[number] = overdue
            subject, head, data = rows[number]
            commands.append(publish(subject, b"%b%d" % (prefix, number), head, data))
        if commands:
            self._outlet.send(b"".join(commands))

    def _send_again(self, number: int, first_sent: float) -> None:
        self._since.setdefault(number, first_sent)
        self._again.add(number)

    # ---- the server's side --------------------------------------------------------------------------

    def confirmed(self, tokens: Sequence[bytes]) -> None:
        rows = self._rows
        for number in map(int, tokens):
            if number in rows:  # else an answer to an earlier try
                self.stored += 1
                self._done(number)

    def answered(self, token: bytes, headers: bytes, data: bytes) -> None:
        number = int(token)
        if number not in self._rows:
            return  # an answer to an earlier try
        subject = self._rows[number][0].decode()
        try:
            ack = read_answer(subject, headers, data)
        except PublishFailed as failure:
            self._not_stored(number, failure)
            return
        if ack.stream == self._target.stream:
            self.confirmed([token])
            return
        self._fail(
            WriteFailed(
                f"a row for subject {subject!r} was stored in stream {ack.stream!r} (sequence {ack.sequence}) and not "
                f"in {self._target.stream!r}: the subjects of the two were changed meanwhile; delete it there and "
                "start again"
            )
        )

    def all_answered(self) -> None:
        if self._next:
            following, self._next = self._next, []
            self._send_now(following)
        self._changed.set()

    def _done(self, number: int) -> None:
        subject, head, data = self._rows.pop(number)
        self._bytes -= len(head) + len(data)
        self._due.pop(number, None)
        if self._since:
            self._since.pop(number, None)
            self._again.discard(number)
        self._pause_s = _SWEEP_S
        following = self._behind.pop(number, None)
        if following is None:
            del self._last[subject]
        else:
            self._next.append(following)

    def _not_stored(self, number: int, failure: PublishFailed) -> None:
        row = self._rows[number]
        now = self._loop.time()
        first_sent = self._due.pop(number, now + self._answer_s) - self._answer_s
        self._since.setdefault(number, first_sent)
        self._trouble = str(failure)
        if isinstance(failure, PublishRejected) and failure.err_code in _CONTENT:
            self._refuse(number, f"{_CONTENT[failure.err_code]} ({failure.description}, {failure.err_code})")
        elif isinstance(failure, NotStored) and not self._target.takes(row[0].decode()):
            self._homeless.add(number)
        else:
            self._again.add(number)
            self._again_at = max(self._again_at, now + self._pause_s)

    def _refuse(self, number: int, reason: str) -> None:
        self.refused_rows.append(RefusedRow(self._rows[number], reason))
        self._done(number)

    def link_changed(self, up: bool) -> None:
        if not up:
            self._trouble = "the connection to the server was lost"
            for number, overdue in self._due.items():
                self._send_again(number, overdue - self._answer_s)
            self._due.clear()
        self._again_at = 0.0

    def refused(self, error: PermissionDenied) -> None:
        subject = error.subject.encode()
        if subject in self._last or subject.startswith(self._outlet.prefix):
            self._fail(PermissionDenied(f"rows for stream {self._target.stream!r} cannot be published: {error}"))

    # ---- time ---------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        try:
            while True:
                await asyncio.sleep(_SWEEP_S)
                if self._rows:
                    self._look_at_clock(self._loop.time())
                if self._homeless:
                    await self._judge_homeless()
        except Exception as error:  # noqa: BLE001 - carried to whoever waits for the rows
            _log.exception("publishing rows to %r failed", self._target.stream)
            self._fail(WriteFailed(f"publishing rows to stream {self._target.stream!r} failed: {error!r}"))

    def _look_at_clock(self, now: float) -> None:
        if self._connection.is_closed:
            self._fail(Disconnected(f"the connection was closed: {self._connection.closed_reason}"))
            return
        oldest = min(self._since, key=self._since.__getitem__, default=None)
        if oldest is not None and now - self._since[oldest] > self._timeout_s:
            self._fail(
                WriteFailed(
                    f"a row for subject {shown(self._rows[oldest][0].decode())} was not stored in stream "
                    f"{self._target.stream!r} within {self._timeout_s:g} s ({len(self._rows)} rows are unconfirmed): "
                    f"{self._trouble}"
                )
            )
            return
        while self._due and (first := next(iter(self._due))) and self._due[first] < now:
            self._send_again(first, self._due.pop(first) - self._answer_s)
            self._trouble = f"no answer within {self._answer_s:g} s"
        if self._again and self._outlet.is_up and now >= self._again_at:
            again = sorted(self._again)
            self._again.clear()
            self._send_now(again)
            self._again_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    async def _judge_homeless(self) -> None:
        """No stream answered: none has the subject, or a leader is away. Only our own stream can say which."""
        asked, self._homeless = self._homeless, set()
        try:
            config = (await streams.info_json(self._connection, self._target.stream))["config"]
        except KeylaneError as error:
            self._trouble = str(error)
            self._again.update(number for number in asked if number in self._rows)
            self._again_at = self._loop.time() + self._pause_s
            return
        subjects = config.get("subjects") or ()
        for number in sorted(asked & self._rows.keys()):
            subject = self._rows[number][0].decode()
            if any(matches(each, subject) for each in subjects):
                self._again.add(number)
            else:
                self._refuse(number, f"no stream takes its subject; {config['name']!r} takes {', '.join(subjects)}")
        self.all_answered()
