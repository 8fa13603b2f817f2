"""The columns of messages: what both readers give, and subject, partition, key, source and headers made from it.

Arrays are made from their buffers, without a Python object for each row: `pyarrow.array` imports pandas, which takes a
worker a second.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]

from keylane.core.partitions import strip_partition
from keylane.errors import InvalidInput
from keylane.spark.executor.framing import Mask, Octets, Positions
from keylane.spark.tasks import ReadSpec


class Messages(NamedTuple):
    """Arrow arrays of one length, in order of the sequence."""

    subjects: pa.Array
    """As they are stored, in bytes."""
    data: pa.Array
    sequences: pa.Array
    timestamps: pa.Array
    headers: pa.Array | None
    """The stored header block of each message, its first line included; None where none has headers."""

    def cut(self, begin: int, end: int) -> Messages:
        length = end - begin
        return Messages(*(one if one is None else one.slice(begin, length) for one in self))


_MOST_KEPT = 100_000

SubjectParts = tuple[str, int | None, str | None]
"""Subject without its number, partition, key."""


class SubjectColumns:
    """Knows the subjects of one split."""

    def __init__(self, reading: ReadSpec) -> None:
        self._numbered = reading.numbered
        self._partitioning = reading.partitioning
        self._places: dict[bytes, SubjectParts] = {}

    def __call__(self, stored: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
        """The columns subject, partition and key."""
        encoded = stored.dictionary_encode()
        known = self._places
        if len(known) > _MOST_KEPT:
            known.clear()
        places = [known.get(one) or self._place(one) for one in encoded.dictionary.to_pylist()]
        subjects, partitions, keys = zip(*places, strict=True)
        numbered = np.fromiter((-1 if one is None else one for one in partitions), np.int32, len(places))
        rows = encoded.indices
        return (texts(subjects).take(rows), numbers(numbered, numbered >= 0).take(rows), texts(keys).take(rows))

    def _place(self, stored: bytes) -> SubjectParts:
        subject, partition, key = self._look_up(stored.decode("utf-8", "surrogateescape"))
        self._places[stored] = place = (_shown_text(subject), partition, None if key is None else _shown_text(key))
        return place

    def _look_up(self, stored: str) -> SubjectParts:
        """Subjects that no partitioning knows have no key and no partition: they are data, not mistakes."""
        subject, partition = stored, None
        if self._numbered:
            try:
                partition, subject = strip_partition(stored)
            except InvalidInput:
                return stored, None, None
        for one in self._partitioning:
            try:
                key = one.key(subject)
            except InvalidInput:
                continue
            return subject, one.partition(subject) if partition is None else partition, key
        return subject, partition, None


def _shown_text(text: str) -> str:
    """Text for a column: what is not UTF-8 is written with backslashes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


_SOURCE = b"\r\nNats-Stream-Source: "
_SOURCE_VALUE = re.compile(rb"\r\nNats-Stream-Source: ([^ \r\n]+) ([0-9]{1,18})[ \r]")
_MAP = pa.map_(pa.string(), pa.string())


def source_columns(headers: pa.Array | None, rows: int) -> tuple[pa.Array, pa.Array]:
    """Stream and sequence that a message was sourced from; null where it was not."""
    if headers is None:
        return pa.nulls(rows, pa.string()), pa.nulls(rows, pa.int64())
    found = np.frombuffer(pc.find_substring(headers, _SOURCE).buffers()[1], np.int32)[:rows]
    if (found < 0).all():
        return pa.nulls(rows, pa.string()), pa.nulls(rows, pa.int64())
    try:
        return _all_sources(headers, found)
    except (pa.ArrowInvalid, IndexError):  # somebody else wrote a header of this name
        return _sources_one_by_one(headers)


