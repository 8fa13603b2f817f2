"""Publishes rows in batches; what does not go smoothly ends as `BatchInterrupted`, and `RowPublisher` takes over.

Atomic batches (nats-server 2.12, streams with `allow_atomic`): all rows of a batch are stored, or none. One batch is on
its way at a time, so a batch that fails is never overtaken. The server refuses a whole batch when one id in it is
stored already (10201): what a task writes again therefore goes by `RowPublisher`.

Fast-ingest batches (nats-server 2.14, streams with `allow_batched`): the server numbers the messages of a batch, stores
them as they come, confirms them by the hundred and says how many may be on their way. With the gap mode `fail` it ends
the batch at the first message that is missing or refused and takes nothing behind it, so order survives every failure.
A message whose id is stored already counts as confirmed. The protocol is in the reply subject:
`<inbox>.<batch>.<flow>.fail.<number>.<operation>.$FI`. The operation is 0 for the first message, 1 for the others, and
3 for the end, whose command is not stored.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from keylane.errors import PermissionDenied
from keylane.jetstream import Connection, status_of
from keylane.spark.sink.row_publisher import EncodedRow, Outlet, publish

ANSWER_S = 5.0


class BatchInterrupted(Exception):
    """A batch ended early. `rows` are not known to be stored: publish them by `RowPublisher`, in this order."""

    def __init__(self, rows: Sequence[EncodedRow], reason: str, *, repeated: bool = False) -> None:
        super().__init__(f"{len(rows)} rows were not confirmed: {reason}")
        self.rows = rows
        self.reason = reason
        self.repeated = repeated
        """Some of them are stored already: an earlier attempt at the task wrote them."""


class BatchPublisher(ABC):
    """Publishes rows in batches. After `BatchInterrupted` it begins a new one."""

    def __init__(self, connection: Connection) -> None:
        self.stored = 0
        self._outlet = Outlet(connection, self)
        self._broken: str | None = None
        """Why the batch on its way is over."""
        self._came = asyncio.Event()

    @abstractmethod
    async def send(self, rows: Sequence[EncodedRow]) -> None:
        """Publish; waits while too much is on its way."""

    @abstractmethod
    async def finish(self) -> None:
        """Wait until all is confirmed."""

    @property
    @abstractmethod
    def _is_on_its_way(self) -> bool:
        """Whether a batch is."""

    @abstractmethod
    def _read_answer(self, token: bytes, answer: dict[str, Any], data: bytes) -> None:
        """An answer of the server to the batch on its way; `data` is how it was written."""

    @abstractmethod
    def _expects(self, token: bytes) -> bool:
        """Whether this is an answer to the batch on its way, not to one that was given up."""

    async def open(self) -> None:
        await self._outlet.open()

    async def close(self) -> None:
        await self._outlet.close()

    async def _wait(self) -> str | None:
        """Until something comes; returns why the batch is over, if it is. Silence ends it too."""
        if self._broken is None:
            self._came.clear()
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._came.wait()
            except TimeoutError:
                self._broken = f"no answer within {ANSWER_S:g} s"
        return self._broken

    # ---- the server's side --------------------------------------------------------------------------

    def confirmed(self, tokens: Sequence[bytes]) -> None:
        assert not tokens, "no answer to a batch is a plain one"

    def answered(self, token: bytes, headers: bytes, data: bytes) -> None:
        if not self._expects(token):
            return
        if headers and (status := status_of(headers))[0]:
            self._broken = f"{status[0]} {status[1]}"
            return
        try:
            answer = json.loads(data)
        except ValueError:
            answer = {}
        self._read_answer(token, answer if isinstance(answer, dict) else {}, data)

    def all_answered(self) -> None:
        self._came.set()

    def link_changed(self, up: bool) -> None:
        if not up:
            self._break("the connection to the server was lost")

    def refused(self, error: PermissionDenied) -> None:
        """The rows come to `RowPublisher`, which is refused them again and says so."""
        self._break(str(error))

    def _break(self, why: str) -> None:
        if self._is_on_its_way:
            self._broken = why
            self._came.set()


MAX_ROWS = 1000
"""The server's limit."""
_HOLDS_DUPLICATE = 10201


