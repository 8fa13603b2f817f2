"""Messages as columns: what both ways to read give, before keys and partitions are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.spark.executor.cutting import Run


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


def together(runs: Sequence[Run]) -> Run:
    """Many runs as one."""
    if len(runs) == 1:
        return runs[0]
    parts: list[memoryview] = []
    shifts: list[int] = []
    at = 0
    for run in runs:
        begin, end = int(run.lines[0]), int(run.ends[-1]) + 2
        parts.append(memoryview(run.data)[begin:end])
        shifts.append(at - begin)
        at += end - begin
    pairs = list(zip(runs, shifts, strict=True))
    return Run(
        b"".join(parts),
        np.concatenate([run.lines + shift for run, shift in pairs]),
        np.concatenate([run.bodies + shift for run, shift in pairs]),
        np.concatenate([run.payloads + shift for run, shift in pairs]),
        np.concatenate([run.ends + shift for run, shift in pairs]),
    )
