"""Partitions move between simulated members on a simulated server: one owner, order per key, nothing lost, an end.

Every run is made from its seed alone; a failure prints it. `python -m tests.simulation.test_handoff_simulation 1000`
runs many.
"""

from __future__ import annotations

import sys

import pytest

from tests.simulation.member_model import Evidence, Instance
from tests.simulation.server_model import Clock, Server

PARTITIONS = 6
KEYS = 12
MEMBERS = ("a", "b", "c")
BUSY = 12_000
"""Messages, changes and faults come until then."""
QUIET = 40_000
"""By then everything must have ended."""


class World:
    """Members, a record that says who has what, and a source of trouble."""

    def __init__(self, seed: int, *, faults: bool) -> None:
        self.clock = Clock(seed)
        self.server = Server(self.clock)
        self.evidence = Evidence()
        self.faults = faults
        self.plan: dict[str, frozenset[int]] = {}
        self.instances: list[Instance] = []
        self._numbers = 0
        self._change()
        for member in MEMBERS:
            for _ in range(self.clock.random.randint(1, 2)):
                self.start(member)
        self.clock.after(1, self._publish)
        self.clock.after(500, self._change_again)
        self.clock.after(700, self._trouble)

    def start(self, member: str) -> None:
        self._numbers += 1
        self.instances.append(
            Instance(
                self.clock,
                self.server,
                member,
                self._numbers,
                lambda: self.plan.get(member, frozenset()),
                self.evidence,
            )
        )

    def _publish(self) -> None:
        random = self.clock.random
        for _ in range(random.randint(1, 3)):
            key = random.randrange(KEYS)
            self.server.publish(key % PARTITIONS, f"key-{key}")
        if self.clock.now < BUSY:
            self.clock.after(random.choice((5, 20, 20, 50, 100, 400)), self._publish)

    def _change(self) -> None:
        members = self.clock.random.sample(MEMBERS, self.clock.random.randint(1, len(MEMBERS)))
        owners = {partition: self.clock.random.choice(members) for partition in range(PARTITIONS)}
        self.plan = {member: frozenset(one for one, owner in owners.items() if owner == member) for member in MEMBERS}
        for instance in self.instances:
            instance.poke()

    def _change_again(self) -> None:
        self._change()
        if self.clock.now < BUSY:
            self.clock.after(self.clock.random.choice((30, 300, 1500, 3000)), self._change_again)

    def _trouble(self) -> None:
        random = self.clock.random
        instance = random.choice(self.instances)
        trouble = random.choice(("leave", "kill", "freeze", "delete") if self.faults else ("leave",))
        if not instance.is_running or instance.state.leaving:
            pass
        elif trouble == "kill":
            instance.kill()
            self.clock.after(300, lambda: self.start(instance.member))
        elif trouble == "freeze":
            instance.freeze()
            self.clock.after(random.choice((100, 900, 3000)), instance.wake)
        elif trouble == "delete":
            self.server.delete(instance.member)
        else:
            instance.leave()
            self.clock.after(200, lambda: self.start(instance.member))
        self.instances = [one for one in self.instances if not one.is_dead]
        if self.clock.now < BUSY:
            self.clock.after(random.choice((200, 1000, 2500)), self._trouble)

    def check(self) -> None:
        """At every step: no partition has two owners on the server, and no handler ran where it must not."""
        owners = [one for consumer in self.server.consumers.values() for one in consumer.filters]
        assert len(owners) == len(set(owners)), self.server.consumers
        assert not self.evidence.problems, self.evidence.problems[0]

    def run(self) -> None:
        self.clock.run(BUSY, self.check)
        for instance in self.instances:
            instance.wake()
        self.clock.run(QUIET, self.check)
        missing = self.evidence.missing(self.server.published)
        assert not missing, f"{len(missing)} lost, the first {missing[0]}: {self.server.published[missing[0]]}"
        assert not self.server.messages, f"never acked: {sorted(self.server.messages)[:5]}"
        for name, wanted in self.plan.items():
            consumer = self.server.consumers.get(name)
            assert (consumer.filters if consumer is not None else frozenset()) == wanted, (name, consumer, wanted)
        if not self.faults:
            assert not self.evidence.repeated, f"handled twice in a planned run: {self.evidence.repeated[:5]}"


def simulate(seed: int, *, faults: bool) -> int:
    world = World(seed, faults=faults)
    try:
        world.run()
    except AssertionError as error:
        error.add_note(f"seed {seed}, faults={faults}, at {world.clock.now} ms")
        for instance in world.instances:
            error.add_note(repr(instance))
        raise
    return len(world.server.published)


@pytest.mark.parametrize("seed", range(25))
def test_planned_changes_lose_repeat_and_reorder_nothing(seed: int) -> None:
    assert simulate(seed, faults=False) > 50


@pytest.mark.parametrize("seed", range(25))
def test_faults_lose_and_reorder_nothing(seed: int) -> None:
    assert simulate(seed, faults=True) > 50


if __name__ == "__main__":
    for each in range(int(sys.argv[1])):
        simulate(each, faults=False)
        simulate(each, faults=True)
