"""Per-key order with many messages in flight: which message may start next.

Every key has a lane. A lane runs one message at a time, in sequence order; lanes run side by side. A message
that failed holds its lane until it succeeds or is given up. A delivery of a message that is already here is
recognised and not run again: only its newest delivery is kept, because that is the one to acknowledge.

`Lanes` decides and remembers; `groups/handling.py` runs handlers and acks. Time comes in as an argument.
Mutable and stepped for every message: this is the hot path of a member.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")


class Arrival(Enum):
    """What a delivery is to the lanes."""

    QUEUED = auto()
    """New: it runs when its lane is free."""
    HELD = auto()
    """Here already, waiting or at work; this delivery takes the place of the earlier one."""
    DONE = auto()
    """Finished not long ago: acknowledge it again, do not run it."""


class State(Enum):
    WAITING = auto()
    READY = auto()
    RUNNING = auto()
    RETRYING = auto()
    """Failed; holds its lane until it may run again."""


WAITING, READY, RUNNING, RETRYING = State  # a global is found sooner than a member of an enum


class Entry(Generic[T]):
    """One message in its lane. `item` is its newest delivery."""

    __slots__ = ("item", "key", "retry_at", "sequence", "state", "tries")

    def __init__(self, sequence: int, key: Hashable, item: T) -> None:
        self.sequence = sequence
        self.key = key
        self.item = item
        self.state = WAITING
        self.tries = 0
        self.retry_at = 0.0

    def __lt__(self, other: Entry[T]) -> bool:
        return self.sequence < other.sequence

    def __repr__(self) -> str:
        return f"<Entry {self.sequence} of {self.key!r} {self.state.name.lower()} tries={self.tries}>"


class Lanes(Generic[T]):
    """The lanes of one member.

    `max_tries`: how often a message runs before it is given up (None: for ever). `backoff(tries)`: seconds to
    wait after that many failures. `remember`: how many finished messages are recognised when they come again.
    `crowd`: the length at which a lane is reported as crowded.

    Nothing stale is kept: `_ready` has each lane whose head is READY, `_retries` each RETRYING message, once.
    """

    __slots__ = (
        "_backoff",
        "_crowd",
        "_crowded",
        "_done",
        "_done_order",
        "_entries",
        "_lanes",
        "_max_tries",
        "_ready",
        "_remember",
        "_retries",
    )

    def __init__(
        self, *, max_tries: int | None, backoff: Callable[[int], float], remember: int, crowd: int = 0
    ) -> None:
        self._max_tries = max_tries
        self._backoff = backoff
        self._remember = remember
        self._crowd = crowd
        self._crowded: list[deque[Entry[T]]] = []
        self._entries: dict[int, Entry[T]] = {}
        self._lanes: dict[Hashable, deque[Entry[T]]] = {}  # the head is the one that may run
        self._ready: deque[deque[Entry[T]]] = deque()
        self._retries: list[tuple[float, int]] = []
        self._done: set[int] = set()
        self._done_order: deque[int] = deque()  # a dict's oldest key is slow to find once many were deleted

    def __repr__(self) -> str:
        return f"<Lanes {len(self._entries)} messages in {len(self._lanes)} lanes, {len(self._ready)} ready>"

    def __len__(self) -> int:
        """Messages that are here: waiting, at work, or to be tried again."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(list(self._entries.values()))

    @property
    def ready(self) -> int:
        """How many may start now."""
        return len(self._ready)

    def length(self, key: Hashable) -> int:
        """How many messages are in the lane of a key."""
        return len(self._lanes.get(key, ()))

    def arrive(self, sequence: int, key: Hashable, item: T) -> Arrival:
        held = self._entries.get(sequence)
        if held is not None:
            held.item = item
            return Arrival.HELD
        if sequence in self._done:
            return Arrival.DONE
        entry = Entry(sequence, key, item)
        self._entries[sequence] = entry
        lane = self._lanes.get(key)
        if lane is None:
            self._lanes[key] = lane = deque((entry,))
            entry.state = READY
            self._ready.append(lane)
        elif sequence > lane[-1].sequence:
            lane.append(entry)
            if len(lane) == self._crowd:
                self._crowded.append(lane)
        else:
            self._insert(lane, entry)
        return Arrival.QUEUED

    @property
    def crowded(self) -> bool:
        """Some lane has grown to the length at which that is reported."""
        return bool(self._crowded)

    def take_crowded(self) -> list[tuple[Entry[T], int]]:
        """The heads of such lanes with their lengths, each lane once every time it grows to that length."""
        lanes, self._crowded = self._crowded, []
        return [(lane[0], len(lane)) for lane in lanes if lane]

    def is_done(self, sequence: int) -> bool:
        """Whether this message finished here not long ago."""
        return sequence in self._done

    @property
    def highest_done(self) -> int:
        return max(self._done, default=0)

    def take(self) -> Entry[T] | None:
        """The next message to run, or None. Lanes take turns in the order in which they became free."""
        if not self._ready:
            return None
        entry = self._ready.popleft()[0]
        entry.state = RUNNING
        return entry

    def finished(self, entry: Entry[T]) -> None:
        """It succeeded, or it was given up: its lane goes on with the next."""
        self._remove_head(entry)
        sequence = entry.sequence
        self._done.add(sequence)
        self._done_order.append(sequence)
        if len(self._done_order) > self._remember:
            self._done.remove(self._done_order.popleft())

    def failed(self, entry: Entry[T], now: float) -> float | None:
        """It failed. The time at which it may run again.

        None: it had all its tries and holds its lane until you give it up and call `finished`.
        """
        assert entry.state is RUNNING, entry
        entry.tries += 1
        if self._max_tries is not None and entry.tries >= self._max_tries:
            return None
        entry.retry_at = now + self._backoff(entry.tries)
        entry.state = RETRYING
        heapq.heappush(self._retries, (entry.retry_at, entry.sequence))
        return entry.retry_at

    def release(self, entry: Entry[T]) -> None:
        """It neither ran to its end nor failed: it is forgotten, and runs when it is delivered again.

        Its lane goes on with the next: to keep the order, first `forget` what waits behind it.
        """
        self._remove_head(entry)

    def due(self, now: float) -> float | None:
        """Make retries ready whose time has come; returns when the next one is due."""
        while self._retries:
            retry_at, sequence = self._retries[0]
            if retry_at > now:
                return retry_at
            heapq.heappop(self._retries)
            entry = self._entries[sequence]
            entry.state = READY
            self._ready.append(self._lanes[entry.key])
        return None

    def forget(self, which: Callable[[T], bool] | None = None) -> list[T]:
        """Drop what is not at work (all, or what `which` says): it is delivered again, here or elsewhere."""
        dropped = [
            entry
            for entry in self._entries.values()
            if entry.state is not RUNNING and (which is None or which(entry.item))
        ]
        for entry in dropped:
            del self._entries[entry.sequence]
        for key in dict.fromkeys(entry.key for entry in dropped):
            self._drop_forgotten(key)
        self._ready = deque(lane for lane in self._ready if lane)
        self._retries = [retry for retry in self._retries if retry[1] in self._entries]
        heapq.heapify(self._retries)
        return [entry.item for entry in dropped]

    def running(self, which: Callable[[T], bool] | None = None) -> int:
        """How many are at work now."""
        return sum(
            1 for entry in self._entries.values() if entry.state is RUNNING and (which is None or which(entry.item))
        )

    def _insert(self, lane: deque[Entry[T]], entry: Entry[T]) -> None:
        """An older message than some that wait: it goes before them, but not before one that has started."""
        head = lane[0]
        if entry.sequence < head.sequence and head.state is READY and head.tries == 0:
            head.state = WAITING
            entry.state = READY
            lane.appendleft(entry)
        else:
            insort(lane, entry, lo=1)

    def _remove_head(self, entry: Entry[T]) -> None:
        lane = self._lanes[entry.key]
        assert lane[0] is entry and entry.state is RUNNING, entry  # noqa: PT018 - once for every message
        lane.popleft()
        del self._entries[entry.sequence]
        if lane:
            lane[0].state = READY
            self._ready.append(lane)
        else:
            del self._lanes[entry.key]

    def _drop_forgotten(self, key: Hashable) -> None:
        """Take what is no longer in `_entries` out of a lane; a lane whose turn had come keeps its turn."""
        lane = self._lanes[key]
        head = lane[0]
        kept = [entry for entry in lane if entry.sequence in self._entries]
        lane.clear()
        lane.extend(kept)
        if not lane:
            del self._lanes[key]
        elif lane[0].state is WAITING:
            lane[0].state = READY
            if head.state is RETRYING:
                self._ready.append(lane)
