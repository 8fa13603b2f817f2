"""Prepare, double ack, commit or roll back: the pattern without keylane's tables.

The weaker of the two patterns: a process that dies between the ack and the commit loses the effect.
docs/exactly-once.md compares them.
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
    """Return a handler that runs the effect in a transaction, acks, waits for the confirmation, and then commits.

    Without a confirmation it rolls back, and the message is retried. Works with any database.

    >>> await groups.join(connection, "ORDERS", "billing", "alice", ack_then_commit(engine, effect))
    """
    target = database(engine)
    target.check_effect(effect)

    async def handle(message: GroupMessage) -> None:
        await target.acked(message, effect, ready=_refuse_now)

    return handle


def _refuse_now(connection: Connection) -> None:
    """Make the database refuse before the ack what it would refuse at commit."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
