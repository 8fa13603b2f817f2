"""What happened to a group: rebalances and their causes, as far as two looks at it show them. Pure, and bounded.

A fleet writes its own history, which has the true causes. Of a group only what changed between two looks can be told:
members that came, went or changed hands, and the partitions that moved with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from keylane.fleet import PastAssignment
from keylane.overview import AccountOverview, GroupOverview, MemberOverview
from keylane.web.move_texts import move_texts

MOST_ENTRIES = 100
"""Of one group: as many as a fleet keeps."""


class TimelineEntry(NamedTuple):
    """A change of a group."""

    at: datetime
    cause: str
    """One word: of a fleet that of its history; of a group `members`, `plan`, `instance` or `pause`."""
    text: str
    moves: tuple[str, ...] = ()
    """What moved: `0-3 from alice to bob`."""


class AccountTimeline:
    """The changes of every group that was seen. Forgets groups that are gone."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, str], deque[TimelineEntry]] = {}
        self._last: AccountOverview | None = None

    def see(self, found: AccountOverview) -> None:
        """The next look at the account."""
        known = {_name(one): one for one in self._last.groups} if self._last is not None else {}
        self._entries = {_name(one): self._entries.get(_name(one)) or _empty() for one in found.groups}
        for one in found.groups:
            before = known.get(_name(one))
            if before is not None and before.problem is None and one.problem is None:
                self._entries[_name(one)].extend(changes(before, one, found.read_at))
        self._last = found

    def of(self, group: GroupOverview) -> tuple[TimelineEntry, ...]:
        """Its changes, the newest first."""
        return tuple(reversed(self._entries.get(_name(group), ())))


def _name(group: GroupOverview) -> tuple[str, str, str]:
    return group.kind, group.stream, group.name


def _empty() -> deque[TimelineEntry]:
    return deque(maxlen=MOST_ENTRIES)


def changes(before: GroupOverview, after: GroupOverview, at: datetime) -> list[TimelineEntry]:
    """What the two looks differ in, with the partitions that moved at the entry that moved them."""
    found: list[TimelineEntry] = []
    old, new = ({one.name: one for one in group.members} for group in (before, after))
    came, went = [name for name in new if name not in old], [name for name in old if name not in new]
    moves = _moves(before, after)
    if came or went:
        parts = [*([f"{_names(came)} came"] if came else []), *([f"{_names(went)} went"] if went else [])]
        found.append(TimelineEntry(at, "members", "; ".join(parts), moves))
    elif moves:
        found.append(TimelineEntry(at, "plan", "the assignment was changed", moves))
    found += [
        TimelineEntry(at, "instance", text)
        for name in new
        if name in old and (text := _instance_change(old[name], new[name])) is not None
    ]
    if before.is_paused != after.is_paused:
        found.append(TimelineEntry(at, "pause", "paused" if after.is_paused else "resumed"))
    return found


def _instance_change(before: MemberOverview, after: MemberOverview) -> str | None:
    if before.is_active and not after.is_active:
        return f"{after.name} is not at work any more: no instance of it runs"
    if after.is_active and not before.is_active:
        return f"{after.name} is at work{_where(after)}"
    if before.pin is not None and after.pin is not None and before.pin != after.pin:
        return f"another instance of {after.name} took over{_where(after)}"
    return None


def _where(member: MemberOverview) -> str:
    process = f", process {member.pid}" if member.pid is not None else ""
    return f" on {member.host}{process}" if member.host else ""


def _moves(before: GroupOverview, after: GroupOverview) -> tuple[str, ...]:
    old = {one.id: one.assigned for one in before.partitions}
    moved: dict[tuple[str | None, str | None], list[str]] = {}
    for one in after.partitions:
        if one.id in old and old[one.id] != one.assigned:
            moved.setdefault((old[one.id], one.assigned), []).append(one.id)
    return move_texts(moved)


def fleet_timeline(history: Iterable[PastAssignment]) -> tuple[TimelineEntry, ...]:
    """The history of a fleet, the newest first."""
    entries = [
        TimelineEntry(
            one.at,
            one.cause,
            one.reason,
            move_texts({(move.before, move.after): move.partitions for move in one.moves}),
        )
        for one in history
    ]
    return tuple(reversed(entries))


def _names(names: list[str]) -> str:
    few = ", ".join(names[:5])
    return few if len(names) <= 5 else f"{few} and {len(names) - 5} more"