def _all_sources(headers: pa.Array, found: npt.NDArray[np.int32]) -> tuple[pa.Array, pa.Array]:
    buffer, octets, rows = laid_out(headers)
    sourced = np.flatnonzero(found >= 0)
    begins = rows[sourced] + found[sourced] + len(_SOURCE)
    spaces = np.flatnonzero(octets == 32)
    space = np.searchsorted(spaces, begins)
    stream_ends, sequence_ends = spaces[space], spaces[space + 1]
    if (sequence_ends >= rows[sourced + 1]).any():
        raise IndexError
    streams = cut_out(buffer, begins, stream_ends, pa.binary()).dictionary_encode()
    names = texts([_shown(name) for name in streams.dictionary.to_pylist()])
    sequences = cut_numbers(buffer, stream_ends + 1, sequence_ends)
    if len(sourced) == len(headers):
        return names.take(streams.indices), sequences
    at = np.zeros(len(headers), np.int64)
    at[sourced] = np.arange(len(sourced))
    places = numbers(at, found >= 0)
    return names.take(streams.indices).take(places), sequences.take(places)


def _sources_one_by_one(headers: pa.Array) -> tuple[pa.Array, pa.Array]:
    matches = [_SOURCE_VALUE.search(block) for block in headers.to_pylist()]
    streams = [_shown(match[1]) if match else None for match in matches]
    sequences = np.asarray([int(match[2]) if match else -1 for match in matches], np.int64)
    return texts(streams), numbers(sequences, sequences >= 0)


def header_maps(headers: pa.Array | None, rows: int) -> pa.Array:
    """Names to values; of a repeated name the first value. No headers: an empty map."""
    names: list[str | None] = []
    values: list[str | None] = []
    offsets = [0]
    for block in headers.to_pylist() if headers is not None else [b""] * rows:
        seen: dict[str, str] = {}
        for line in block.split(b"\r\n")[1:]:
            name, colon, value = line.partition(b":")
            if colon:
                seen.setdefault(_shown(name.strip()), _shown(value.strip()))
        names += seen
        values += seen.values()
        offsets.append(len(names))
    return pa.MapArray.from_arrays(numbers(np.asarray(offsets, np.int32)), texts(names), texts(values)).cast(_MAP)


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")


def cut_out(buffer: pa.Buffer, begins: Positions, ends: Positions, kind: pa.DataType) -> pa.Array:
    """The ranges [begin, end), ascending and apart from each other, as one array of text or bytes.

    They are laid out together with the gaps between them, and Arrow then copies every second one.
    """
    rows = len(begins)
    offsets = np.empty(2 * rows, np.int32)
    offsets[0::2] = begins
    offsets[1::2] = ends
    both = pa.Array.from_buffers(kind, 2 * rows - 1, [None, pa.py_buffer(offsets), buffer])
    return both.take(numbers(np.arange(0, 2 * rows - 1, 2, dtype=np.int32)))


def cut_numbers(buffer: pa.Buffer, begins: Positions, ends: Positions) -> pa.Array:
    """The ranges as whole numbers; `pa.ArrowInvalid` where one is none."""
    return cut_out(buffer, begins, ends, pa.string()).cast(pa.int64())


def laid_out(array: pa.Array) -> tuple[pa.Buffer, Octets, Positions]:
    """The bytes of a text or binary array, as a buffer and as numbers, and where its rows begin and end."""
    _, offsets, data = array.buffers()
    places = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    data = pa.py_buffer(b"") if data is None else data
    return data, np.frombuffer(data, np.uint8)[: places[-1]], places


# ---- numbers and texts ------------------------------------------------------------------------------


def numbers(values: npt.NDArray[np.int32] | npt.NDArray[np.int64], present: Mask | None = None) -> pa.Array:
    """The same numbers, null where they are not `present`."""
    kind = pa.int32() if values.dtype == np.int32 else pa.int64()
    return pa.Array.from_buffers(kind, len(values), [_bitmap(present), pa.py_buffer(values)])


def as_numpy(array: pa.Array) -> Positions:
    """An array of 64-bit numbers without nulls."""
    values: Positions = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array)]
    return values


def texts(values: Sequence[str | None]) -> pa.Array:
    encoded = [b"" if value is None else value.encode() for value in values]
    offsets = np.fromiter(accumulate(map(len, encoded), initial=0), np.int32, len(values) + 1)
    present = np.fromiter((value is not None for value in values), np.bool_, len(values))
    buffers = [_bitmap(present), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def _bitmap(present: Mask | None) -> pa.Buffer | None:
    if present is None or present.all():
        return None
    return pa.py_buffer(np.packbits(present, bitorder="little"))
