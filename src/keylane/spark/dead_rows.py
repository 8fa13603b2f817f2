"""Rows that can never be published, in the dead-letter stream of the stream that they were for.

They look like a group's dead letters (docs/dead-letters.md), so the same commands show, drop and replay them. The
group is the query's name, or `spark`.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from keylane.errors import ApiUnavailable, Disconnected, NotStored, OutcomeUnknown, RequestTimeout, RowRejected
from keylane.groups.dead_letters import dead_letter_stream, ensure_dead_letter_stream
from keylane.groups.letter_headers import error_line, escaped, header_block, kept_lines
from keylane.jetstream.connection import Connection
from keylane.jetstream.publish_raw import publish_raw
from keylane.spark.row_encoding import BadRow

_TRY_S = 5.0
_PAUSE_S = 0.25
_PASSING = (NotStored, OutcomeUnknown, ApiUnavailable, RequestTimeout, Disconnected)


class DeadRows:
    """Where one task puts its bad rows."""

    def __init__(self, connection: Connection, stream: str, *, group: str, partition: int, timeout_s: float) -> None:
        self._connection = connection
        self._stream = stream
        self._name = dead_letter_stream(stream)
        self._group = group
        self._partition = partition
        self._timeout_s = timeout_s
        self._is_ready = False
        self.count = 0

    def __repr__(self) -> str:
        return f"<DeadRows {self.count} in stream {self._name!r}>"

    async def put(self, row: BadRow) -> None:
        """Store the row. Returns when the server has confirmed it. The same row within an hour is stored once."""
        subject = f"keylane.dlq.{self._stream}.{self._group}.{self._partition}".encode()
        head, data = self._letter(row)
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout_s
        while True:
            try:
                if not self._is_ready:
                    await ensure_dead_letter_stream(self._connection, self._stream, like=self._stream)
                    self._is_ready = True
                await publish_raw(self._connection, subject, head, data, _TRY_S)
            except _PASSING:
                self._is_ready = False
                if loop.time() + _PAUSE_S > end:
                    raise
                await asyncio.sleep(_PAUSE_S)
            else:
                self.count += 1
                return

    def _letter(self, row: BadRow) -> tuple[bytes, bytes]:
        whole = self._head(row, row.subject, row.lines)
        room = self._connection.nats.max_payload
        if len(whole) + len(row.data) <= room and len(whole) < 65_000:
            return whole, row.data
        # Only a part fits. Without its subject nobody can replay that part by mistake.
        cut = self._head(row, "", b"")
        return cut, row.data[: max(0, room - len(cut))]

    def _head(self, row: BadRow, subject: str, lines: bytes) -> bytes:
        ours = {
            "Keylane-Subject": escaped(subject),
            "Keylane-Stream": escaped(self._stream),
            "Keylane-Sequence": "0",
            "Keylane-Group": escaped(self._group),
            "Keylane-Member": "spark",
            "Keylane-Partition": str(self._partition),
            "Keylane-Key": "",
            "Keylane-Tries": "1",
            "Keylane-Error": error_line(RowRejected(why(row))),
            "Keylane-Time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "Nats-Msg-Id": f"row {escaped(row.message_id.decode())}",
            "Nats-Expected-Stream": self._name,
        }
        block = [(name.encode(), value.encode()) for name, value in ours.items()]
        return header_block([*block, *kept_lines(b"NATS/1.0\r\n" + lines)])


def why(row: BadRow) -> str:
    """Which row it is and what is wrong with it."""
    return f"subject {row.subject!a}, id {row.message_id.decode()!a}: {row.reason}"
