"""The statements of exactly once, each a step within one transaction.

A partition has one owner at a time, by its row in `keylane_fence`. A transaction of the owner holds that row with a
shared lock until it ends. So an owner's transactions run concurrently, and a new owner's claim (an update of the row)
waits for those of the old owner and refuses all later ones. Plain functions on a SQLAlchemy connection.

Tokens are the revisions of a KV bucket, and a bucket can be recreated or restored. So the database counts epochs, one
for each bucket that it meets: in each, revisions are added to the highest token of the earlier epochs. A claim holds
the group's row in `keylane_epoch` with a shared lock; a new epoch takes an exclusive one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, bindparam, delete, func, or_, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import Executable

from keylane.errors import InvalidInput, StreamMadeAnew
from keylane.exactly_once.fencing import Epoch, FenceClaim, LedgerEntry
from keylane.exactly_once.tables import epoch, fence, progress
from keylane.groups import GroupSource

_ANY = ""
"""Replaces a bucket's or stream's creation time: an operator has accepted the current one."""


class Superseded(Exception):
    """The partition's row is not the one that this instance wrote. Never leaves this package."""

    def __init__(self, stored: FenceClaim | None) -> None:
        super().__init__(stored)
        self.stored = stored


class EpochChanged(Exception):
    """The group's tokens now count from another base: ask the server again. Never leaves this package."""


class DoneElsewhere(Exception):
    """Another transaction has done the message meanwhile: roll back. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long our transactions may block others. PostgreSQL enforces the limits, even against a frozen process."""

    lock_s: float
    idle_s: float

    def begin(self, connection: Connection) -> None:
        """Call this first in every transaction."""
        if connection.dialect.name == "postgresql":
            connection.execute(_SET_LIMITS, {"lock": f"{_ms(self.lock_s)}ms", "idle": f"{_ms(self.idle_s)}ms"})
        else:
            # SQLite's default transaction starts as a reader, and two readers that want to write end in an error.
            if _sqlite_has_begun(connection):
                connection.exec_driver_sql("ROLLBACK")  # the engine began a transaction; it is still empty
            connection.exec_driver_sql("BEGIN IMMEDIATE")


def check_dialect(name: str) -> None:
    if name not in _CLAIM:
        raise InvalidInput(f"the engine's database is {name!r}: exactly once supports {' and '.join(_CLAIM)}")


def current_epoch(connection: Connection, stream: str, group: str) -> Epoch | None:
    found = connection.execute(_EPOCH, {"stream": stream, "group_name": group}).one_or_none()
    return Epoch(*found) if found is not None else None


def highest_sequence(connection: Connection, stream: str, group: str) -> int:
    """The highest sequence of all messages that are done."""
    found = connection.execute(_HIGHEST_SEQUENCE, {"stream": stream, "group_name": group}).scalar_one()
    return int(found)


def begin_epoch(
    connection: Connection, names: tuple[str, str], seen: Epoch | None, done: int, source: GroupSource
) -> bool:
    """Begin an epoch with this bucket, unless somebody did so since `seen`; returns whether this call did it.

    `source` was requested after `seen` and the highest sequence `done` were read, so it is newer. Its tokens begin
    above all earlier ones. A database of version 0.1 has tokens and no epoch: if the bucket's revisions are not below
    them, they continue.
    """
    stream, group = names
    where = {"stream": stream, "group_name": group}
    if seen is not None and connection.execute(_EPOCH_TO_CHANGE, {**where, "seen": seen.number}).one_or_none() is None:
        return False
    highest, pinned_ns = connection.execute(_HIGHEST_TOKEN, where).one()
    _check_stream(names, seen, done, source, pinned_ns)
    base = highest if seen is not None or source.revision < highest else 0
    row = {
        **where,
        "number": seen.number + 1 if seen is not None else 1,
        "base": base,
        "bucket": source.bucket,
        "stream_created": source.stream_created,
    }
    if seen is not None:
        connection.execute(epoch.update().where(epoch.c.stream == stream, epoch.c.group_name == group), row)
        return True
    return connection.execute(_FIRST_EPOCH[connection.dialect.name], row).rowcount == 1


