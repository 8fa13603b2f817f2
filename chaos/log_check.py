"""Reads a whole coordination log once more, in a way of its own, for two owners of one partition.

It takes nothing from `core/world.py`, not even the parsing, and it does not ask who should own a partition. It looks
at who behaves like an owner: whoever claims a partition and then beats for it, or goes on beating. At no record may two
of them be fresh, which is: the last sign of life less than one interval old, by the log's time, and not released.

What is no sign of life: a claim that its writer never followed up; and what somebody writes who was silent for two
intervals while another claimed, because it may have been frozen and not have read the log since.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_FIELDS = {"Heartbeat": 9, "ClaimingPartition": 8, "ReleasingPartition": 9, "ClaimingMessages": 9}


class Line(NamedTuple):
    """One record about a partition, as it was written."""

    at: int
    time_ms: int
    kind: str
    client: str
    instance: str


class TwoFresh(NamedTuple):
    """A record at which a partition has two fresh owners."""

    key: tuple[str, str, int]
    at: int
    one: str
    other: str


def two_fresh_owners(records: Iterable[tuple[Any, ...]], interval_s: float) -> list[TwoFresh]:
    """All such records, of (partition, offset, time in ms, value, …) in the order of each partition of the log."""
    found: list[TwoFresh] = []
    for key, lines in _by_key(records).items():
        found += _of_one(key, lines, round(interval_s * 1000))
    return found


def _by_key(records: Iterable[tuple[Any, ...]]) -> dict[tuple[str, str, int], list[Line]]:
    now_ms: dict[int, int] = defaultdict(int)
    found: dict[tuple[str, str, int], list[Line]] = defaultdict(list)
    for log_partition, at, time_ms, value in (record[:4] for record in records):
        now_ms[log_partition] = max(now_ms[log_partition], time_ms)
        words: list[str] = value.decode("utf-8", "replace").split("/")
        if len(words) == _FIELDS.get(words[0]) and words[1] == "1":
            kind, instance, client, group, topic, partition = words[0], *words[3:8]
            found[group, topic, int(partition)].append(Line(at, now_ms[log_partition], kind, client, instance))
    return found


def _of_one(key: tuple[str, str, int], lines: Sequence[Line], interval_ms: int) -> list[TwoFresh]:
    found: list[TwoFresh] = []
    alive: dict[str, Line] = {}
    """Each instance's last sign of life."""
    for number, line in enumerate(lines):
        if line.kind == "ReleasingPartition":
            alive.pop(line.instance, None)
            continue
        if not _is_sign_of_life(lines, number, alive.get(line.instance), interval_ms):
            continue
        alive[line.instance] = line
        for other, last in list(alive.items()):
            if other == line.instance:
                continue
            if last.client == line.client:
                del alive[other]  # started again under its name: the younger one takes over from the older at once
            elif line.time_ms - last.time_ms < interval_ms:
                found.append(TwoFresh(key, line.at, f"{last.client} ({other})", f"{line.client} ({line.instance})"))
    return found


def _is_sign_of_life(lines: Sequence[Line], number: int, last: Line | None, interval_ms: int) -> bool:
    line = lines[number]
    if line.kind == "ClaimingPartition":
        return _is_followed_up(lines, number, interval_ms)
    if last is None:
        return line.kind == "Heartbeat" and _is_followed_up(lines, number, interval_ms)
    if line.time_ms - last.time_ms < 2 * interval_ms:
        return True
    others = (one for one in lines[:number] if one.at > last.at and one.instance != line.instance)
    return not any(one.kind == "ClaimingPartition" for one in others)


def _is_followed_up(lines: Sequence[Line], number: int, interval_ms: int) -> bool:
    """Whether the next that its writer writes about the partition, within two intervals, is what only an owner does."""
    line = lines[number]
    for later in lines[number + 1 :]:
        if later.time_ms - line.time_ms >= 2 * interval_ms:
            return False
        if later.instance == line.instance:
            return later.kind in ("Heartbeat", "ClaimingMessages")
    return False
