"""The pauses of groups in one partition of a coordination log: from when to when, and how they ended.

Pure. Every task has all pauses, and one of them tells of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from keylane.core.claim_facts import Owner
from keylane.core.claim_records import Unreadable, split

if TYPE_CHECKING:
    from keylane.spark.pipelines.claims_replay import Record

FOREVER_MS: Final = 253_402_300_799_000
"""The last second of the year 9999: what no calendar has is told as this."""
_TELLS = 0

IN_FORCE, EXPIRED, RESUMED, REPLACED = "in_force", "expired", "resumed", "replaced"


@dataclass(frozen=True, slots=True)
class _Rest:
    """One pause. `to_ms`: when it ended, or will."""

    by: Owner
    offset: int
    from_ms: int
    expiry_ms: int
    to_ms: int
    tells: bool


class Pauses:
    """Takes the `ReleaseGroup` records of one partition of the log in their order."""

    def __init__(self, log_partition: int, now_ms: int) -> None:
        self._number = log_partition
        self._now_ms = now_ms
        self._open: dict[str, _Rest] = {}
        self._times: dict[str, list[tuple[int, int]]] = {}

    def add(self, record: Record, time_ms: int) -> Iterator[dict[str, Any]]:
        """The row of the pause that ended here or before; the newest `ReleaseGroup` is the one that counts."""
        fields = split(record.value)
        assert not isinstance(fields, Unreadable), record
        expiry_ms = min(1000 * fields[6], FOREVER_MS)
        before = self._open.pop(record.group, None)
        if before is not None:
            cut_short = time_ms < before.expiry_ms
            how = (RESUMED if expiry_ms <= time_ms else REPLACED) if cut_short else EXPIRED
            yield from self._ended(record.group, replace(before, to_ms=min(time_ms, before.expiry_ms)), how)
        if expiry_ms > time_ms:
            writer = Owner(fields[2], fields[1])
            rest = _Rest(writer, record.offset, time_ms, expiry_ms, expiry_ms, record.task == _TELLS)
            self._open[record.group] = rest

    def finish(self) -> Iterator[dict[str, Any]]:
        """The rows of those that the newest record of their group began."""
        for group, rest in self._open.items():
            yield from self._ended(group, rest, IN_FORCE if self._now_ms < rest.expiry_ms else EXPIRED)
        self._open.clear()

    def within(self, group: str, from_ms: int, to_ms: int) -> int:
        """How long of a time the group was paused, in milliseconds. Ask before `finish`."""
        times = list(self._times.get(group, ()))
        if group in self._open:
            times.append((self._open[group].from_ms, self._open[group].to_ms))
        return sum(max(0, min(to_ms, end_ms) - max(from_ms, begin_ms)) for begin_ms, end_ms in times)

    def _ended(self, group: str, rest: _Rest, how: str) -> Iterator[dict[str, Any]]:
        self._times.setdefault(group, []).append((rest.from_ms, rest.to_ms))
        if rest.tells:
            yield {
                "kind": "pause",
                "log_partition": self._number,
                "group": group,
                **rest.by._asdict(),
                "ended": how,
                "from_offset": rest.offset,
                "from_ms": rest.from_ms,
                "to_ms": rest.to_ms,
                "expiry_ms": rest.expiry_ms,
                "rank": -rest.from_ms,
            }
