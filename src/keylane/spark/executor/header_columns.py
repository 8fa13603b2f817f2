"""The columns that come from headers: where a sourced message was first, and all headers as a map."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]

from keylane.spark.executor.slices import cut_numbers, cut_out, laid_out, numbers, texts

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
