"""A group's past, made to measure: messages in a stream, and the journal that members of a group would have written.

Batches are packed and sealed as the real journal does it. The group is elastic; its queue is emptied, as if everything
had been acked, except for what a test leaves in it.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from keylane import Connection, groups
from keylane.core.journal_record import OUTCOME_NUMBERS, BatchHead, Columns, pack, seal
from keylane.core.partitions import partition_number
from keylane.errors import NotFound
from keylane.jetstream import open_publisher, streams
from keylane.journal.stream import journal_stream, journal_subject, prepare
from tests.waiter import until

PARTITIONS = 4
MS = 1_000_000
START_NS = time.time_ns() // MS * MS + 24 * 3_600_000 * MS
"""When the past begins: after its messages were stored, which happens while a test runs."""
GROUP = "billing"


@dataclass(frozen=True)
class Ground:
    """On what an instance works."""

    member: str
    instance: str
    pin: str
    revision: int = 1
    writer: str = "00000000000000aa"


ALICE = Ground("alice", "a1", "pin-a1")
BOB = Ground("bob", "b1", "pin-b1", writer="00000000000000bb")
STANDBY = Ground("alice", "a2", "pin-a2", writer="00000000000000cc")


@dataclass(frozen=True)
class Act:
    """One try at one message."""

    ground: Ground
    sequence: int
    key: str
    started_ns: int
    ended_ns: int
    outcome: str = "done"
    delivered: int = 1
    queue_sequence: int = 0


@dataclass
class Past:
    """What members did. Made clean; tests put faults into it."""

    keys: list[str]
    """The key of message 1, 2, …"""
    acts: list[Act] = field(default_factory=list)
    dropped: dict[Ground, dict[int, int]] = field(default_factory=dict)
    """Records that were lost before a batch of an instance."""
    unsent: set[tuple[str, int]] = field(default_factory=set)
    """Instance and number of batches that never arrived."""
    twice: set[tuple[str, int]] = field(default_factory=set)
    batch_records: int = 1000
    sample: float = 1.0
    group: str = GROUP

    @classmethod
    def clean(cls, messages: int, keys: int, step_ns: int = MS) -> Past:
        """Two members handle all messages, one after the other."""
        past = cls([f"k{number % keys}" for number in range(messages)])
        for sequence, key in enumerate(past.keys, 1):
            ground = ALICE if partition_of(key) < PARTITIONS // 2 else BOB
            start = START_NS + sequence * step_ns
            past.acts.append(Act(ground, sequence, key, start, start + step_ns // 2))
        return past

    def act(self, sequence: int) -> Act:
        return next(one for one in self.acts if one.sequence == sequence)

    def of(self, key: str) -> list[Act]:
        return [one for one in self.acts if one.key == key]

    def change(self, old: Act, **changes: object) -> Act:
        new = replace(old, **changes)  # type: ignore[arg-type]  # a test's own business
        self.acts[self.acts.index(old)] = new
        return new

    # ---- faults -----------------------------------------------------------------------------------------

    def lose(self, sequence: int) -> None:
        self.acts.remove(self.act(sequence))

    def swap(self, one: int, other: int) -> None:
        """Each is handled at the other's time."""
        first, second = self.act(one), self.act(other)
        self.change(first, started_ns=second.started_ns, ended_ns=second.ended_ns)
        self.change(second, started_ns=first.started_ns, ended_ns=first.ended_ns)

    def repeat(self, sequence: int, after_ns: int = 5 * MS, **changes: object) -> None:
        old = self.act(sequence)
        moved = replace(old, started_ns=old.started_ns + after_ns, ended_ns=old.ended_ns + after_ns)
        self.acts.append(replace(moved, **changes))  # type: ignore[arg-type]  # a test's own business

    def share(self, key: str, sequences: Iterable[int], ground: Ground = STANDBY) -> None:
        """Another instance handles these of a key, while its owner goes on with the rest."""
        for sequence in sequences:
            self.change(self.act(sequence), ground=ground)

    def freeze(self, sequence: int, for_ns: int, ground: Ground = STANDBY) -> None:
        """The owner of a key stands still in the midst of a message; another instance does it and those after it."""
        frozen = self.act(sequence)
        later = [one for one in self.of(frozen.key) if one.ground == frozen.ground and one.sequence >= sequence]
        for one in later:
            self.change(one, ground=ground, started_ns=one.started_ns + 1)
        self.acts.append(replace(frozen, ended_ns=frozen.ended_ns + for_ns))

    def move(self, key: str, first: int, last: int, ground: Ground) -> None:
        """A key's messages belong to somebody else for a while."""
        for one in [one for one in self.of(key) if first <= one.sequence <= last]:
            self.change(one, ground=ground)

    # ---- as a journal -----------------------------------------------------------------------------------

    def batches(self, stream: str) -> list[tuple[str, bytes]]:
        """Subject and bytes of each batch, in the order in which they would be stored."""
        lines: dict[tuple[str, str, str], list[Act]] = defaultdict(list)
        for act in self.acts:
            lines[act.ground.writer, act.ground.member, act.ground.instance].append(act)
        stored: list[tuple[int, str, bytes]] = []
        for (writer, member, instance), acts in lines.items():
            acts.sort(key=lambda act: act.ended_ns)
            lost = {ground.instance: numbers for ground, numbers in self.dropped.items()}.get(instance, {})
            for number, begin in enumerate(range(0, len(acts), self.batch_records), 1):
                if (instance, number) in self.unsent:
                    continue
                rows = acts[begin : begin + self.batch_records]
                head = BatchHead(
                    writer=writer, batch=number, stream=stream, group=self.group, member=member, instance=instance,
                    sample=self.sample, dropped=lost.get(number, 0),
                )  # fmt: skip
                data = seal(head, pack(columns(rows)))
                times = (0, 200_000 * MS) if (instance, number) in self.twice else (0,)
                subject = journal_subject(stream, self.group, member)
                stored.extend((rows[-1].ended_ns + late_ns, subject, data) for late_ns in times)
        return [(subject, data) for _, subject, data in sorted(stored, key=lambda one: one[0])]


