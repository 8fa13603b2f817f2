"""Columns from the answers to a direct get: everything but the payload stands in headers that the server puts last."""

from __future__ import annotations

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.errors import ReadIncomplete
from keylane.jetstream.direct import OWN_HEADERS
from keylane.spark.executor.cutting import Run
from keylane.spark.executor.messages import Messages
from keylane.spark.executor.slices import Octets, Positions, as_numpy, cut_numbers, cut_out, laid_out

_BARE = len(b"NATS/1.0\r\n")


def stored_messages(run: Run, before: int) -> Messages:
    """All messages of a run, in one step. `before` is the last sequence that was read before it."""
    whole = pa.py_buffer(run.data)
    blocks = cut_out(whole, run.bodies, run.payloads, pa.binary())
    buffer, octets, rows = laid_out(blocks)
    breaks = _own_lines(octets, rows)

    def field(name: str) -> tuple[Positions, Positions]:
        # The lengths of their names differ, so the place of the colon tells them apart.
        at = OWN_HEADERS.index(name)
        begins = breaks[at] + 2 + len(name)
        if not (octets[begins] == 58).all():
            raise ReadIncomplete(f"an answer without the header {name} where it was expected")
        return begins + 2, breaks[at + 1]

    sequences = cut_numbers(buffer, *field("Nats-Sequence"))
    _check_unbroken(as_numpy(sequences), as_numpy(cut_numbers(buffer, *field("Nats-Last-Sequence"))), before)
    times = cut_out(buffer, *field("Nats-Time-Stamp"), pa.string()).cast(pa.timestamp("ns", tz="UTC"))
    stored_ends = breaks[0] + 2
    has_headers = bool((stored_ends - rows[:-1] > _BARE).any())
    return Messages(
        subjects=cut_out(buffer, *field("Nats-Subject"), pa.binary()),
        data=cut_out(whole, run.payloads, run.ends, pa.binary()),
        sequences=sequences,
        timestamps=times.cast(pa.timestamp("us", tz="UTC"), safe=False),
        headers=cut_out(buffer, rows[:-1], stored_ends, pa.binary()) if has_headers else None,
    )


def _own_lines(octets: Octets, rows: Positions) -> list[Positions]:
    """The line ends before, between and behind the server's own fields."""
    breaks = np.flatnonzero(octets[:-1] == 13)
    breaks = breaks[octets[breaks + 1] == 10]
    behind = np.searchsorted(breaks, rows[1:])
    own = len(OWN_HEADERS) + 2
    if int(np.diff(behind, prepend=0).min()) < own:
        raise ReadIncomplete("an answer with fewer headers than a stored message has")
    return [breaks[behind - own + at] for at in range(own)]


def _check_unbroken(sequences: Positions, named: Positions, before: int) -> None:
    """Each answer names the one before it in its batch, or 0 where it is the first."""
    previous = np.empty_like(sequences)
    previous[0] = before
    previous[1:] = sequences[:-1]
    missing = (named != 0) & (named != previous)
    if missing.any():
        at = int(np.argmax(missing))
        raise ReadIncomplete(f"messages between {previous[at]} and {sequences[at]} did not arrive")
