"""Ground for the tests of exactly once: databases, a table that effects are written to, instances of a member."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    event,
    insert,
    select,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from keylane.errors import Fenced
from keylane.groups import GroupMessage, GroupSource
from keylane.groups.instance import Origin
from keylane.jetstream import Client, ConsumerConfig, Message, streams
from keylane.processing.message import Place
from keylane.testing import Effect, Verdict, judge
from tests.integration.groups.rig import Ground
from tests.waiter import until

CALM = ConsumerConfig(ack_wait_s=20.0)
"""Long timers, for tests that count calls: what stands still for a moment is not delivered again."""
_metadata = MetaData()
effects = Table(
    "effects",
    _metadata,
    Column("id", Integer, primary_key=True),
    Column("lane", Text, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("who", Text, nullable=False),
)
"""Nothing in it is unique: what is written twice is seen twice."""


@dataclass(slots=True)
class Database:
    """One database of a test, and the engines on it."""

    kind: str
    path: str
    engines: list[AsyncEngine] = field(default_factory=list)
    plain: list[Engine] = field(default_factory=list)

    @property
    def async_url(self) -> str:
        return f"sqlite+aiosqlite:///{self.path}" if self.kind == "sqlite" else f"postgresql+psycopg://{self.path}"

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}" if self.kind == "sqlite" else f"postgresql+psycopg://{self.path}"

    def engine(self) -> AsyncEngine:
        """An engine of its own, as another process would have."""
        made = create_async_engine(self.async_url, pool_size=20)
        self.engines.append(made)
        return made

    def plain_engine(self) -> Engine:
        made = create_engine(self.url, pool_size=20)
        self.plain.append(made)
        return made

    def make_effects(self) -> None:
        with self._looking().begin() as connection:
            if self.kind == "sqlite":
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            _metadata.create_all(connection)

    def rows(self) -> list[tuple[str, int, str]]:
        """What effects wrote and committed, in the order in which they did."""
        with self._looking().connect() as connection:
            found = connection.execute(select(effects.c.lane, effects.c.sequence, effects.c.who).order_by(effects.c.id))
            return [(row.lane, row.sequence, row.who) for row in found]

    def verdict(self, sent: Iterable[int]) -> Verdict:
        return judge(sent, [Effect(*row) for row in self.rows()])

    async def wait_for(self, count: int, deadline_s: float = 45.0) -> None:
        """Until this many effects are committed."""
        await until(lambda: len(self.rows()) >= count, deadline_s=deadline_s)

    def ask(self, statement: str) -> list[tuple[object, ...]]:
        with self._looking().connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(statement)]

    def do(self, statement: str) -> None:
        with self._looking().begin() as connection:
            connection.exec_driver_sql(statement)

    async def dispose(self) -> None:
        for engine in self.engines:
            await engine.dispose()
        for plain in self.plain:
            plain.dispose()

    def _looking(self) -> Engine:
        return self.plain[0] if self.plain else self.plain_engine()


async def drained(ground: Ground, count: int, deadline_s: float = 45.0) -> None:
    """Wait until the group's queue has had this many messages and all of them were acked."""
    await until(
        lambda: streams.state(ground.connection, f"{ground.stream}-g"),
        lambda state: state.last_sequence >= count and state.messages == 0,
        deadline_s,
    )


async def write(message: GroupMessage, connection: AsyncConnection, who: str = "") -> None:
    await connection.execute(insert(effects).values(lane=message.key, sequence=message.sequence, who=who))


def write_plainly(message: GroupMessage, connection: Connection) -> None:
    connection.execute(insert(effects).values(lane=message.key, sequence=message.sequence, who=""))


@dataclass(slots=True)
class Instance:
    """An instance that says about itself what the test wants it to say. Stands in for a member's origin."""

    revision: int
    pinned_ns: int
    member: str = "m1"
    instance: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    stream: str = "ORDERS"
    group: str = "billing"
    pin_id: str | None = field(default_factory=lambda: uuid.uuid4().hex)
    from_queue: bool = False
    asked: int = 0
    record: int | None = None
    """The revision that the server has; None: the one that the instance follows."""
    bucket: str = "2026-01-01T00:00:00+00:00"
    stream_created: str = "2025-01-01T00:00:00+00:00"
    last_sequence: int = 1_000_000
    waiting_for: str | None = None

    def wait(self, waiting_for: str | None) -> None:
        self.waiting_for = waiting_for

    @property
    def version(self) -> tuple[int, str]:
        return self.revision, self.bucket

    async def source(self) -> GroupSource:
        if self.record not in (None, self.revision):
            raise Fenced("does not follow the newest record yet")
        return GroupSource(self.bucket, self.revision, self.stream_created, 0, self.last_sequence)

    async def fence(self, *, anew: bool = False) -> tuple[int, int]:
        self.asked += not anew
        if self.pin_id is None:
            raise Fenced("not pinned any more")
        return self.revision, self.pinned_ns

    def message(self, sequence: int, key: str = "k", partition: int = 3, *, pin_id: str | None = None) -> GroupMessage:
        reply = f"$JS.ACK.{self.stream}.c.1.{sequence}.{sequence}.1700000000000000000.0".encode()
        pin_id = pin_id or self.pin_id
        headers = f"NATS/1.0\r\nNats-Pin-Id: {pin_id}\r\n\r\n".encode()
        delivery = Message(
            cast("Client", None), f"{partition}.{key}".encode("utf-8", "surrogateescape"), reply, headers, b"x"
        )
        return GroupMessage(delivery, Place.of(partition, key, key), cast("Origin", self))


def set_to_begin_by_itself(engine: Engine | AsyncEngine) -> None:
    """The way in which SQLAlchemy's manual makes SQLite's transactions begin at once."""
    plain = engine.sync_engine if isinstance(engine, AsyncEngine) else engine

    @event.listens_for(plain, "connect")
    def connected(dbapi_connection: object, _record: object) -> None:
        dbapi_connection.isolation_level = None  # type: ignore[attr-defined]

    @event.listens_for(plain, "begin")
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")
