"""Finds where messages begin and end in what the socket gave, thousands at a time.

The messages of a stream look alike: each has the same number of line ends, as payloads seldom hold one. So the first is
measured, the rest is laid out in the same way with numpy, and every size that the server wrote is compared with the
result. The first that differs, and all behind it, are walked one by one. Nothing is taken on trust: a message counts
only if all before it were right and its own sizes agree with its own line ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
"""Places in a buffer, one for each row."""
Octets = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

_CRLF = b"\r\n"
_SIZES = re.compile(rb"(?: ([0-9]{1,10}))? ([0-9]{1,10})")
_FEWEST_TO_GUESS = 64  # walking fewer is quicker than calling numpy
_ENOUGH = 16  # the end of an inbox's name is random


@dataclass(frozen=True, slots=True)
class MessageRun:
    """Whole messages from one buffer, one behind the other. Positions are places in `data`."""

    data: bytes
    lines: Positions
    """Where each protocol line begins."""
    bodies: Positions
    """Where what follows the line begins: headers, or the payload."""
    payloads: Positions
    ends: Positions
    """Where the payload ends; two bytes on, the next line begins."""

    @property
    def rows(self) -> int:
        return len(self.lines)

    @property
    def size(self) -> int:
        return int(self.ends[-1] - self.lines[0])


class MessageFramer:
    """Cuts runs of one subscription's messages.

    `mark` is in the line of each of them, and in no other's: the subscription's number and what is next to it.
    With an `opening` it begins the line: then `opening` is how headers of messages begin, and not those of statuses.
    """

    def __init__(self, mark: bytes, opening: bytes = b"") -> None:
        self._mark = mark
        self._opening = opening
        self._sizes: dict[bytes, tuple[int, int]] = {}

    def cut(self, data: bytes, position: int) -> MessageRun | None:
        """All messages from `position` on; None where there is none to cut."""
        first = self._walk(data, position, most=1)
        if not first:
            return None
        guessed = self._guess(data, position, first)
        if guessed is None:
            return _run(data, self._walk(data, position))
        rest = self._walk(data, int(guessed.ends[-1]) + 2)
        return _joined(guessed, rest) if rest else guessed

    # ---- one by one ---------------------------------------------------------------------------------

    def _walk(self, data: bytes, position: int, most: int | None = None) -> list[int]:
        """Line, body, payload and end of each message, one behind the other in one list."""
        find, rfind, mark, opening, sizes = data.find, data.rfind, self._mark, self._opening, self._sizes
        size = len(data)
        places: list[int] = []
        while most is None or len(places) < 4 * most:
            end_of_line = find(_CRLF, position)
            if end_of_line < 0 or find(mark, position, end_of_line) < 0:
                break
            last = rfind(b" ", position, end_of_line)
            if data[position] == 72:
                last = rfind(b" ", position, last)
            written = data[last:end_of_line]
            known = sizes.get(written) or self._learn(written)
            if known is None:
                break  # the scanner meets this line next, and refuses it
            headers, whole = known
            body = end_of_line + 2
            end = body + whole
            if end + 2 > size or (opening and not data.startswith(opening, body)) or not data.startswith(_CRLF, end):
                break
            places += (position, body, body + headers, end)
            position = end + 2
        return places

    def _learn(self, written: bytes) -> tuple[int, int] | None:
        """The sizes of headers and of the whole; None if it is not a pair of sizes."""
        found = _SIZES.fullmatch(written)
        sizes = (int(found[1] or 0), int(found[2])) if found is not None else (1, 0)
        if sizes[0] > sizes[1]:
            return None
        if len(self._sizes) > 10_000:
            self._sizes.clear()
        self._sizes[written] = sizes
        return sizes

    # ---- all at once --------------------------------------------------------------------------------

    def _guess(self, data: bytes, position: int, first: list[int]) -> MessageRun | None:
        """As many messages as are laid out like the first."""
        line, body, payload, end = first
        has_headers = payload > body
        each = data.count(_CRLF, line, end + 2)
        if (len(data) - position) // (end + 2 - line) < _FEWEST_TO_GUESS:
            return None
        octets = np.frombuffer(data, np.uint8)
        breaks = np.flatnonzero(octets[position:-1] == 13) + position
        breaks = breaks[octets[breaks + 1] == 10]
        rows = len(breaks) // each
        if rows < _FEWEST_TO_GUESS:
            return None
        shaped = breaks[: rows * each].reshape(rows, each)
        bodies, ends = shaped[:, 0] + 2, shaped[:, -1]
        lines = np.empty(rows, np.int64)
        lines[0] = position
        lines[1:] = ends[:-1] + 2
        good = octets[lines] == octets[position]
        fits, before = _says(octets, shaped[:, 0], ends - bodies)
        good &= fits
        payloads = bodies
        if has_headers:
            payloads = shaped[:, -2] + 2
            good &= _says(octets, before, payloads - bodies)[0]
            good &= shaped[:, -2] == shaped[:, -3] + 2
        good &= self._are_mine(octets, lines, bodies)
        rows = rows if good.all() else int(np.argmin(good))
        if rows < _FEWEST_TO_GUESS:
            return None
        return MessageRun(data, lines[:rows], bodies[:rows], payloads[:rows], ends[:rows])

    def _are_mine(self, octets: Octets, lines: Positions, bodies: Positions) -> Mask:
        """Whether each line has the mark, and is not a status."""
        if self._opening:
            last = len(octets) - 1
            mine: Mask = octets[np.minimum(bodies + (len(self._opening) - 2), last)] == 13
            for at in range(max(0, len(self._mark) - _ENOUGH), len(self._mark)):
                mine &= octets[np.minimum(lines + at, last)] == self._mark[at]
            return mine
        before = self._mark.index(b"$")
        marks = np.flatnonzero(octets[lines[0] + before : bodies[-1] - len(self._mark)] == 36) + lines[0]
        for at, octet in enumerate(self._mark):
            marks = marks[octets[marks + at] == octet]
        # Behind the last mark there is none any more: a place that lies in no line stands for it.
        following = np.append(marks, len(octets))[np.searchsorted(marks, lines)]
        return np.asarray(following < bodies, np.bool_)


def _says(octets: Octets, at: Positions, numbers: Positions) -> tuple[Mask, Positions]:
    """Whether the text before each place ends with a space and that number, and where that space is."""
    least, most = int(numbers.min()), int(numbers.max())
    if least == most >= 0:
        text = b" %d" % most
        good = octets[at - 1] == text[-1]
        for back in range(2, len(text) + 1):
            good &= octets[at - back] == text[-back]
        return good, at - len(text)
    good = numbers >= 0
    digits = np.ones(len(numbers), np.int64)
    for power in range(1, len(str(max(most, 1)))):
        digits += numbers >= 10**power
    rest = numbers
    for back in range(1, len(str(max(most, 1))) + 1):
        rest, digit = np.divmod(rest, 10)
        good &= (digits < back) | (octets[at - back] == digit + 48)
    before = at - digits - 1
    good &= octets[before] == 32
    return good, before


def _run(data: bytes, places: list[int]) -> MessageRun:
    table = np.asarray(places, np.int64).reshape(-1, 4)
    return MessageRun(data, table[:, 0], table[:, 1], table[:, 2], table[:, 3])


def _joined(front: MessageRun, places: list[int]) -> MessageRun:
    table = np.asarray(places, np.int64).reshape(-1, 4)
    return MessageRun(
        front.data,
        np.concatenate([front.lines, table[:, 0]]),
        np.concatenate([front.bodies, table[:, 1]]),
        np.concatenate([front.payloads, table[:, 2]]),
        np.concatenate([front.ends, table[:, 3]]),
    )


def together(runs: Sequence[MessageRun]) -> MessageRun:
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
    return MessageRun(
        b"".join(parts),
        np.concatenate([run.lines + shift for run, shift in pairs]),
        np.concatenate([run.bodies + shift for run, shift in pairs]),
        np.concatenate([run.payloads + shift for run, shift in pairs]),
        np.concatenate([run.ends + shift for run, shift in pairs]),
    )
