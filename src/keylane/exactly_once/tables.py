"""keylane's three tables in the user's database: made where they are missing, refused where they are others."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, String, Table, Text, inspect, text

from keylane.errors import WrongTables

_metadata = MetaData()

progress = Table(
    "keylane_progress",
    _metadata,
    Column("stream", String(255), primary_key=True),
    Column("group_name", String(255), primary_key=True),
    Column("partition", Integer, primary_key=True, autoincrement=False),
    Column("lane", Text, primary_key=True),
    Column("sequence", BigInteger, nullable=False),
)
"""One row per key: the newest message of it whose effects are committed."""

fence = Table(
    "keylane_fence",
    _metadata,
    Column("stream", String(255), primary_key=True),
    Column("group_name", String(255), primary_key=True),
    Column("partition", Integer, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
    Column("pinned_ns", BigInteger, nullable=False),
    Column("member", String(255), nullable=False),
    Column("instance", String(255), nullable=False),
)
"""One row per partition: who owns it, as far as the database was told. `revision` counts on through all epochs."""

epoch = Table(
    "keylane_epoch",
    _metadata,
    Column("stream", String(255), primary_key=True),
    Column("group_name", String(255), primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("base", BigInteger, nullable=False),
    Column("bucket", String(64), nullable=False),
    Column("stream_created", String(64), nullable=False),
)
"""One row per group: the bucket whose revisions count now, and what is added to them, so that tokens always grow.
Version 0.1 had none: it is made beside the other two."""

_TABLES = (progress, fence, epoch)

_MAKING = 0x6B65796C616E65
"""PostgreSQL's advisory lock while tables are made: two that make one table at once would collide."""


def prepare(connection: Connection) -> None:
    """Make the tables that are missing and look at those that are there."""
    there = inspect(connection)
    if not all(there.has_table(table.name) for table in _TABLES):
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MAKING})
        _metadata.create_all(connection)
        there = inspect(connection)
    for table in _TABLES:
        _check(table, [str(column["name"]) for column in there.get_columns(table.name)])
        _check_key(table, there.get_pk_constraint(table.name)["constrained_columns"])


def _check(table: Table, found: list[str]) -> None:
    wanted = [column.name for column in table.columns]
    if set(found) != set(wanted):
        raise WrongTables(
            f"table {table.name!r} has the columns {', '.join(found)}; keylane's has {', '.join(wanted)}: rename or "
            "drop the table that is there, or give keylane another database or schema"
        )


def _check_key(table: Table, found: list[str]) -> None:
    wanted = [column.name for column in table.primary_key]
    if set(found) != set(wanted):
        raise WrongTables(
            f"table {table.name!r} has the primary key ({', '.join(found)}); keylane's has ({', '.join(wanted)}), and "
            "without it nothing is exactly once: drop the table, keylane makes it anew"
        )