class AtomicPublisher(BatchPublisher):
    """Gathers rows into batches and commits one after the other."""

    def __init__(self, connection: Connection, *, max_rows: int, max_bytes: int) -> None:
        super().__init__(connection)
        self._max_rows = min(max_rows, MAX_ROWS)
        self._max_bytes = max_bytes
        self._gathered: list[EncodedRow] = []
        self._bytes = 0
        self._sent: list[EncodedRow] = []
        """The batch on its way."""
        self._batch = b""
        self._repeated = False

    def __repr__(self) -> str:
        return f"<AtomicPublisher {len(self._sent)} on their way, {len(self._gathered)} gathered>"

    async def send(self, rows: Sequence[EncodedRow]) -> None:
        """Publish; waits while the batch before is on its way."""
        for at, row in enumerate(rows):
            size = len(row[1]) + len(row[2])
            if self._gathered and (len(self._gathered) >= self._max_rows or self._bytes + size > self._max_bytes):
                await self._commit(rows[at:])
            self._gathered.append(row)
            self._bytes += size

    async def finish(self) -> None:
        if self._gathered:
            await self._commit(())
        await self._answer(())

    async def _commit(self, not_sent: Sequence[EncodedRow]) -> None:
        await self._answer(not_sent)
        if not self._outlet.is_up:
            raise self._interrupted(not_sent, "the connection to the server is down")
        self._sent, self._gathered, self._bytes = self._gathered, [], 0
        self._batch = secrets.token_hex(8).encode()
        self._outlet.send(b"".join(self._commands()))

    def _commands(self) -> list[bytes]:
        """Only the first and the last ask for an answer: either reports a refusal."""
        last = len(self._sent)
        commands = []
        for number, (subject, head, data) in enumerate(self._sent, start=1):
            commit = b"Nats-Batch-Commit: 1\r\n" if number == last else b""
            lines = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n%b\r\n" % (self._batch, number, commit)
            reply = b"%b%b.%d" % (self._outlet.prefix, self._batch, number) if number in (1, last) else b""
            commands.append(publish(subject, reply, head[:-2] + lines, data))
        return commands

    async def _answer(self, not_sent: Sequence[EncodedRow]) -> None:
        """Wait for the answer to the batch on its way."""
        while self._sent:
            broken = await self._wait()
            if broken is not None:
                raise self._interrupted(not_sent, broken)

    def _interrupted(self, not_sent: Sequence[EncodedRow], reason: str) -> BatchInterrupted:
        rows = [*self._sent, *self._gathered, *not_sent]
        self._sent, self._gathered, self._bytes = [], [], 0
        self._broken = None
        interrupted = BatchInterrupted(rows, reason, repeated=self._repeated)
        self._repeated = False
        return interrupted

    # ---- the server's side --------------------------------------------------------------------------

    @property
    def _is_on_its_way(self) -> bool:
        return bool(self._sent)

    def _expects(self, token: bytes) -> bool:
        return bool(self._sent) and token.startswith(self._batch)

    def _read_answer(self, token: bytes, answer: dict[str, Any], data: bytes) -> None:
        if not data:
            return  # the first message is stored aside until the commit
        if "error" in answer or answer.get("count") != len(self._sent):
            self._broken = data[:200].decode("utf-8", "replace")
            self._repeated = b'"err_code":%d' % _HOLDS_DUPLICATE in data
        else:
            self.stored += len(self._sent)
            self._sent = []


_FLOW = 500
"""How many messages may at most pass between two confirmations; the server's own limit too."""


