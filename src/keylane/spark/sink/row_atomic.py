"""Publishes rows in atomic batches (nats-server 2.12, streams with `allow_atomic`): all rows of a batch, or none.

One batch is on its way at a time, so a batch that fails is never overtaken. The server refuses a whole batch when one
id in it is stored already (10201): what a task writes again therefore goes by `RowLanes`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from keylane.errors import PermissionDenied
from keylane.jetstream.connection import Connection
from keylane.jetstream.headers import status_of
from keylane.spark.sink.row_batches import Interrupted, News
from keylane.spark.sink.row_outlet import Outlet, Row, publish

MAX_ROWS = 1000
"""The server's limit."""
_HOLDS_DUPLICATE = 10201


class RowAtomic:
    """Gathers rows into batches and commits one after the other."""

    def __init__(self, connection: Connection, *, max_rows: int, max_bytes: int) -> None:
        self._outlet = Outlet(connection, self)
        self._max_rows = min(max_rows, MAX_ROWS)
        self._max_bytes = max_bytes
        self._gathered: list[Row] = []
        self._bytes = 0
        self._sent: list[Row] = []
        """The batch on its way."""
        self._batch = b""
        self._news = News()
        self._repeated = False
        self.stored = 0

    def __repr__(self) -> str:
        return f"<RowAtomic {len(self._sent)} on their way, {len(self._gathered)} gathered>"

    async def open(self) -> None:
        await self._outlet.open()

    async def close(self) -> None:
        await self._outlet.close()

    async def send(self, rows: Sequence[Row]) -> None:
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

    async def _commit(self, not_sent: Sequence[Row]) -> None:
        await self._answer(not_sent)
        if not self._outlet.is_up:
            raise self._interrupted(not_sent, "the connection to the server is down")
        self._sent, self._gathered, self._bytes = self._gathered, [], 0
        self._batch = secrets.token_hex(8).encode()
        self._outlet.send(b"".join(self._commands()))

    def _commands(self) -> list[bytes]:
        """Only the first and the last ask for an answer: a refusal is told by either."""
        last = len(self._sent)
        commands = []
        for number, (subject, head, data) in enumerate(self._sent, start=1):
            commit = b"Nats-Batch-Commit: 1\r\n" if number == last else b""
            lines = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n%b\r\n" % (self._batch, number, commit)
            reply = b"%b%b.%d" % (self._outlet.prefix, self._batch, number) if number in (1, last) else b""
            commands.append(publish(subject, reply, head[:-2] + lines, data))
        return commands

    async def _answer(self, not_sent: Sequence[Row]) -> None:
        """Wait for the answer to the batch on its way."""
        while self._sent:
            broken = await self._news.wait()
            if broken is not None:
                raise self._interrupted(not_sent, broken)

    def _interrupted(self, not_sent: Sequence[Row], reason: str) -> Interrupted:
        rows = [*self._sent, *self._gathered, *not_sent]
        self._sent, self._gathered, self._bytes = [], [], 0
        self._news.broken = None
        interrupted = Interrupted(rows, reason, repeated=self._repeated)
        self._repeated = False
        return interrupted

    # ---- the server's side --------------------------------------------------------------------------

    def confirmed(self, tokens: Sequence[bytes]) -> None:
        """No answer is a plain one here."""

    def answered(self, token: bytes, headers: bytes, data: bytes) -> None:
        if not self._sent or not token.startswith(self._batch):
            return  # of a batch that was given up
        if headers and (status := status_of(headers))[0]:
            self._news.broken = f"{status[0]} {status[1]}"
        elif data:
            try:
                answer = json.loads(data)
            except ValueError:
                answer = {}
            if not isinstance(answer, dict) or "error" in answer or answer.get("count") != len(self._sent):
                self._news.broken = data[:200].decode("utf-8", "replace")
                self._repeated = b'"err_code":%d' % _HOLDS_DUPLICATE in data
            else:
                self.stored += len(self._sent)
                self._sent = []

    def all_answered(self) -> None:
        self._news.came()

    def link_changed(self, up: bool) -> None:
        if not up and self._sent:
            self._news.breaks("the connection to the server was lost")

    def refused(self, error: PermissionDenied) -> None:
        """The rows come to `RowLanes`, which is refused them again and says so."""
        if self._sent:
            self._news.breaks(str(error))
