"""Arrow arrays from parts of a byte buffer, without a Python object for each row.

Arrays are made from their buffers throughout: `pyarrow.array` imports pandas, which takes a worker a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

Positions = npt.NDArray[np.int64]
"""Places in a buffer, one for each row."""
Octets = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


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
