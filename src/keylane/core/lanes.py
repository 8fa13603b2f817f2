"""Per-key order with many messages in flight: which message may start next.

Every key has a lane. A lane runs one message at a time, in sequence order; lanes run concurrently. A failed message
holds its lane until it succeeds or is given up. A redelivered message that is already here is recognised and does not
run again: only its newest delivery is kept, because that is the one to acknowledge.

`Lanes` decides and remembers; `dispatch/dispatcher.py` runs handlers. Time comes in as an argument.
Mutable and stepped for every message: this is the hot path of a member.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")


class Arrival(Enum):
    """How the lanes classify a delivery."""

    QUEUED = auto()
    """New: it runs when its lane is free."""
    HELD = auto()
    """Already waiting or running; this delivery replaces the earlier one."""
    DONE = auto()
    """Recently finished: acknowledge it again, do not run it."""


class State(Enum):
    WAITING = auto()
    READY = auto()
    RUNNING = auto()
    RETRYING = auto()
    """Failed; holds its lane until it may run again."""


# Looking up a global is faster than a member of an enum.
WAITING, READY, RUNNING, RETRYING = State
QUEUED, HELD, DONE = Arrival


def _nothing() -> None:
    """What is done when nobody wants to know."""


class Entry(Generic[T]):
    """One message in its lane. `item` is its newest delivery, `next` the message behind it."""

    __slots__ = ("item", "key", "next", "retry_at", "sequence", "state", "tries")

    def __init__(self, sequence: int, key: Hashable, item: T) -> None:
        self.sequence = sequence
        self.key = key
        self.item = item
        self.next: Entry[T] | None = None
        self.state = WAITING
        self.tries = 0
        self.retry_at = 0.0

    def __repr__(self) -> str:
        return f"<Entry {self.sequence} of {self.key!r} {self.state.name.lower()} tries={self.tries}>"


class Lanes(Generic[T]):
    """The lanes of one member.

    `max_tries`: how often a message runs before it is given up (None: without limit). `backoff(tries)`: seconds to
    wait after that many failures. `remember`: how many finished messages are recognised when they are redelivered.

    A lane is a chain of entries, and only the last one is stored by key: most lanes hold one message, and need no
    container. Only the first of a lane is READY, RUNNING or RETRYING. Nothing stale is kept: `_ready` has each READY
    entry, `_retries` each RETRYING one, once.
    """

    __slots__ = (
        "_backoff",
        "_done",
        "_done_order",
        "_entries",
        "_last",
        "_max_tries",
        "_ready",
        "_remember",
        "_retries",
        "low_water",
        "lowest_dropped",
        "on_low_water",
    )

    def __init__(self, *, max_tries: int | None, backoff: Callable[[int], float], remember: int) -> None:
        self._max_tries = max_tries
        self._backoff = backoff
        self._remember = remember
        self._entries: dict[int, Entry[T]] = {}
        self._last: dict[Hashable, Entry[T]] = {}
        self._ready: deque[Entry[T]] = deque()
        self._retries: list[tuple[float, int]] = []
        self._done: set[int] = set()
        self.lowest_dropped: int | None = None
        """The lowest sequence that left without being finished. Whoever knows that all of them come again clears it."""
        self.low_water = -1
        """`on_low_water` is called when no more than this many messages are left."""
        self.on_low_water: Callable[[], None] = _nothing
        self._done_order: deque[int] = deque()  # finding a dict's oldest key is slow once many were deleted

    def __repr__(self) -> str:
        return f"<Lanes {len(self._entries)} messages in {len(self._last)} lanes, {len(self._ready)} ready>"

    def __len__(self) -> int:
        """Messages that are here: waiting, running, or to be retried."""
        return len(self._entries)

    def __contains__(self, sequence: int) -> bool:
        """Whether this message is here."""
        return sequence in self._entries

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(list(self._entries.values()))

    @property
    def ready(self) -> int:
        """How many may start now."""
        return len(self._ready)

    def lengths(self) -> Counter[Hashable]:
        """How many messages are in each lane. Counts on each call: do not call it for every message."""
        return Counter(entry.key for entry in self._entries.values())

    def is_done(self, sequence: int) -> bool:
        """Whether this message recently finished here."""
        return sequence in self._done

    @property
    def highest_done(self) -> int:
        return max(self._done, default=0)

    def arrive(self, sequence: int, key: Hashable, item: T) -> Arrival:
        held = self._entries.get(sequence)
        if held is not None:
            held.item = item
            return HELD
        if sequence in self._done:
            return DONE
        self._entries[sequence] = entry = Entry(sequence, key, item)
        last = self._last.get(key)
        if last is None:
            entry.state = READY
            self._ready.append(entry)
            self._last[key] = entry
        elif sequence > last.sequence:
            last.next = entry
            self._last[key] = entry
        else:
            self._insert(entry)
        return QUEUED

    def take(self) -> Entry[T] | None:
        """Return the next message to run, or None. Lanes take turns in the order in which they became free."""
        if not self._ready:
            return None
        entry = self._ready.popleft()
        entry.state = RUNNING
        return entry

    def finished(self, entry: Entry[T]) -> None:
        """The message succeeded, or it was given up: its lane continues with the next."""
        # `release` is inlined here: this runs once for every message.
        assert entry.state is RUNNING, entry
        sequence = entry.sequence
        del self._entries[sequence]
        following = entry.next
        if following is None:
            del self._last[entry.key]
        else:
            following.state = READY
            self._ready.append(following)
        self._done.add(sequence)
        self._done_order.append(sequence)
        if len(self._done_order) > self._remember:
            self._done.remove(self._done_order.popleft())
        if len(self._entries) == self.low_water:
            self.on_low_water()

    def failed(self, entry: Entry[T], now: float) -> float | None:
        """The message failed. Returns the time at which it may run again.

        None: it used all its tries and holds its lane until you give it up and call `finished`.
        """
        assert entry.state is RUNNING, entry
        entry.tries += 1
        if self._max_tries is not None and entry.tries >= self._max_tries:
            return None
        return self._retry_later(entry, now + self._backoff(entry.tries))

    def postponed(self, entry: Entry[T], now: float, delay_s: float) -> float:
        """The message could not run for another reason: it runs again later, and this does not count as a try."""
        assert entry.state is RUNNING, entry
        return self._retry_later(entry, now + delay_s)

    def release(self, entry: Entry[T]) -> None:
        """The message neither finished nor failed: forget it, so that it runs when it is redelivered.

        Its lane continues with the next: to keep the order, first `forget` the messages behind it.
        """
        assert entry.state is RUNNING, entry
        del self._entries[entry.sequence]
        self.drop(entry.sequence)
        following = entry.next
        if following is None:
            del self._last[entry.key]
        else:
            following.state = READY
            self._ready.append(following)
        if len(self._entries) == self.low_water:
            self.on_low_water()

    def drop(self, sequence: int) -> None:
        """This message is not, or no longer, here and was not finished."""
        if self.lowest_dropped is None or sequence < self.lowest_dropped:
            self.lowest_dropped = sequence

    def due(self, now: float) -> float | None:
        """Make due retries ready; returns when the next one is due."""
        while self._retries:
            retry_at, sequence = self._retries[0]
            if retry_at > now:
                return retry_at
            heapq.heappop(self._retries)
            entry = self._entries[sequence]
            entry.state = READY
            self._ready.append(entry)
        return None

    def forget(self, which: Callable[[T], bool] | None = None) -> list[T]:
        """Drop messages that are not running (all, or those `which` selects): the server redelivers them."""
        dropped = [
            entry
            for entry in self._entries.values()
            if entry.state is not RUNNING and (which is None or which(entry.item))
        ]
        firsts = self._firsts({entry.key for entry in dropped})
        for entry in dropped:
            del self._entries[entry.sequence]
            self.drop(entry.sequence)
        for key, first in firsts.items():
            self._chain_anew(key, first)
        self._ready = deque(entry for entry in self._ready if entry.sequence in self._entries)
        self._retries = [retry for retry in self._retries if retry[1] in self._entries]
        heapq.heapify(self._retries)
        return [entry.item for entry in dropped]

    def running(self, which: Callable[[T], bool] | None = None) -> int:
        """How many run now."""
        return sum(
            1 for entry in self._entries.values() if entry.state is RUNNING and (which is None or which(entry.item))
        )

    def _retry_later(self, entry: Entry[T], retry_at: float) -> float:
        entry.retry_at = retry_at
        entry.state = RETRYING
        heapq.heappush(self._retries, (retry_at, entry.sequence))
        return retry_at

    def _firsts(self, keys: Collection[Hashable]) -> dict[Hashable, Entry[T]]:
        return {
            entry.key: entry for entry in self._entries.values() if entry.state is not WAITING and entry.key in keys
        }

    def _insert(self, entry: Entry[T]) -> None:
        """Insert a message that is older than some waiting ones: before them, but not before one that has started."""
        before = self._firsts({entry.key})[entry.key]
        if entry.sequence < before.sequence and before.state is READY and before.tries == 0:
            entry.next = before
            self._take_turn_of(before, entry)
            return
        while before.next is not None and before.next.sequence < entry.sequence:
            before = before.next
        entry.next, before.next = before.next, entry
        if entry.next is None:
            self._last[entry.key] = entry

    def _take_turn_of(self, other: Entry[T], entry: Entry[T]) -> None:
        self._ready[self._ready.index(other)] = entry
        other.state, entry.state = WAITING, READY

    def _chain_anew(self, key: Hashable, first: Entry[T]) -> None:
        """Remove entries that are no longer in `_entries` from a lane; a ready lane keeps its turn."""
        kept = []
        entry: Entry[T] | None = first
        while entry is not None:
            if entry.sequence in self._entries:
                kept.append(entry)
            entry = entry.next
        if not kept:
            del self._last[key]
            return
        for entry, behind in zip(kept, [*kept[1:], None], strict=True):
            entry.next = behind
        self._last[key] = kept[-1]
        if kept[0].state is WAITING and first.state is READY:
            self._take_turn_of(first, kept[0])
        elif kept[0].state is WAITING:
            kept[0].state = READY
            self._ready.append(kept[0])
