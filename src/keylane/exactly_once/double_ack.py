"""Prepare, double ack, commit or roll back: the pattern without tables of keylane's.

The weaker of the two: whoever dies between the ack and the commit loses the effect. docs/exactly-once.md compares them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import overload

from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from keylane.exactly_once.databases import Effect, Handler, database
from keylane.groups import GroupMessage


@overload
def ack_then_commit(
    engine: AsyncEngine, effect: Callable[[GroupMessage, AsyncConnection], Awaitable[None]]
) -> Handler: ...


@overload
def ack_then_commit(engine: Engine, effect: Callable[[GroupMessage, Connection], None]) -> Handler: ...


def ack_then_commit(engine: AsyncEngine | Engine, effect: Effect) -> Handler:
    """A handler that runs the effect in a transaction, acks, waits for the confirmation, and only then commits.

    Without a confirmation the transaction is rolled back and the message is tried again. Any database will do.

    >>> await groups.join(connection, "ORDERS", "billing", "alice", ack_then_commit(engine, effect))
    """
    target = database(engine)
    target.check_effect(effect)

    async def handle(message: GroupMessage) -> None:
        await target.acked(message, effect, ready=_refuse_now)

    return handle


def _refuse_now(connection: Connection) -> None:
    """Whatever the database would refuse at commit, it is to refuse before the ack."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
