"""Exactly once in a fleet: the fencing token of a claim is what the ledger compares."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, create_engine, insert, select

from keylane.exactly_once import ExactlyOnce
from keylane.groups import GroupMessage
from tests.integration.fleet.rig import FleetGround
from tests.waiter import until

metadata = MetaData()
effects = Table("effects", metadata, Column("sequence", Integer, primary_key=True), Column("key", String))


async def test_every_message_is_written_once_while_workers_come_and_go(limits: FleetGround, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/effects.db", connect_args={"timeout": 30})
    metadata.create_all(engine)

    def effect(message: GroupMessage, connection: Connection) -> None:
        connection.execute(insert(effects).values(sequence=message.delivery_sequence, key=message.key))

    def stored() -> list[int]:
        with engine.connect() as connection:
            return sorted(row.sequence for row in connection.execute(select(effects.c.sequence)))

    handler = ExactlyOnce(engine).handler(effect)
    async with limits.load(pause_s=1.0) as sent:
        a = await limits.join("a", handler)
        await limits.shared(a)
        b = await limits.join("b", ExactlyOnce(engine).handler(effect))
        await limits.shared(a, b)
        await a.stop()
        await limits.shared(b)
    await until(stored, lambda found: found == sorted(sent))
