"""Columns from what a consumer delivers: everything but headers and payload stands in the protocol line.

`MSG <subject> <sid> $JS.ACK.<stream>.<consumer>.<tries>.<sequence>.<count>.<nanoseconds>.<pending> <size>`, or `HMSG`
with a second size; with a domain and an account in front of the stream where the server has them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.errors import ReadIncomplete
from keylane.spark.executor.cutting import Run
from keylane.spark.executor.messages import Messages
from keylane.spark.executor.slices import Octets, Positions, cut_numbers, cut_out, laid_out

_SPACE, _DOT = 32, 46
_LONG_FORM = 10
"""Dots in an ack subject that names domain and account: this many or more."""


def delivered_messages(run: Run) -> Messages:
    """All messages of a run, in one step."""
    whole = pa.py_buffer(run.data)
    lines = cut_out(whole, run.lines, run.bodies - 2, pa.binary())
    buffer, octets, rows = laid_out(lines)
    with_headers = run.payloads > run.bodies
    has_headers = bool(with_headers.any())

    spaces = np.flatnonzero(octets == _SPACE)
    counts = 4 + with_headers
    first = np.cumsum(counts) - counts
    if len(spaces) != counts.sum() or (spaces[first] < rows[:-1]).any():
        raise ReadIncomplete("the server's lines do not have the words that were expected")
    subject_end, reply_begin, reply_end = spaces[first + 1], spaces[first + 2], spaces[first + 3]
    _check_subscription(octets, subject_end, reply_begin)

    dots = np.flatnonzero(octets == _DOT)
    dot = np.searchsorted(dots, reply_begin)
    longer = np.searchsorted(dots, reply_end) - dot >= _LONG_FORM
    dot += 4 + 2 * longer
    times = cut_numbers(buffer, dots[dot + 2] + 1, dots[dot + 3]).view(pa.timestamp("ns", tz="UTC"))
    return Messages(
        subjects=cut_out(buffer, spaces[first] + 1, subject_end, pa.binary()),
        data=cut_out(whole, run.payloads, run.ends, pa.binary()),
        sequences=cut_numbers(buffer, dots[dot] + 1, dots[dot + 1]),
        timestamps=times.cast(pa.timestamp("us", tz="UTC"), safe=False),
        headers=cut_out(whole, run.bodies, run.payloads, pa.binary()) if has_headers else None,
    )


def _check_subscription(octets: Octets, before: Positions, behind: Positions) -> None:
    """All are of one subscription, the first message's."""
    width = int(behind[0] - before[0])
    alike = behind - before == width
    for at in range(1, width):
        alike &= octets[before + at] == octets[before[0] + at]
    if not alike.all():
        raise ReadIncomplete("messages of another subscription came between")