def accept(connection: Connection, stream: str, group: str) -> bool:
    """Let the next claim accept bucket and stream as they are then; False if the group has no rows."""
    where = {"stream": stream, "group_name": group}
    if not connection.execute(_HIGHEST_TOKEN, where).one()[0]:
        return False
    row = {**where, "number": 1, "base": 0, "bucket": _ANY, "stream_created": _ANY}
    connection.execute(_ACCEPT[connection.dialect.name], row)
    return True


def _check_stream(names: tuple[str, str], seen: Epoch | None, done: int, source: GroupSource, pinned_ns: int) -> None:
    """Without this check, messages of another stream would count as done by their sequence, and be skipped silently."""
    if not source.stream_created or (seen is not None and seen.bucket == _ANY):
        return
    if seen is not None:
        check_same_stream(names, seen, source)
    elif done and source.stream_created_ns > pinned_ns:  # version 0.1 stored the time of the last pin only
        raise _made_anew(names, f"it was created at {source.stream_created}, after the last of them")
    check_has_done(names, done, source)


def check_has_done(names: tuple[str, str], done: int, source: GroupSource) -> None:
    """Raise `StreamMadeAnew` if the stream has fewer messages than are done."""
    if source.stream_created and source.last_sequence < done:
        raise _made_anew(names, f"its last sequence is {source.last_sequence}, and sequence {done} is done")


def check_same_stream(names: tuple[str, str], seen: Epoch, source: GroupSource) -> None:
    if source.stream_created and source.stream_created != seen.stream_created:
        was = f"created at {seen.stream_created}" if seen.stream_created else "missing"
        raise _made_anew(names, f"it was created at {source.stream_created}, and the earlier one was {was}")


def _made_anew(names: tuple[str, str], sign: str) -> StreamMadeAnew:
    stream, group = names
    return StreamMadeAnew(
        f"stream {stream!r} is not the one whose messages the database knows ({sign}): its messages would be taken for "
        f"done. For a new stream, forget the old one: keylane exactly-once forget {stream} {group} --database URL. For "
        f"a copy with the same sequences: keylane exactly-once accept {stream} {group} --database URL"
    )


def claim(connection: Connection, entry: LedgerEntry, mine: FenceClaim, number: int, instance: str) -> None:
    """Take the partition. Raises `Superseded` if a newer owner has it, and `EpochChanged` if this epoch is over.

    Newer is a later revision of the group, or within one revision a later pin of the same member. Pins of two members
    belong to two consumers and cannot be compared. There the later claim is right, because the server gives a partition
    to a member only after the other one has released it.
    """
    where = {"stream": entry.stream, "group_name": entry.group_name, "partition": entry.partition}
    if connection.execute(_EPOCH_TO_CLAIM, where).scalar_one_or_none() != number:
        raise EpochChanged
    if _owner(connection, where) == mine:
        return  # the statement below would wait for our own effects, even if it changed nothing
    connection.execute(_CLAIM[connection.dialect.name], {**where, **mine._asdict(), "instance": instance})
    _check_owner(_owner(connection, where), mine)


def newest_done(connection: Connection, entry: LedgerEntry, mine: FenceClaim) -> int:
    """The newest message of the key that is done; 0 if none is. Raises `Superseded` if the partition is not ours."""
    where = {
        "stream": entry.stream,
        "group_name": entry.group_name,
        "partition": entry.partition,
        "lane": entry.lane,
    }
    found = connection.execute(_OWNER_AND_PROGRESS, where).one_or_none()
    _check_owner(FenceClaim(*found[:3]) if found is not None else None, mine)
    assert found is not None
    return found.sequence or 0


