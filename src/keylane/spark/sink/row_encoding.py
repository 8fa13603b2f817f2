"""Arrow batches to rows as they are sent, and the rows that can never be sent.

Owns what a row must look like. Works on whole columns: each distinct subject is checked once, payloads are cut from
Arrow's buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.core.subjects import check_subject, shown
from keylane.errors import InvalidInput
from keylane.jetstream import encode_headers
from keylane.spark.options import READ_COLUMNS
from keylane.spark.sink.row_ids import RowIds
from keylane.spark.sink.row_publisher import EncodedRow
from keylane.spark.tasks import Target

MAX_HEADER_BYTES = 65_535
_MAX_ID_BYTES = 1024
_SUBJECTS_KEPT = 50_000
_BEGIN = len(b"NATS/1.0\r\n")


class BadRow(NamedTuple):
    """A row that no try can publish."""

    subject: str
    """As it was given; empty where there was none."""
    message_id: bytes
    lines: bytes
    """Its headers as they would be sent, without the id; empty where they are the fault."""
    data: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """The rows of one Arrow batch."""

    rows: list[EncodedRow]
    """For subjects that the stream takes."""
    foreign: list[EncodedRow]
    """For other subjects: only the server knows whether they reach the stream, so they name it."""
    bad: list[BadRow]


class _Look(NamedTuple):
    """What is known about a subject."""

    name: bytes
    fault: str | None
    is_fine: bool
    """The stream takes it."""


class RowEncoder:
    """Encodes one task's batches, in their order."""

    def __init__(self, target: Target, subject: str | None, ids: RowIds, max_payload: int) -> None:
        self._target = target
        self._subject = subject
        self._ids = ids
        self._max_bytes = min(max_payload, target.max_message_bytes or max_payload)
        self._expected = b"Nats-Expected-Stream: %b\r\n" % target.stream.encode()
        self._looks: dict[str, _Look] = {}
        self.rows = 0
        """How many were seen."""

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        columns = {name.lower(): batch.column(index) for index, name in enumerate(batch.schema.names)}
        _refuse_read_columns(columns)
        count = batch.num_rows
        faults: dict[int, str] = {}
        foreign: set[int] = set()
        subjects = self._subjects(columns.get("subject"), count, faults, foreign)
        datas = cut(columns["data"])
        lines = _header_lines(columns.get("headers"), count, faults)
        sequences, sources = _values(columns.get("sequence")), _values(columns.get("source_stream"))
        ids = self._ids.next(subjects, lines, datas, sequences, sources)
        _put_given(_values(columns.get("message_id")), ids, faults)
        heads = [b"NATS/1.0\r\nNats-Msg-Id: %b\r\n%b\r\n" % pair for pair in zip(ids, lines, strict=True)]
        self._measure(heads, datas, faults)
        first, self.rows = self.rows, self.rows + count
        if not faults and not foreign:
            return Encoded(list(zip(subjects, heads, datas, strict=True)), [], [])
        encoded = Encoded([], [], [])
        for index in range(count):
            subject, head, data = subjects[index], heads[index], datas[index]
            if index in faults:
                reason = f"row {first + index + 1} of its task: {faults[index]}"
                encoded.bad.append(BadRow(subject.decode(), ids[index], lines[index], data, reason))
            elif index in foreign:
                encoded.foreign.append((subject, head[:-2] + self._expected + b"\r\n", data))
            else:
                encoded.rows.append((subject, head, data))
        return encoded

    def _subjects(
        self, column: pa.Array | None, count: int, faults: dict[int, str], foreign: set[int]
    ) -> Sequence[bytes]:
        if column is None:
            assert self._subject is not None
            return [self._subject.encode()] * count
        coded = column.dictionary_encode()
        looks = [self._looks.get(text) or self._look(text) for text in coded.dictionary.to_pylist()]
        indices: list[int | None] = coded.indices.to_pylist()
        if coded.null_count or not all(look.is_fine for look in looks):
            for row, index in enumerate(indices):
                if index is None:
                    faults[row] = "its subject is null; every row needs one"
                elif (fault := looks[index].fault) is not None:
                    faults[row] = fault
                elif not looks[index].is_fine:
                    foreign.add(row)
        return [b"" if index is None else looks[index].name for index in indices]

    def _look(self, subject: str) -> _Look:
        """Subjects repeat: each is looked at once."""
        if len(self._looks) >= _SUBJECTS_KEPT:
            self._looks.clear()
        fault = _subject_fault(subject)
        look = self._looks[subject] = _Look(subject.encode(), fault, fault is None and self._target.takes(subject))
        return look

    def _measure(self, heads: Sequence[bytes], datas: Sequence[bytes], faults: dict[int, str]) -> None:
        """The server ends the connection on a message that is too large, so none is sent."""
        longest = max(map(len, heads), default=0)
        if longest <= MAX_HEADER_BYTES - 100 and longest + max(map(len, datas), default=0) <= self._max_bytes - 100:
            return
        for index, (head, data) in enumerate(zip(heads, datas, strict=True)):
            # What names the stream or a batch comes on top.
            size = len(head) + len(data) + 100
            if len(head) + 100 > MAX_HEADER_BYTES:
                faults.setdefault(index, f"its headers have {len(head)} bytes, and the server takes 64 kB")
            elif size > self._max_bytes:
                faults.setdefault(
                    index,
                    f"with its headers it has {size} bytes, and {self._max_bytes} are allowed (max_payload of the "
                    f"server, max_msg_size of stream {self._target.stream!r})",
                )


