"""How far one partition is handled here, and its commits where its consumer acks all up to a message.

`core/handled_prefix.py` has the rule. Here are the deliveries: which of them may still be acked, which one commits the
prefix, and which must be kept alive until it does.

An ack of an ack-all consumer settles everything below it, and carries the consumer's own count. The server does not
check that count against a reset: a late ack of a delivery from before one would make it ignore the acks after it. So
deliveries of a run that has ended are never acked; the server delivers their messages again, and they are recognised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from keylane.core.handled_prefix import HandledPrefix
from keylane.core.lanes import Lanes
from keylane.jetstream import Message
from keylane.processing.message import GroupMessage

_NO_RUN = 1 << 62
_MOST_PASSED = 1000
"""So many that are handled already are read, rather than disturb the consumer with a reset."""


class PartitionProgress:
    """The progress of one partition."""

    def __init__(self, lanes: Lanes[GroupMessage], *, commits: bool, may_commit: Callable[[], bool]) -> None:
        """`commits`: the consumer acks all. `may_commit`: whether nobody else can have the partition by now."""
        self._lanes = lanes
        self._prefix = HandledPrefix()
        self._commits = commits
        self._may_commit = may_commit
        self._count = _NO_RUN
        self._sequences: deque[int] = deque()
        self._deliveries: deque[Message] = deque()
        self._old: set[int] = set()
        self._owed: set[int] = set()
        self._older: set[int] = set()
        """Here since an earlier run, and not delivered in this one yet: no commit may pass them."""
        self._is_held = False
        self._passed = 0
        self.committed: Callable[[], None] | None = None
        """Called after each commit."""
        self.redelivered: Callable[[], None] | None = None
        """Called when the consumer is to be reset to the position: it went back, or did not get a commit."""

    def __repr__(self) -> str:
        return f"<PartitionProgress {self._prefix!r}, {len(self._sequences)} not committed>"

    @property
    def position(self) -> int:
        """Everything of the partition up to here was handled, when `advance` was last called."""
        return self._prefix.position

    def advance(self) -> int:
        """The position now."""
        lanes = self._lanes
        lowest = min((entry.sequence for entry in lanes), default=None) if len(lanes) else None
        return self._prefix.advance(lowest, lanes.lowest_dropped)

    def learned(self, position: int) -> None:
        """Somebody else has handled the partition up to here."""
        self._prefix.learned(position)

    # ---- deliveries ---------------------------------------------------------------------------------

    def arrived(self, messages: list[GroupMessage]) -> None:
        """These were delivered, in this order. Call it before the lanes have them."""
        first, last = messages[0].delivery, messages[-1].delivery
        if first.consumer_sequence <= self._count:
            self.end_run()
            self._is_held = False
            self._passed = 0
            self._older = {entry.sequence for entry in self._lanes}
            self._lanes.lowest_dropped = None
            self._prefix.run_began(first.sequence)
        self._count = last.consumer_sequence
        if not self._commits:
            self._prefix.arrived(last.sequence)
            return
        sequences = [one.delivery.sequence for one in messages]
        if self._older:
            self._older.difference_update(sequences)
        if self._owed:
            self._owed.difference_update(sequences)
        before = self._sequences[-1] if self._sequences else 0
        if sequences[0] <= before or sequences != sorted(sequences):
            self._is_held = True  # some of these are not below any delivery that is known here: until the reset
            if self.redelivered is not None:
                self.redelivered()
            return
        self._prefix.arrived(sequences[-1])
        self._sequences.extend(sequences)
        self._deliveries.extend([one.delivery for one in messages])

    def passed(self, count: int) -> None:
        """So many of this run were below the position."""
        before, self._passed = self._passed, self._passed + count
        if before <= _MOST_PASSED < self._passed and self.redelivered is not None:
            self.redelivered()

    def end_run(self) -> None:
        """What was delivered cannot be acked any more, and is delivered again: here, or to somebody else."""
        self._owed.update(one for one in self._sequences if self._is_handled(one))
        self._sequences.clear()
        self._deliveries.clear()
        self._old.clear()

    def forget(self) -> None:
        """Somebody else has the partition now."""
        self.end_run()
        self._owed.clear()

    @contextmanager
    def around_reset(self) -> Iterator[None]:
        """While the consumer is reset. If that fails it may have happened all the same."""
        self.commit()
        self._is_held = True
        try:
            yield
        finally:
            self.end_run()

    # ---- commits ------------------------------------------------------------------------------------

    @property
    def uncommitted(self) -> int:
        """How many deliveries no commit covers yet; 0 where messages are acked one by one."""
        return len(self._sequences)

    @property
    def owes(self) -> bool:
        """Whether something was handled that no commit covers yet."""
        return bool(self._owed) or (self._commits and any(map(self._is_handled, self._sequences)))

    def commit(self) -> None:
        """Ack the handled prefix. Runs once for every batch: a batch that is handled whole costs one ack."""
        sequences, deliveries, lanes = self._sequences, self._deliveries, self._lanes
        if not sequences or self._is_held or not self._may_commit():
            return
        last: Message | None = None
        if not len(lanes) and lanes.lowest_dropped is None:
            last = deliveries[-1]
            sequences.clear()
            deliveries.clear()
        else:
            while sequences and self._is_handled(sequences[0]):
                sequences.popleft()
                last = deliveries.popleft()
        if last is not None:
            last.ack()
            if self.committed is not None:
                self.committed()

    def _is_handled(self, sequence: int) -> bool:
        dropped = self._lanes.lowest_dropped
        if sequence in self._lanes or (dropped is not None and sequence >= dropped):
            return False
        return not any(older < sequence and older in self._lanes for older in self._older)

    def keep_alive(self) -> None:
        """Tell the server of what was not committed for long: what waits or runs, and what is handled above it."""
        self.commit()
        for sequence, delivery in zip(self._sequences, self._deliveries, strict=True):
            if sequence in self._old:
                delivery.in_progress()
        self._old = set(self._sequences)