def columns(acts: list[Act]) -> Columns:
    return Columns(
        sequences=[act.queue_sequence or act.sequence for act in acts],
        source_sequences=[act.sequence for act in acts],
        started_ns=[act.started_ns for act in acts],
        ended_ns=[act.ended_ns for act in acts],
        keys=[act.key for act in acts],
        partitions=[partition_of(act.key) for act in acts],
        delivered=[act.delivered for act in acts],
        tenures=[(act.ground.pin, act.ground.revision) for act in acts],
        outcomes=[OUTCOME_NUMBERS[act.outcome] for act in acts],
    )


def partition_of(key: str) -> int:
    return partition_number(key, PARTITIONS)


@asynccontextmanager
async def named(connection: Connection, stream: str, *more_groups: str) -> AsyncIterator[str]:
    """The name of a stream that a test makes; it, its journal and the queues of its groups are removed afterwards."""
    try:
        yield stream
    finally:
        queues = [groups.queue_stream(stream, group) for group in (GROUP, *more_groups)]
        for one in (*queues, journal_stream(stream), stream):
            with suppress(NotFound):
                await streams.delete(connection, one)


async def make_stream(connection: Connection, stream: str) -> None:
    await streams.create(
        connection,
        streams.StreamConfig(
            name=stream, subjects=[f"{stream}.*"], storage=streams.StorageType.MEMORY, allow_direct=True
        ),
    )


async def make_group(connection: Connection, stream: str, group: str = GROUP) -> None:
    await groups.create_elastic(
        connection, stream, group, partitions=PARTITIONS, partition_by=f"{stream}.*",
        members=["alice", "bob"],
    )  # fmt: skip


async def publish(connection: Connection, stream: str, keys: Iterable[str]) -> None:
    async with open_publisher(connection) as publisher:
        for key in keys:
            await publisher.send(f"{stream}.{key}", b"x" * 20)
        await publisher.flush()


async def empty_queue(
    connection: Connection,
    stream: str,
    messages: int,
    keep: Callable[[int], bool] | None = None,
    group: str = GROUP,
) -> None:
    """As if all had been acked, once all were copied; `keep` says of which sequences that is not so."""
    queue = groups.queue_stream(stream, group)
    await until(lambda: streams.state(connection, queue), lambda state: state.last_sequence >= messages, 60.0)
    if keep is None:
        await streams.purge(connection, queue)
        return
    for sequence in range(1, messages + 1):
        if not keep(sequence):
            await connection.api.request(f"STREAM.MSG.DELETE.{queue}", {"seq": sequence, "no_erase": True})


async def write(connection: Connection, stream: str, batches: Iterable[tuple[str, bytes]]) -> None:
    """The journal of a past. The stream's duplicate window is passed by: copies get ids of their own."""
    await prepare(connection, stream)
    async with open_publisher(connection) as publisher:
        for subject, data in batches:
            await publisher.send(subject, data, {"Nats-Msg-Id": secrets.token_hex(8)})
        await publisher.flush()


async def stage(connection: Connection, stream: str, past: Past, keep: Callable[[int], bool] | None = None) -> None:
    """Everything that an audit looks at."""
    await make_stream(connection, stream)
    await make_group(connection, stream)
    await publish(connection, stream, past.keys)
    await empty_queue(connection, stream, len(past.keys), keep)
    await write(connection, stream, past.batches(stream))
