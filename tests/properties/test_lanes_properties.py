"""The lanes against lists and linear scans, over random histories; and order and bounds over long ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.core.lanes import Arrival, Entry, Lanes, State

KEYS = "abcd"
BACKOFF_S = 4.0
WINDOW = 30


def backoff(tries: int) -> float:
    return BACKOFF_S * tries


@dataclass(eq=False)
class Delivery:
    """What a server hands over; every delivery is an object of its own."""

    sequence: int
    key: str


@dataclass(eq=False)
class Message:
    sequence: int
    key: str
    item: Delivery
    tries: int = 0
    running: bool = False
    retry_at: float | None = None

    @property
    def has_started(self) -> bool:
        return self.running or self.tries > 0


@dataclass
class DumbLanes:
    """The rules as one list and scans of it. `turns` says since which step a key has been free to start."""

    max_tries: int | None
    remember: int
    here: list[Message] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)
    step: int = 0

    def find(self, sequence: int) -> Message | None:
        return next((message for message in self.here if message.sequence == sequence), None)

    def remembered(self) -> list[int]:
        return self.done[max(0, len(self.done) - self.remember) :]

    def first_of(self, key: str) -> Message | None:
        """The one that has started, else the lowest."""
        lane = [message for message in self.here if message.key == key]
        begun = [message for message in lane if message.has_started]
        assert len(begun) <= 1
        return begun[0] if begun else min(lane, key=lambda message: message.sequence, default=None)

    def startable(self) -> dict[str, Message]:
        firsts = {key: self.first_of(key) for key in KEYS}
        return {
            key: first
            for key, first in firsts.items()
            if first is not None and not first.running and first.retry_at is None
        }

    def note_turns(self) -> None:
        """Called after every step: who is free now and was not before has been free since this step."""
        self.step += 1
        self.turns = {key: self.turns.get(key, self.step) for key in self.startable()}

    def arrive(self, delivery: Delivery) -> Arrival:
        held = self.find(delivery.sequence)
        if held is not None:
            held.item = delivery
            return Arrival.HELD
        if delivery.sequence in self.remembered():
            return Arrival.DONE
        self.here.append(Message(delivery.sequence, delivery.key, delivery))
        self.note_turns()
        return Arrival.QUEUED

    def start(self, sequence: int) -> None:
        """Whichever of those that have been free longest."""
        message = self.find(sequence)
        assert message is not None
        assert self.startable().get(message.key) is message
        assert self.turns[message.key] == min(self.turns.values())
        message.running = True
        self.note_turns()

    def drop(self, message: Message) -> None:
        self.here.remove(message)
        self.note_turns()

    def finish(self, message: Message) -> None:
        self.done.append(message.sequence)
        self.drop(message)

    def fail(self, message: Message, now: float) -> float | None:
        message.tries += 1
        if self.max_tries is not None and message.tries >= self.max_tries:
            return None
        message.running = False
        message.retry_at = now + backoff(message.tries)
        self.note_turns()
        return message.retry_at

    def due(self, now: float) -> float | None:
        for message in self.here:
            if message.retry_at is not None and message.retry_at <= now:
                message.retry_at = None
        self.note_turns()
        return min((message.retry_at for message in self.here if message.retry_at is not None), default=None)

    def forget(self, which: Callable[[Delivery], bool]) -> list[Delivery]:
        dropped = [message for message in self.here if which(message.item) and not message.running]
        self.here = [message for message in self.here if message not in dropped]
        self.note_turns()
        return [message.item for message in dropped]


def chain(first: Entry[Delivery]) -> Iterator[Entry[Delivery]]:
    """A lane, from its first message on."""
    entry: Entry[Delivery] | None = first
    while entry is not None:
        yield entry
        entry = entry.next


def check_bounds(lanes: Lanes[Delivery], remember: int) -> None:
    """What is kept inside is what is here and what is remembered, and nothing else."""
    entries = list(lanes)
    states = [entry.state for entry in entries]
    assert len(lanes._ready) == states.count(State.READY) == lanes.ready
    assert len(lanes._retries) == states.count(State.RETRYING)
    firsts = [entry for entry in entries if entry.state is not State.WAITING]
    chains = {first.key: list(chain(first)) for first in firsts}
    assert len(chains) == len(firsts), "one of a lane may run"
    chained = [entry.sequence for lane in chains.values() for entry in lane]
    assert sorted(chained) == sorted(entry.sequence for entry in entries)
    assert {key: lane[-1] for key, lane in chains.items()} == lanes._last
    assert len(lanes._done) == len(lanes._done_order) <= remember


class SideBySide:
    """The lanes and the model, given the same history. Any number picks what a step is about."""

    def __init__(self, max_tries: int | None, remember: int) -> None:
        self.lanes: Lanes[Delivery] = Lanes(max_tries=max_tries, backoff=backoff, remember=remember)
        self.model = DumbLanes(max_tries, remember)
        self.published: list[str] = []
        self.working: list[Entry[Delivery]] = []
        self.now = 0.0

    def play(self, step: Callable[[SideBySide, int], None], number: int) -> None:
        step(self, number)
        self.check_same()
        check_bounds(self.lanes, self.model.remember)

    def deliver(self, sequence: int) -> None:
        delivery = Delivery(sequence, self.published[sequence])
        assert self.lanes.arrive(sequence, delivery.key, delivery) is self.model.arrive(delivery)

    def publish_and_deliver(self, number: int) -> None:
        if self.publish(number):
            self.deliver(len(self.published) - 1)

    def publish_only(self, number: int) -> None:
        """It is delivered later, out of order."""
        self.publish(number)

    def publish(self, number: int) -> bool:
        room = len(self.published) - len(set(self.model.done)) < WINDOW
        if room:
            self.published.append(KEYS[number % len(KEYS)])
        return room

    def deliver_any(self, number: int) -> None:
        """New and late, early again, finished already, forgotten: whatever it is."""
        if self.published:
            newest = len(self.published) - 1
            self.deliver(newest - number % min(WINDOW, len(self.published)))

    def take(self, number: int) -> None:
        for _ in range(1 + number % 3):
            entry = self.lanes.take()
            if entry is None:
                assert not self.model.startable()
                return
            assert entry.key not in {other.key for other in self.working}
            assert entry.sequence not in self.model.remembered()
            self.model.start(entry.sequence)
            self.working.append(entry)

    def pick(self, number: int) -> tuple[Entry[Delivery], Message]:
        entry = self.working[number % len(self.working)]
        message = self.model.find(entry.sequence)
        assert message is not None
        return entry, message

    def finish(self, number: int) -> None:
        if self.working:
            entry, message = self.pick(number)
            self.working.remove(entry)
            self.lanes.finished(entry)
            self.model.finish(message)

    def fail(self, number: int) -> None:
        """One that had all its tries stays at work until it is given up, by `finish`."""
        if self.working:
            entry, message = self.pick(number)
            retry_at = self.lanes.failed(entry, self.now)
            assert retry_at == self.model.fail(message, self.now)
            if retry_at is not None:
                self.working.remove(entry)

    def release(self, number: int) -> None:
        if self.working:
            entry, message = self.pick(number)
            self.working.remove(entry)
            self.lanes.release(entry)
            self.model.drop(message)

    def pass_time(self, number: int) -> None:
        self.now += (0.0, 1.0, BACKOFF_S - 0.5, BACKOFF_S, 30.0)[number % 5]
        assert self.lanes.due(self.now) == self.model.due(self.now)

    def forget_keys(self, number: int) -> None:
        keys = [key for place, key in enumerate(KEYS) if number >> place & 1]
        dropped = self.model.forget(lambda item: item.key in keys)
        assert self.lanes.forget(lambda item: item.key in keys) == dropped

    def forget_some(self, number: int) -> None:
        dropped = self.model.forget(lambda item: (item.sequence + number) % 3 == 0)
        assert self.lanes.forget(lambda item: (item.sequence + number) % 3 == 0) == dropped

    def reset(self, _number: int) -> None:
        """Everything unfinished is delivered again, from the lowest, in order."""
        assert self.lanes.forget() == self.model.forget(lambda _: True)
        for sequence in range(len(self.published)):
            if sequence not in self.model.done:
                self.deliver(sequence)

    def check_same(self) -> None:
        model, here = self.model, {entry.sequence: entry for entry in self.lanes}
        assert list(here) == [message.sequence for message in model.here]
        for message in model.here:
            entry = here[message.sequence]
            assert entry.item is message.item
            assert (entry.key, entry.tries) == (message.key, message.tries)
            assert (entry.state is State.RUNNING) == message.running
            assert (entry.state is State.RETRYING) == (message.retry_at is not None)
        ready = {entry.sequence for entry in here.values() if entry.state is State.READY}
        assert ready == {message.sequence for message in model.startable().values()}
        assert self.lanes.ready == len(ready)
        assert len(self.lanes) == len(model.here)
        assert self.lanes.running() == len(self.working)
        for key in KEYS:
            assert self.lanes.lengths()[key] == sum(message.key == key for message in model.here)

    def run_out(self) -> None:
        """Nothing is lost: whatever is here runs in the end, each once."""
        left = [message.sequence for message in self.model.here]
        ended = []
        for _ in range(len(left) + 1):
            for entry in self.working:
                self.lanes.finished(entry)
                ended.append(entry.sequence)
            self.lanes.due(float("inf"))
            self.working = [entry for entry in iter(self.lanes.take, None) if entry is not None]
        assert sorted(ended) == sorted(left)
        assert len(self.lanes) == 0
        check_bounds(self.lanes, self.model.remember)


OFTEN = {
    SideBySide.publish_and_deliver: 8,
    SideBySide.publish_only: 2,
    SideBySide.deliver_any: 5,
    SideBySide.take: 8,
    SideBySide.finish: 5,
    SideBySide.fail: 6,
    SideBySide.release: 1,
    SideBySide.pass_time: 4,
    SideBySide.forget_keys: 1,
    SideBySide.forget_some: 1,
    SideBySide.reset: 1,
}
STEPS = [step for step, times in OFTEN.items() for _ in range(times)]
MAX_TRIES = [None, 1, 2, 3]
REMEMBER = [0, 1, 3, 1000]


@settings(deadline=None, max_examples=150)
@given(
    max_tries=st.sampled_from(MAX_TRIES),
    remember=st.sampled_from(REMEMBER),
    history=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 59)), min_size=15, max_size=90),
)
def test_any_history(
    max_tries: int | None, remember: int, history: list[tuple[Callable[[SideBySide, int], None], int]]
) -> None:
    both = SideBySide(max_tries, remember)
    for step, number in history:
        both.play(step, number)
    both.run_out()


@pytest.mark.parametrize("remember", REMEMBER)
@pytest.mark.parametrize("max_tries", MAX_TRIES)
def test_a_long_history(max_tries: int | None, remember: int) -> None:
    chance = random.Random(f"{max_tries} {remember}")  # noqa: S311 - a history that can be played again
    both = SideBySide(max_tries, remember)
    for _ in range(1500):
        both.play(chance.choice(STEPS), chance.randrange(60))
    both.run_out()


class OrderedServer:
    """Delivers in sequence order; what it delivered may come again at any time; a reset starts over.

    Members forget before they release, and both before the reset. What is at work may stay at work.
    """

    def __init__(self, seed: int, remember: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a history that can be played again
        self.remember = remember
        self.lanes: Lanes[Delivery] = Lanes(max_tries=4, backoff=backoff, remember=remember)
        self.keys: list[str] = []
        self.acked: set[int] = set()
        self.cursor = 0
        self.working: list[Entry[Delivery]] = []
        self.first_starts: list[int] = []
        self.started: set[int] = set()
        self.ends: list[int] = []
        self.now = 0.0
        self.largest = 0

    def deliver(self) -> None:
        for _ in range(self.random.randint(1, 8)):
            if self.cursor == len(self.keys):
                self.keys.append(self.random.choice(KEYS))
            sequence = self.cursor
            self.cursor += 1
            if sequence not in self.acked:
                self.hand_over(sequence)

    def hand_over(self, sequence: int) -> Arrival:
        key = self.keys[sequence]
        return self.lanes.arrive(sequence, key, Delivery(sequence, key))

    def redeliver(self) -> None:
        """Early, or because an ack was lost."""
        here = [entry.sequence for entry in self.lanes]
        if here:
            assert self.hand_over(self.random.choice(here)) is Arrival.HELD
        if self.ends:
            assert self.hand_over(self.random.choice(self.ends[-self.remember :])) is Arrival.DONE

    def take(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            entry = self.lanes.take()
            if entry is None:
                return
            assert entry.key not in [other.key for other in self.working]
            assert entry.sequence not in self.acked
            self.working.append(entry)
            if entry.sequence not in self.started:
                self.started.add(entry.sequence)
                self.first_starts.append(entry.sequence)

    def pick(self) -> Entry[Delivery]:
        return self.working.pop(self.random.randrange(len(self.working)))

    def finish(self) -> None:
        if self.working:
            self.end(self.pick())

    def end(self, entry: Entry[Delivery]) -> None:
        self.lanes.finished(entry)
        self.acked.add(entry.sequence)
        self.ends.append(entry.sequence)

    def fail(self) -> None:
        if self.working:
            entry = self.pick()
            if self.lanes.failed(entry, self.now) is None:
                self.end(entry)

    def pass_time(self) -> None:
        self.now += self.random.choice([0.0, 1.0, 5.0])
        self.lanes.due(self.now)

    def reset(self) -> None:
        self.lanes.forget()
        for _ in range(self.random.randint(0, len(self.working))):
            self.lanes.release(self.pick())
        self.cursor = next((n for n in range(len(self.keys)) if n not in self.acked), len(self.keys))

    def run(self, steps: int) -> None:
        often = [self.take, self.finish, self.finish, self.fail, self.pass_time, self.redeliver]
        for _ in range(steps):
            act = self.reset if self.random.random() < 0.03 else self.random.choice(often)
            if len(self.lanes) < 40 and self.random.random() < 0.4:
                act = self.deliver
            act()
            self.largest = max(self.largest, len(self.lanes))
            check_bounds(self.lanes, self.remember)

    def run_out(self) -> None:
        """All that is left is delivered and runs."""
        self.reset()
        while self.cursor < len(self.keys):
            self.deliver()
        for _ in range(10 * len(self.keys)):
            self.lanes.due(float("inf"))
            self.take()
            self.finish()


def in_order(sequences: list[int], keys: list[str]) -> bool:
    return all(lane == sorted(lane) for key in KEYS for lane in [[n for n in sequences if keys[n] == key]])


@pytest.mark.parametrize("seed", range(30))
def test_a_server_that_delivers_in_order_sees_order_no_loss_and_no_repeat(seed: int) -> None:
    server = OrderedServer(seed, remember=400)
    server.run(600)
    assert len(server.ends) > 20
    server.run_out()
    assert sorted(server.ends) == list(range(len(server.keys))), "each ended once"
    assert in_order(server.ends, server.keys)
    assert in_order(server.first_starts, server.keys)


def test_a_long_run_keeps_no_more_than_a_short_one() -> None:
    server = OrderedServer(seed=7, remember=50)
    server.run(60_000)
    assert len(server.ends) > 5_000
    assert server.largest < 60


@pytest.mark.parametrize("taking", [False, True])
def test_forgetting_for_ever_piles_nothing_up(taking: bool) -> None:
    """A member that is reset again and again, whether or not it gets to run anything in between."""
    lanes: Lanes[Delivery] = Lanes(max_tries=None, backoff=backoff, remember=5)
    for turn in range(300):
        for sequence in (9, 5, 7, 1, 8, 3):
            lanes.arrive(sequence, KEYS[sequence % 2], Delivery(sequence, KEYS[sequence % 2]))
        if taking:
            for _ in range(lanes.ready):
                entry = lanes.take()
                assert entry is not None
                lanes.failed(entry, now=float(turn))
        check_bounds(lanes, 5)
        assert len(lanes.forget()) == 6
        check_bounds(lanes, 5)
        assert len(lanes) == lanes.ready == 0
