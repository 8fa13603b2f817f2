"""Up to where everything is handled: never further than that, against a model that remembers every message."""

from __future__ import annotations

import random

from keylane.core.handled_prefix import HandledPrefix


def test_what_is_here_or_was_dropped_holds_it_back() -> None:
    prefix = HandledPrefix()
    prefix.run_began(3)
    prefix.arrived(20)
    assert prefix.advance(lowest_here=8, lowest_dropped=None) == 7
    assert prefix.advance(lowest_here=12, lowest_dropped=10) == 9
    assert prefix.advance(lowest_here=None, lowest_dropped=10) == 9
    prefix.run_began(10)
    assert prefix.advance(lowest_here=None, lowest_dropped=None) == 9, "the rest has not come again yet"
    prefix.arrived(20)
    assert prefix.advance(lowest_here=None, lowest_dropped=None) == 20


def test_it_never_goes_back() -> None:
    prefix = HandledPrefix()
    prefix.learned(50)
    prefix.run_began(11)
    prefix.arrived(30)
    assert prefix.advance(lowest_here=12, lowest_dropped=None) == 50
    prefix.learned(40)
    assert prefix.position == 50


class Partition:
    """A partition, its consumer and its reader, as simple as can be: every fact is a set of sequences."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.messages = sorted(draw.sample(range(1, 200), 60))
        self.handled: set[int] = set()
        self.acked: set[int] = set()
        self.here: set[int] = set()
        self.dropped: set[int] = set()
        self.next = 0
        self.begins = True
        self.prefix = HandledPrefix()

    @property
    def floor(self) -> int:
        return next((one for one in self.messages if one not in self.acked), 1000) - 1

    def deliver(self) -> None:
        batch = self.messages[self.next : self.next + self.draw.randint(1, 9)]
        if not batch:
            return
        self.next += len(batch)
        if self.begins:
            self.begins = False
            self.dropped.clear()
            self.prefix.run_began(batch[0])
        self.prefix.arrived(batch[-1])
        self.here |= {one for one in batch if one not in self.handled}

    def handle(self) -> None:
        for one in self.draw.sample(sorted(self.here), min(len(self.here), self.draw.randint(0, 6))):
            self.here.remove(one)
            self.handled.add(one)
            if self.draw.random() < 0.8:  # else the ack is lost
                self.acked.add(one)

    def drop(self) -> None:
        gone = {one for one in self.here if self.draw.random() < 0.5}
        self.here -= gone
        self.dropped |= gone

    def restart(self) -> None:
        """A reset to the floor, or a consumer that is made anew at the position."""
        start = self.floor if self.draw.random() < 0.5 else self.prefix.position
        self.next = sum(one <= start for one in self.messages)
        self.begins = True

    def check(self) -> None:
        before = self.prefix.position
        position = self.prefix.advance(min(self.here, default=None), min(self.dropped, default=None))
        assert position >= before
        assert {one for one in self.messages if one <= position} <= self.handled


def test_everything_up_to_the_position_is_handled() -> None:
    for seed in range(300):
        try:
            _run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


def _run(seed: int) -> None:
    partition = Partition(random.Random(seed))  # noqa: S311 - a test
    draw = partition.draw
    for _ in range(120):
        draw.choices([partition.deliver, partition.handle, partition.drop, partition.restart], [8, 8, 1, 1])[0]()
        if draw.random() < 0.5:
            partition.check()
    partition.restart()
    while partition.next < len(partition.messages):
        partition.deliver()
    partition.handled |= partition.here
    partition.here.clear()
    partition.check()
    assert partition.prefix.position == partition.messages[-1], "in the end it is all of it"