class IngestPublisher(BatchPublisher):
    """One batch after the other; each lives until `finish`, an interruption, or the bound of bytes."""

    def __init__(self, connection: Connection, *, max_rows: int, max_bytes: int) -> None:
        super().__init__(connection)
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._begin()

    def __repr__(self) -> str:
        return f"<IngestPublisher {self._sent} sent, {len(self._unconfirmed)} unconfirmed>"

    def _begin(self) -> None:
        self._batch = secrets.token_hex(8).encode()
        self._flow = min(_FLOW, max(1, self._max_rows // 2))
        self._reply = b"%b%b.%d.fail." % (self._outlet.prefix, self._batch, self._flow)
        self._sent = 0
        self._confirmed = 0
        self._unconfirmed: list[EncodedRow] = []
        self._pieces: deque[tuple[int, int]] = deque()
        """The last number and the bytes of each piece on its way."""
        self._bytes = 0
        self._subject = b""
        self._is_done = False
        self._broken = None

    async def send(self, rows: Sequence[EncodedRow]) -> None:
        """Publish; waits while more is on its way than the server or the bounds allow."""
        at = 0
        while at < len(rows):
            limit = min(self._max_rows, 4 * self._flow)
            piece, size = self._piece(rows, at, max(1, limit // 4))
            if self._unconfirmed and self._bytes + size > self._max_bytes:
                await self._end(rows[at:])
                continue
            while self._unconfirmed and len(self._unconfirmed) + len(piece) > limit:
                await self._change(rows[at:])
                limit = max(limit, min(self._max_rows, 4 * self._flow))
            at += len(piece)
            self._unconfirmed += piece
            if not self._outlet.is_up:
                raise self._interrupted(rows[at:], "the connection to the server is down")
            self._outlet.send(self._commands(piece))
            self._pieces.append((self._sent, size))
            self._bytes += size
        if self._broken is not None:
            raise self._interrupted((), self._broken)

    async def finish(self) -> None:
        await self._end(())

    def _piece(self, rows: Sequence[EncodedRow], at: int, most: int) -> tuple[Sequence[EncodedRow], int]:
        """The next rows, as many as fit, and their bytes."""
        piece = rows[at : at + most]
        sizes = [len(head) + len(data) for _, head, data in piece]
        while len(piece) > 1 and sum(sizes) > self._max_bytes:
            half = len(piece) // 2
            piece, sizes = piece[:half], sizes[:half]
        return piece, sum(sizes)

    def _commands(self, rows: Sequence[EncodedRow]) -> bytes:
        first, reply = self._sent + 1, self._reply
        self._sent += len(rows)
        self._subject = rows[-1][0]
        commands = [
            b"HPUB %b %b%d.1.$FI %d %d\r\n%b%b\r\n"
            % (subject, reply, number, len(head), len(head) + len(data), head, data)
            for number, (subject, head, data) in enumerate(rows, first)
        ]
        if first == 1:
            subject, head, data = rows[0]
            commands[0] = publish(subject, reply + b"1.0.$FI", head, data)
        return b"".join(commands)

    async def _end(self, not_sent: Sequence[EncodedRow]) -> None:
        """End the batch, by a command that stores nothing, and wait for its last confirmation."""
        if self._broken is not None:
            raise self._interrupted(not_sent, self._broken)
        if not self._sent:
            return
        self._outlet.send(b"PUB %b %b%d.3.$FI 0\r\n\r\n" % (self._subject, self._reply, self._sent + 1))
        while not self._is_done:
            await self._change(not_sent)
        self._begin()

    async def _change(self, not_sent: Sequence[EncodedRow]) -> None:
        broken = await self._wait()
        if broken is not None:
            raise self._interrupted(not_sent, broken)

    def _interrupted(self, not_sent: Sequence[EncodedRow], reason: str) -> BatchInterrupted:
        rows = [*self._unconfirmed, *not_sent]
        self._begin()
        return BatchInterrupted(rows, reason)

    # ---- the server's side --------------------------------------------------------------------------

    @property
    def _is_on_its_way(self) -> bool:
        return self._sent > 0

    def _expects(self, token: bytes) -> bool:
        return token.startswith(self._batch) and self._broken is None

    def _read_answer(self, token: bytes, answer: dict[str, Any], data: bytes) -> None:
        if answer.get("type") == "ack":
            self._flow = max(1, int(answer["msgs"]))
            self._confirm(int(answer["seq"]))
        elif "batch" in answer and "error" not in answer:
            self._confirm(int(answer["count"]))
            if self._unconfirmed:
                self._broken = "the server ended the batch early"
            self._is_done = True
        else:
            self._broken = data[:200].decode("utf-8", "replace")

    def _confirm(self, upto: int) -> None:
        if upto <= self._confirmed:
            return
        del self._unconfirmed[: upto - self._confirmed]
        self.stored += upto - self._confirmed
        self._confirmed = upto
        while self._pieces and self._pieces[0][0] <= upto:
            self._bytes -= self._pieces.popleft()[1]
