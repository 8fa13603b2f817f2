"""What a member of a group does, counted by its hooks."""

from __future__ import annotations

from collections import Counter
from time import monotonic
from typing import Any

from keylane.groups import GroupMessage, Member, MemberHooks, MemberState
from keylane.metrics.catalogue import Reading
from keylane.metrics.handler_counts import Durations, HandlerCounts

_CAUSES = ("start", "join", "leave", "mapping")


class MemberMetrics:
    """The metrics of one instance of a member: give its `hooks` to `groups.join`, and the member to `watch`.

    `process`: tells instances of one member apart that are exported together.

    >>> metrics = MemberMetrics()
    >>> async with groups.join(…, hooks=metrics.hooks()) as member:
    ...     metrics.watch(member)
    ...     async with serve_metrics(metrics.readings, port=9464):
    ...         await member.wait()
    """

    def __init__(self, *, process: str = "") -> None:
        self._process = process
        self._member: Member | None = None
        self._counts = HandlerCounts()
        self._rebalances: Counter[str] = Counter()
        self._rebalance_durations = Durations()
        self._wanted: tuple[int, ...] | None = None
        """What the plan gives to the member, until it has it."""
        self._planned_at = 0.0
        self._gained = 0
        self._lost = 0
        self._pin_changes = 0
        self._resets = 0
        self._crowded = 0

    def hooks(self, also: MemberHooks | None = None) -> MemberHooks:
        """The hooks that count; `also`: hooks of the program's own, which are called as well."""
        mine = MemberHooks(
            on_delivered=self._counts.delivered,
            on_returned=self._counts.returned,
            on_outcome=self._counts.tried,
            on_plan=self._plan_changed,
            on_partitions=self._partitions_changed,
            on_activated=self._pin_changed,
            on_deactivated=self._pin_changed,
            on_reset=self._was_reset,
            on_crowded=self._was_crowded,
        )
        return mine.and_also(also) if also is not None else mine

    def watch(self, member: Member) -> None:
        """This is the member that the hooks tell of."""
        self._member = member

    # ---- hooks ----------------------------------------------------------------------------------------------

    def _plan_changed(self, partitions: tuple[int, ...], cause: str) -> None:
        self._rebalances[cause] += 1
        self._wanted, self._planned_at = tuple(sorted(partitions)), monotonic()

    def _partitions_changed(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        self._gained += len(set(after) - set(before))
        self._lost += len(set(before) - set(after))
        if self._wanted is not None and self._wanted == tuple(sorted(after)):
            self._wanted = None
            self._rebalance_durations.add(monotonic() - self._planned_at)

    def _pin_changed(self) -> None:
        self._pin_changes += 1

    def _was_reset(self) -> None:
        self._resets += 1

    def _was_crowded(self, _message: GroupMessage, _length: int) -> None:
        self._crowded += 1

    # ---- readings -------------------------------------------------------------------------------------------

    def readings(self) -> list[Reading]:
        """What is known now."""
        member, counts = self._member, self._counts
        if member is None:
            return []
        labels = {"stream": member.stream, "group": member.group, "member": member.member, "process": self._process}
        values: dict[str, Any] = {
            "member_handler_latency_seconds": counts.latencies(),
            "member_messages_total": counts.messages,
            "member_redeliveries_total": counts.redeliveries,
            "member_in_flight": member.in_flight,
            "member_max_in_flight": member.max_in_flight,
            "member_retries_total": counts.outcomes["failed"] + counts.outcomes["delayed"],
            "member_dead_letters_total": counts.outcomes["dead"],
            "member_parked_messages_total": counts.outcomes["parked"],
            "member_partitions": len(member.partitions),
            "member_active": int(member.is_active),
            "member_rebalance_duration_seconds": self._rebalance_durations.value,
            "member_partitions_gained_total": self._gained,
            "member_partitions_lost_total": self._lost,
            "member_pin_changes_total": self._pin_changes,
            "member_resets_total": self._resets,
            "member_crowded_lanes_total": self._crowded,
        }
        found = [Reading(name, labels, value) for name, value in values.items()]
        found += counts.tries("member_handler_tries_total", labels)
        found += [Reading("member_rebalances_total", labels | {"cause": one}, self._rebalances[one]) for one in _CAUSES]
        now = member.state
        found += [Reading("member_state", labels | {"state": one.value}, int(now is one)) for one in MemberState]
        return found
