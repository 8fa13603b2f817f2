"""Fleet: what the partitions of one worker may have in flight together, and how much each of them asks for.

A message is in flight from the moment it is asked for until it is acked. `PullBudget` bounds the sum over all
partitions of a worker, whatever the consumers on the server allow:

- The last fifth is reserved. Every partition may always hold its part of the reserve, at least one message. So an idle
  partition keeps one small pull open, and no partition starves, whatever the others do.
- The rest, up to the *pressure mark* at 80 %, goes to the active partitions: those that got a message and have not
  fallen quiet since. Each may hold a fair share, and none asks for more while the others hold up to the mark together.
- Within its share a partition asks for what its handlers get done in half a second, by a moving average, and for
  `FIRST_BATCH` until that is known. So a slow one does not hoard messages that it cannot handle soon.

In all there are never more than `limit` messages in flight, or one for each partition above 80 % if there are so many;
a partition that comes while the others hold everything adds one. Pulls are also bounded in bytes: no more messages than
fit if each is as large as the largest one seen.

A share does not shrink what was asked for already. So a partition that has fallen quiet must not keep a large pull
open: pulls of active partitions are short (`ACTIVE_EXPIRES_S`), and one that ends unfilled makes its partition idle.
"""

from __future__ import annotations

PRESSURE = 0.8
FIRST_BATCH = 50
ACTIVE_EXPIRES_S = 2.0
_AHEAD_S = 0.5
_SAMPLE_S = 0.05
_AVERAGE_S = 0.5


class PullBudget:
    """The budget of one worker. Mutable: it is stepped for every pull."""

    __slots__ = ("_shares", "active", "held", "limit", "mark", "max_bytes", "reserve", "taken")

    def __init__(self, limit: int, max_bytes: int) -> None:
        assert limit > 0
        assert max_bytes > 0
        self.limit = limit
        self.max_bytes = max_bytes
        self.mark = int(limit * PRESSURE)
        """What active partitions may hold together above their reserves."""
        self.reserve = limit
        """What each partition may hold in any case."""
        self.active = 0
        """How many partitions are active."""
        self.held = 0
        """What is in flight, as the partitions last said: never less than it is."""
        self.taken = 0
        """What partitions hold above their reserves, as they last said."""
        self._shares: set[PullShare] = set()

    def __repr__(self) -> str:
        return f"<PullBudget {self.held}/{self.limit}, {self.active} of {len(self._shares)} partitions active>"

    def share(self) -> PullShare:
        """The part of one more partition. Close it when this worker has the partition no more."""
        made = PullShare(self)
        self._shares.add(made)
        self._divide()
        return made

    def left(self, share: PullShare) -> None:
        self._shares.discard(share)
        self._divide()

    def _divide(self) -> None:
        self.reserve = max(1, (self.limit - self.mark) // max(1, len(self._shares)))
        self.taken = sum(share.excess() for share in self._shares)


class PullShare:
    """The part of one partition. Its times are seconds of any clock that only grows."""

    __slots__ = ("_budget", "_done", "_rate", "_sampled_at", "held", "is_active")

    def __init__(self, budget: PullBudget) -> None:
        self._budget = budget
        self.held = 0
        """In flight: asked for, waiting, running."""
        self.is_active = False
        self._done = 0
        self._rate = 0.0
        self._sampled_at: float | None = None

    def __repr__(self) -> str:
        return f"<PullShare held={self.held} {'active' if self.is_active else 'idle'} {self._rate:.0f}/s>"

    def excess(self) -> int:
        """What it holds above its reserve."""
        return max(0, self.held - self._budget.reserve)

    def delivered(self) -> None:
        """A message came: the partition is active."""
        if not self.is_active:
            self.is_active = True
            self._budget.active += 1

    def fell_quiet(self) -> None:
        """A pull ended unfilled: there is nothing more in the partition."""
        if self.is_active:
            self.is_active = False
            self._budget.active -= 1
            self._sampled_at = None

    def size(self, largest: int, now: float) -> int:
        """How much the partition may hold now, if no message is larger than `largest` bytes. At least 1."""
        budget = self._budget
        if not self.is_active:
            return self._fitting(budget.reserve, largest)
        free = budget.mark - (budget.taken - self.excess())
        above = min(budget.mark // budget.active, free, self._batch(now))
        return self._fitting(budget.reserve + max(0, above), largest)

    def _fitting(self, size: int, largest: int) -> int:
        budget = self._budget
        # The second matters when partitions come while others hold more than will be their part.
        room = min(size, budget.limit - (budget.held - self.held))
        return max(1, min(room, budget.max_bytes // max(1, budget.active) // largest))

    def holds(self, held: int) -> None:
        """So much is in flight now: to be said after every pull, and before `size` is asked for."""
        before, done = self.excess(), self.held - held
        if done > 0:
            self._done += done
        self._budget.held += held - self.held
        self.held = held
        self._budget.taken += self.excess() - before

    def _batch(self, now: float) -> int:
        """What the handlers get done in `_AHEAD_S`, by a moving average."""
        if self._sampled_at is None:
            self._sampled_at, self._done, self._rate = now, 0, 0.0
        elapsed_s = now - self._sampled_at
        if elapsed_s >= _SAMPLE_S:
            weight = min(1.0, elapsed_s / _AVERAGE_S) if self._rate else 1.0
            self._rate += (self._done / elapsed_s - self._rate) * weight
            self._sampled_at, self._done = now, 0
        return max(FIRST_BATCH, int(self._rate * _AHEAD_S))

    def clear(self) -> None:
        """The partition is not read now, or anew: nothing of it is in flight."""
        self.fell_quiet()
        self.holds(0)

    def close(self) -> None:
        self.clear()
        self._budget.left(self)