def note(connection: Connection, entry: LedgerEntry) -> None:
    """Record the message as done. Raises `DoneElsewhere` if another transaction did so meanwhile.

    Call it after the effect: it detects an effect that hid a database error and so lost its transaction.
    """
    lost_quietly = connection.dialect.name == "sqlite" and not _sqlite_has_begun(connection)
    if lost_quietly or not connection.in_transaction():
        raise InvalidInput(
            f"the effect of sequence {entry.sequence} ended the transaction that it was given: let keylane commit, and "
            "let errors of the database propagate"
        )
    if connection.execute(_NOTE[connection.dialect.name], entry._asdict()).one_or_none() is None:
        raise DoneElsewhere


def forget(connection: Connection, stream: str, group: str) -> int:
    """Delete all rows of a group; returns how many keys were known."""
    gone = connection.execute(delete(progress).where(progress.c.stream == stream, progress.c.group_name == group))
    connection.execute(delete(fence).where(fence.c.stream == stream, fence.c.group_name == group))
    connection.execute(delete(epoch).where(epoch.c.stream == stream, epoch.c.group_name == group))
    return gone.rowcount


def _owner(connection: Connection, where: dict[str, Any]) -> FenceClaim | None:
    found = connection.execute(_OWNER, where).one_or_none()
    return FenceClaim(*found) if found is not None else None


def _check_owner(stored: FenceClaim | None, mine: FenceClaim) -> None:
    if stored != mine:
        raise Superseded(stored)


def _sqlite_has_begun(connection: Connection) -> bool:
    return bool(getattr(connection.connection.driver_connection, "in_transaction", True))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


# ---- statements, built once, because building takes longer than running them ----------------------------

_SET_LIMITS = text(
    "SELECT set_config('lock_timeout', :lock, true), set_config('idle_in_transaction_session_timeout', :idle, true)"
)
_OF_PARTITION = and_(
    fence.c.stream == bindparam("stream"),
    fence.c.group_name == bindparam("group_name"),
    fence.c.partition == bindparam("partition"),
)
_OF_GROUP = and_(epoch.c.stream == bindparam("stream"), epoch.c.group_name == bindparam("group_name"))
_EPOCH = select(epoch.c.number, epoch.c.base, epoch.c.bucket, epoch.c.stream_created).where(_OF_GROUP)
_EPOCH_TO_CLAIM = select(epoch.c.number).where(_OF_GROUP).with_for_update(read=True)
_EPOCH_TO_CHANGE = select(epoch.c.number).where(_OF_GROUP, epoch.c.number == bindparam("seen")).with_for_update()
_HIGHEST_TOKEN = select(
    func.coalesce(func.max(fence.c.revision), 0), func.coalesce(func.max(fence.c.pinned_ns), 0)
).where(fence.c.stream == bindparam("stream"), fence.c.group_name == bindparam("group_name"))
_HIGHEST_SEQUENCE = select(func.coalesce(func.max(progress.c.sequence), 0)).where(
    progress.c.stream == bindparam("stream"), progress.c.group_name == bindparam("group_name")
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


def _epoch_statement(insert: Any, otherwise: dict[str, Any] | None = None) -> Executable:
    """Insert a group's first epoch; leave an existing one as it is, or update these columns of it."""
    row: postgresql.Insert = insert(epoch)
    row = row.values({column: bindparam(column.name) for column in epoch.columns})
    key = list(epoch.primary_key)
    if otherwise is None:
        return row.on_conflict_do_nothing(index_elements=key)
    return row.on_conflict_do_update(index_elements=key, set_=otherwise)


_INSERTS = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
_CLAIM = {name: _claim_statement(insert) for name, insert in _INSERTS.items()}
_FIRST_EPOCH = {name: _epoch_statement(insert) for name, insert in _INSERTS.items()}
_ACCEPT = {
    name: _epoch_statement(insert, {"number": epoch.c.number + 1, "bucket": _ANY}) for name, insert in _INSERTS.items()
}
_NOTE = {name: _note_statement(insert) for name, insert in _INSERTS.items()}
