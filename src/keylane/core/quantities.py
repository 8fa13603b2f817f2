"""Durations and sizes as people write them: `1m30s`, `500MB`."""

from __future__ import annotations

import re

from keylane.core.subjects import shown
from keylane.errors import InvalidInput

_DURATION = re.compile(r"(?:\d+(?:\.\d*)?(?:us|µs|ms|s|m|h|d))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?)(us|µs|ms|s|m|h|d)")
_UNIT_S = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_duration_s(word: str) -> float:
    """`20ms`, `1.5s`, `1m30s`, or `0`, in seconds."""
    if word == "0":
        return 0.0
    if not _DURATION.fullmatch(word):
        raise InvalidInput(f"duration {shown(word)} is invalid: give for example 20ms, 1.5s or 1m30s")
    return sum(float(number) * _UNIT_S[unit] for number, unit in _DURATION_PART.findall(word))


def duration_text(seconds: float) -> str:
    """A duration as `parse_duration_s` reads it, in the largest unit that is even.

    >>> duration_text(2_592_000), duration_text(90), duration_text(0.5)
    ('30d', '90s', '0.5s')
    """
    for unit in ("d", "h", "m"):
        if seconds and seconds % _UNIT_S[unit] == 0:
            return f"{seconds / _UNIT_S[unit]:.0f}{unit}"
    return f"{seconds:g}s"


def parse_size(text: str, option: str) -> int:
    """`500MB`, `10GiB`, `1024`: bytes. K, M, G and T count by 1000, with an i by 1024."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"{option} is {text!r}: write a size such as 64KB, 500MB or 10GiB")
    step = 1024 if found[3] else 1000
    return int(float(found[1]) * step ** _POWERS[(found[2] or "").lower()])