def cut(column: pa.Array) -> list[bytes]:
    """The values of a text or binary column; null counts as empty."""
    if column.null_count:
        column = column.fill_null(b"" if _is_binary(column.type) else "")
    wide = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    _, offsets, content = column.buffers()
    if content is None:
        return [b""] * len(column)
    places = np.frombuffer(offsets, np.int64 if wide else np.int32)[column.offset : column.offset + len(column) + 1]
    begin, end = int(places[0]), int(places[-1])
    whole = content[begin:end].to_pybytes() if end > begin else b""
    ends: list[int] = (places - begin).tolist()
    return [whole[ends[index] : ends[index + 1]] for index in range(len(ends) - 1)]


def header_lines_of(head: bytes) -> bytes:
    """The lines of a header block, without its first and its last."""
    return head[_BEGIN:-2]


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _subject_fault(subject: str) -> str | None:
    try:
        check_subject(subject)
    except InvalidInput as error:
        return str(error)
    return None


def _header_lines(column: pa.Array | None, count: int, faults: dict[int, str]) -> list[bytes]:
    """The lines of each row. Names that steer the server are left out, and so are headers whose value is null."""
    lines = [b""] * count
    if column is None:
        return lines
    for row, entries in enumerate(column.to_pylist()):
        if not entries:
            continue
        wanted = {name: value for name, value in entries if value is not None and not name.lower().startswith("nats-")}
        if wanted:
            try:
                lines[row] = header_lines_of(encode_headers(wanted))
            except InvalidInput as error:
                faults.setdefault(row, str(error))
    return lines


def _refuse_read_columns(columns: Mapping[str, pa.Array]) -> None:
    for name in READ_COLUMNS:
        column = columns.get(name)
        if column is not None and column.null_count != len(column):
            raise InvalidInput(
                f"column {name!r} has values, which only the server gives: write only subject and data, or in SQL "
                "INSERT INTO … (subject, data) SELECT …"
            )


def _values(column: pa.Array | None) -> list[Any] | None:
    """The values of a column, or None where it is missing or all are null."""
    return None if column is None or column.null_count == len(column) else column.to_pylist()


def _put_given(given: Sequence[str | None] | None, ids: list[bytes], faults: dict[int, str]) -> None:
    """An id that a row brings along wins."""
    for row, text in enumerate(given or ()):
        if text is None:
            continue
        if not text or len(text.encode()) > _MAX_ID_BYTES or text != text.strip() or not text.isprintable():
            faults.setdefault(
                row,
                f"its message_id is {shown(text)}: give 1 to {_MAX_ID_BYTES} bytes without line breaks, control "
                "characters and blanks around them",
            )
        else:
            ids[row] = text.encode()
