"""Where a task puts the rows that can never be published: among the dead letters of the stream (docs/dead-letters.md).

The group is the query's name, or `spark`.
"""

from __future__ import annotations

from keylane.core.subjects import shown
from keylane.errors import RowRejected
from keylane.groups import Unpublished, put_unpublished
from keylane.jetstream.connection import Connection
from keylane.spark.sink.row_encoding import BadRow


class DeadRows:
    """The dead letters of one task."""

    def __init__(self, connection: Connection, stream: str, *, group: str, partition: int, timeout_s: float) -> None:
        self._connection = connection
        self._stream = stream
        self._group = group
        self._partition = partition
        self._timeout_s = timeout_s
        self.count = 0

    def __repr__(self) -> str:
        return f"<DeadRows {self.count} of stream {self._stream!r}>"

    async def put(self, row: BadRow) -> None:
        """Store the row. Returns when the server has confirmed it. The same row within an hour is stored once."""
        letter = Unpublished(
            stream=self._stream,
            subject=row.subject,
            message_id=row.message_id.decode(),
            header_lines=row.lines,
            data=row.data,
            group=self._group,
            member="spark",
            partition=self._partition,
            error=RowRejected(why(row)),
        )
        await put_unpublished(self._connection, letter, timeout_s=self._timeout_s)
        self.count += 1


def why(row: BadRow) -> str:
    """Which row it is and what is wrong with it."""
    return f"subject {shown(row.subject)}, id {shown(row.message_id.decode())}: {row.reason}"
