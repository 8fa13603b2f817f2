"""Message ids of rows: the same row gets the same id whenever its task runs again. Pure.

The server stores a message id once within the stream's duplicate window, so an id that two different rows share loses
one of them, and a row with two ids is there twice. Losing is worse. So every id holds a digest of what the row
publishes: rows that differ can never share an id, whatever Spark does with partitions and order, and an id that should
have been the same and is not (because the row came out differently) makes a duplicate and no loss.

- A row with the `sequence` of the message that it was made from: scope, stream of that message where it is known,
  sequence, digest; and an ordinal for further equal rows of the same message that follow each other. Where its task
  stands does not count, so the id survives another split of the work.
- Any other row: one digest of run, partition, row number and the row. The server looks through every id and keeps it in
  memory, so a short one is stored faster.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import quote

_DIGEST_BYTES = 9
"""72 bits, twelve characters: beside a sequence, where only the rows of one message can be taken for each other."""
_ID_BYTES = 12
"""96 bits, sixteen characters: alone, where any two rows could be."""
_NAMES_KEPT = 1000


@dataclass(frozen=True, slots=True)
class IdScope:
    """What all ids of one task are made of, besides the rows."""

    scope: str
    """Of rows with a sequence: `idPrefix`, else the query's name, else its id."""
    run: str
    """Of rows without: the query and the batch, or the one write."""
    partition: int


def short(name: str) -> str:
    """Twelve characters for a long name: the server keeps every id in memory for as long as its window lasts."""
    return b2a_base64(blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest(), newline=False).decode()


class RowIds:
    """The ids of one task's rows, asked for in their order.

    >>> ids = RowIds(IdScope("orders-out", "5f1c:7", 0))
    >>> ids.next([b"a.b"] * 3, [b""] * 3, [b"x"] * 3, [17, 17, 18])
    [b'orders-out:17:rzULUggLaMuH', b'orders-out:17:rzULUggLaMuH:1', b'orders-out:18:rzULUggLaMuH']
    """

    __slots__ = ("_message", "_names", "_of_run", "_of_scope", "_row", "_seen")

    def __init__(self, scope: IdScope) -> None:
        self._of_scope = scope.scope.encode()
        self._of_run = f"{scope.run}:{scope.partition}".encode()
        self._row = 0
        self._message: tuple[int | None, str | None] = (None, None)
        self._seen: dict[bytes, int] = {}
        """Of the message whose rows are being seen: how often each digest came."""
        self._names: dict[str, bytes] = {}

    def next(
        self,
        subjects: Sequence[bytes],
        headers: Sequence[bytes],
        datas: Sequence[bytes],
        sequences: Sequence[int | None] | None = None,
        sources: Sequence[str | None] | None = None,
    ) -> list[bytes]:
        """The ids of the next rows."""
        first, self._row = self._row, self._row + len(subjects)
        rows = zip(subjects, headers, datas, strict=True)
        if sequences is None:
            return self._of_places(first, rows)
        sources = sources or [None] * len(subjects)
        return [
            self._of_places(number, [row])[0] if sequence is None else self._of_message(sequence, source, *row)
            for number, (row, sequence, source) in enumerate(zip(rows, sequences, sources, strict=True), first)
        ]

    def _of_places(self, first: int, rows: Iterable[tuple[bytes, bytes, bytes]]) -> list[bytes]:
        run = self._of_run
        contents = [
            b"%b:%d\0%b\0%d\0%b%b" % (run, number, subject, len(head), head, data)
            for number, (subject, head, data) in enumerate(rows, first)
        ]
        return [b2a_base64(blake2b(one, digest_size=_ID_BYTES).digest(), newline=False) for one in contents]

    def _of_message(self, sequence: int, source: str | None, subject: bytes, head: bytes, data: bytes) -> bytes:
        content = b"%b\0%d\0%b%b" % (subject, len(head), head, data)
        digest = b2a_base64(blake2b(content, digest_size=_DIGEST_BYTES).digest(), newline=False)
        if (sequence, source) != self._message:
            self._message = (sequence, source)
            self._seen = {digest: 1}
            ordinal = 0
        else:
            ordinal = self._seen.get(digest, 0)
            self._seen[digest] = ordinal + 1
        of_source = b"" if source is None else (self._names.get(source) or self._name(source))
        of_ordinal = b":%d" % ordinal if ordinal else b""
        return b"%b%b:%d:%b%b" % (self._of_scope, of_source, sequence, digest, of_ordinal)

    def _name(self, source: str) -> bytes:
        """A stream's name as part of an id. Names repeat: each is quoted once."""
        if len(self._names) >= _NAMES_KEPT:
            self._names.clear()
        name = self._names[source] = b":%b" % quote(source).encode()
        return name
