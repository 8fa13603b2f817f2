"""The statements of exactly once, each a step within one transaction.

A partition has one owner at a time, by its row in `keylane_fence`. A transaction of the owner holds that row with a
shared lock until it ends, so an owner's transactions run side by side, and a new owner's claim (an update of the row)
waits for those of the old one and stops all that come later. Plain functions on a SQLAlchemy connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, bindparam, delete, or_, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import Executable

from keylane.errors import InvalidInput
from keylane.exactly_once.standing import Claim, Entry
from keylane.exactly_once.tables import fence, progress


class Superseded(Exception):
    """The partition's row is not what this instance put there. Never leaves this package."""

    def __init__(self, stored: Claim | None) -> None:
        super().__init__(stored)
        self.stored = stored


class DoneElsewhere(Exception):
    """Another transaction has done the message while this one was at it: roll back. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long our transactions may hold others up. PostgreSQL enforces them, also against a process that is frozen."""

    lock_s: float
    idle_s: float

    def begin(self, connection: Connection) -> None:
        """First in every transaction."""
        if connection.dialect.name == "postgresql":
            connection.execute(_SET_LIMITS, {"lock": f"{_ms(self.lock_s)}ms", "idle": f"{_ms(self.idle_s)}ms"})
        else:
            # SQLite's own way starts as a reader, and two readers that want to write end in an error.
            if _sqlite_has_begun(connection):
                connection.exec_driver_sql("ROLLBACK")  # the engine was told to begin by itself; nothing is done yet
            connection.exec_driver_sql("BEGIN IMMEDIATE")


def check_dialect(name: str) -> None:
    if name not in _CLAIM:
        raise InvalidInput(f"the engine speaks to {name!r}: exactly once knows {' and '.join(_CLAIM)}")


def claim(connection: Connection, entry: Entry, mine: Claim, instance: str) -> None:
    """Take the partition, unless a newer owner has it: then `Superseded`.

    Newer is a later revision of the group, or within one revision a later pin of the same member. Pins of two members
    are of two consumers and say nothing about each other: there the server decides, which lets a partition go to a
    member only after the other one has let go of it, and so the later claim is the right one.
    """
    where = {"stream": entry.stream, "group_name": entry.group_name, "partition": entry.partition}
    if _owner(connection, where) == mine:
        return  # the statement below would wait for our own effects, even if it changes nothing
    connection.execute(_CLAIM[connection.dialect.name], {**where, **mine._asdict(), "instance": instance})
    _check_owner(_owner(connection, where), mine)


def is_due(connection: Connection, entry: Entry, mine: Claim) -> bool:
    """Whether the message is still to be done. `Superseded` if the partition is not ours."""
    where = {
        "stream": entry.stream,
        "group_name": entry.group_name,
        "partition": entry.partition,
        "lane": entry.lane,
    }
    found = connection.execute(_OWNER_AND_PROGRESS, where).one_or_none()
    _check_owner(Claim(*found[:3]) if found is not None else None, mine)
    return found is not None and (found.sequence is None or found.sequence < entry.sequence)


def note(connection: Connection, entry: Entry) -> None:
    """Note the message as done; `DoneElsewhere` if another transaction did that meanwhile.

    Comes after the effect: an effect that hid an error of the database has lost its transaction, and is told here.
    """
    lost_quietly = connection.dialect.name == "sqlite" and not _sqlite_has_begun(connection)
    if lost_quietly or not connection.in_transaction():
        raise InvalidInput(
            f"the effect of sequence {entry.sequence} ended the transaction that it was given: let keylane commit, and "
            "raise what goes wrong"
        )
    if connection.execute(_NOTE[connection.dialect.name], entry._asdict()).one_or_none() is None:
        raise DoneElsewhere


def forget(connection: Connection, stream: str, group: str) -> int:
    """Delete all rows of a group; returns how many keys were known."""
    gone = connection.execute(delete(progress).where(progress.c.stream == stream, progress.c.group_name == group))
    connection.execute(delete(fence).where(fence.c.stream == stream, fence.c.group_name == group))
    return gone.rowcount


def _owner(connection: Connection, where: dict[str, Any]) -> Claim | None:
    found = connection.execute(_OWNER, where).one_or_none()
    return Claim(*found) if found is not None else None


def _check_owner(stored: Claim | None, mine: Claim) -> None:
    if stored != mine:
        raise Superseded(stored)


def _sqlite_has_begun(connection: Connection) -> bool:
    return bool(getattr(connection.connection.driver_connection, "in_transaction", True))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


# ---- the statements, built once: building them takes longer than running them ---------------------------

_SET_LIMITS = text(
    "SELECT set_config('lock_timeout', :lock, true), set_config('idle_in_transaction_session_timeout', :idle, true)"
)
_OF_PARTITION = and_(
    fence.c.stream == bindparam("stream"),
    fence.c.group_name == bindparam("group_name"),
    fence.c.partition == bindparam("partition"),
)
_OWNER = select(fence.c.revision, fence.c.pinned_ns, fence.c.member).where(_OF_PARTITION)
_OWNER_AND_PROGRESS = (
    select(fence.c.revision, fence.c.pinned_ns, fence.c.member, progress.c.sequence)
    .join_from(
        fence,
        progress,
        and_(
            progress.c.stream == fence.c.stream,
            progress.c.group_name == fence.c.group_name,
            progress.c.partition == fence.c.partition,
            progress.c.lane == bindparam("lane"),
        ),
        isouter=True,
    )
    .where(_OF_PARTITION)
    .with_for_update(read=True, of=fence)
)


def _claim_statement(insert: Any) -> Executable:
    row: postgresql.Insert = insert(fence)
    new = row.excluded
    is_newer = or_(
        fence.c.revision < new.revision,
        and_(
            fence.c.revision == new.revision,
            or_(fence.c.member != new.member, fence.c.pinned_ns < new.pinned_ns),
        ),
    )
    return row.values({column: bindparam(column.name) for column in fence.columns}).on_conflict_do_update(
        index_elements=list(fence.primary_key),
        set_={name: new[name] for name in ("revision", "pinned_ns", "member", "instance")},
        where=is_newer,
    )


def _note_statement(insert: Any) -> Executable:
    row: postgresql.Insert = insert(progress)
    return (
        row.values({column: bindparam(column.name) for column in progress.columns})
        .on_conflict_do_update(
            index_elements=list(progress.primary_key),
            set_={"sequence": row.excluded.sequence},
            where=progress.c.sequence < row.excluded.sequence,
        )
        .returning(progress.c.sequence)
    )


_INSERTS = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
_CLAIM = {name: _claim_statement(insert) for name, insert in _INSERTS.items()}
_NOTE = {name: _note_statement(insert) for name, insert in _INSERTS.items()}
