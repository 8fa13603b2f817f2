"""What happens to a worker of a fleet in a worker process, reported to its supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from keylane.core.plans import ranges
from keylane.fleet import WorkerHooks, WorkerState
from keylane.supervisor import SupervisorLink

_AT_WORK = (WorkerState.ACTIVE, WorkerState.LEADING)
_NO_PARTITIONS_S = 3.0
"""A worker that gets no partitions is at work too: there may be more workers than partitions."""
_ONE_CHANGE_S = 0.1


class WorkerReports:
    """Tells the supervisor what happens to the worker.

    `ready`: called once it is at work. `who`: added to the facts about its partitions. `prefix`: begins its lines.
    """

    def __init__(
        self,
        link: SupervisorLink,
        ready: Callable[[], None],
        who: Callable[[], dict[str, object]],
        *,
        prefix: str = "",
    ) -> None:
        self._link = link
        self._on_ready = ready
        self._who = who
        self._prefix = prefix
        self._is_ready = False
        self._timer: asyncio.TimerHandle | None = None
        self._shown: tuple[WorkerState, str | None] | None = None
        self._before: tuple[str, ...] | None = None
        """What the worker owned before the changes that are not reported yet."""
        self._owned: tuple[str, ...] = ()

    def hooks(self) -> WorkerHooks:
        return WorkerHooks(on_state=self._state, on_partitions=self._partitions)

    def _state(self, state: WorkerState, waiting_for: str | None) -> None:
        if state is WorkerState.ENDED:
            self._report_partitions()
        waits = f", waiting for {waiting_for}" if waiting_for else ""
        if self._shown != (state, waiting_for):
            self._shown = (state, waiting_for)
            self._link.event("state", f"{self._prefix}{state}{waits}", state=str(state), waiting_for=waiting_for)
        if state in _AT_WORK and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_NO_PARTITIONS_S, self._ready)

    def _partitions(self, before: tuple[str, ...], after: tuple[str, ...]) -> None:
        """Partitions come and go one by one: a change of many is one event."""
        self._owned = after
        if self._before is None:
            self._before = before
            asyncio.get_running_loop().call_later(_ONE_CHANGE_S, self._report_partitions)
        if after:
            self._ready()

    def _report_partitions(self) -> None:
        before, self._before = self._before, None
        if before is not None and before != self._owned:
            text = f"{self._prefix}owns {owns(self._owned)} (before: {owns(before)})"
            self._link.event("partitions", text, **self._who(), before=list(before), after=list(self._owned))

    def _ready(self) -> None:
        if not self._is_ready and self._shown is not None and self._shown[0] in _AT_WORK:
            self._is_ready = True
            self._on_ready()


def owns(partitions: tuple[str, ...]) -> str:
    """Partitions in few words: `0-7, 9`."""
    if not partitions:
        return "nothing"
    if all(one.isdecimal() for one in partitions):
        return ranges(sorted(map(int, partitions)))
    return ", ".join(partitions)
