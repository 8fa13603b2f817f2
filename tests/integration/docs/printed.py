"""Is what was printed what the page shows? One rule for all pages.

Replaced on both sides, because they differ from run to run: times, durations, rates, ids, processes, addresses, and who
leads. Blanks and rules of tables count as one, because columns are as wide as what is in them; empty lines count for
nothing. Below `<!-- numbers-vary -->` every number counts as any other. `…` on the page stands for anything in
its line, and on a line of its own for any lines. Everything else must be equal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

_CHANGING = [
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?", "TIME"),
    (r"\b\d\d:\d\d:\d\d(?:\.\d+)?", "TIME"),
    (r"\d{4}-\d\d-\d\d", "DATE"),
    (r"[\d,]+(?:\.\d+)? a second\b|[\d,.]+/s\b", "RATE"),
    (r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)? ?(?:µs|ms|s|min|h)\b", "DURATION"),
    (r"\b(?:pid|process|kill) \d+", "PROCESS"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"\b(live), leader\b", r"\1"),
    (r"\b(?=\w*\d)(?=\w*[A-Z])[0-9A-Za-z]{22}\b|\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,}\b", "ID"),
    (r"[─━╭╮╰╯├┤┬┴┼╶╴]+", "─"),
    (r"\s+", " "),
    (r" ([│|])", r"\1"),
]  # fmt: skip
_CHANGES = [(re.compile(pattern), name) for pattern, name in _CHANGING]
_NUMBER = re.compile(r"-?[-\d,.]*\d")
ANYTHING = "…"


def canonical(line: str, *, numbers_vary: bool = False) -> str:
    for pattern, name in _CHANGES:
        line = pattern.sub(name, line)
    if numbers_vary:
        line = _NUMBER.sub("N", line)
    return line.strip()


def difference(
    shown: Sequence[str], printed: Sequence[str], *, any_order: bool = False, numbers_vary: bool = False
) -> str | None:
    """What is different, for a person. `any_order` is for programs that do several things at once."""
    wanted = _canonical(shown, numbers_vary)
    got = _canonical(printed, numbers_vary)
    if (_fits_unordered if any_order else _fits)(wanted, got):
        return None
    lines = difflib.unified_diff(wanted, got, "the page", "printed", lineterm="", n=100)
    return "\n".join([*lines, "", "printed was:", *printed])


def _canonical(lines: Sequence[str], numbers_vary: bool) -> list[str]:
    return [made for line in lines if (made := canonical(line, numbers_vary=numbers_vary))]


def _pattern(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.split(ANYTHING)) + "\n"


def _fits(wanted: list[str], got: list[str]) -> bool:
    pattern = "".join(r"(?:.*\n)*?" if line == ANYTHING else _pattern(line) for line in wanted)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in got)) is not None


def _fits_unordered(wanted: list[str], got: list[str]) -> bool:
    left = list(got)
    for line in wanted:
        if line == ANYTHING:
            continue
        found = next((one for one in left if re.fullmatch(_pattern(line), f"{one}\n")), None)
        if found is None:
            return False
        left.remove(found)
    return not any(left) or ANYTHING in wanted
