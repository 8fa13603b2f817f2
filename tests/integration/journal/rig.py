"""Ground for the tests of the journal: messages to note, made as a member's deliveries are, and ways to look at it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from keylane import Connection
from keylane.jetstream import Message, streams
from keylane.journal import Journal, JournalRecord, journal_stream, read_journal

START_NS = 1_790_000_000_000_000_000


@dataclass
class Instance:
    """An instance of a member."""

    stream: str
    group: str = "billing"
    member: str = "alice"
    instance: str = "i-1"
    revision: int = 4


@dataclass(frozen=True)
class Spot:
    partition: int
    key: str


@dataclass(frozen=True)
class Handled:
    delivery: Message
    place: Spot
    origin: Instance


@dataclass
class Worker:
    """Notes one message after the other, as an instance that handles them would."""

    connection: Connection
    journal: Journal
    origin: Instance
    keys: int = 7
    key_of: Callable[[int], str] = field(default=lambda number: f"customer-{number}")
    sequences: count[int] = field(default_factory=lambda: count(1))

    def message(self, sequence: int) -> Handled:
        reply = b"$JS.ACK.%b.alice.1.%d.%d.%d.0" % (self.origin.stream.encode(), sequence, sequence, START_NS)
        headers = b"NATS/1.0\r\nNats-Pin-Id: pin1\r\n\r\n"
        delivery = Message(self.connection.nats, b"3.orders", reply, headers, b"data")
        return Handled(delivery, Spot(sequence % self.keys, self.key_of(sequence % self.keys)), self.origin)

    def work(self, how_many: int) -> list[int]:
        """Note this many messages; returns their sequences."""
        done = []
        for _ in range(how_many):
            sequence = next(self.sequences)
            started_ns = START_NS + sequence * 1000
            self.journal.note(self.message(sequence), "done", started_ns, started_ns + 500)
            done.append(sequence)
        return done


def held(journal: Journal) -> int:
    """How many records wait to be stored."""
    found = re.search(r"held=(\d+)", repr(journal))
    assert found is not None
    return int(found[1])


def in_doubt(journal: Journal) -> int:
    """How many batches may or may not be stored."""
    return sum(batch.may_be_stored for batch in journal._waiting)


def in_flight(journal: Journal) -> int:
    """How many batches were sent and not answered."""
    return len(journal._in_flight)


async def read(connection: Connection, stream: str, group: str | None = None) -> list[JournalRecord]:
    return [record async for record in read_journal(connection, stream, group=group)]


async def messages_in(connection: Connection, stream: str) -> int:
    return (await streams.state(connection, journal_stream(stream))).messages
