"""keylane's three tables in the user's database: created if missing, refused if they have other columns."""

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
"""One row per key: its newest message whose effects are committed."""

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
"""One row per partition: its newest owner known to the database. `revision` counts across all epochs."""

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
"""One row per group: the bucket whose revisions count now, and the number added to them, so that tokens always grow.
Version 0.1 did not have this table: it is created beside the other two."""

_TABLES = (progress, fence, epoch)

_MAKING = 0x6B65796C616E65
"""PostgreSQL's advisory lock while tables are created: concurrent creations of one table would collide."""


def prepare(connection: Connection) -> None:
    """Create the missing tables and check the existing ones."""
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
            "drop that table, or give keylane another database or schema"
        )


def _check_key(table: Table, found: list[str]) -> None:
    wanted = [column.name for column in table.primary_key]
    if set(found) != set(wanted):
        raise WrongTables(
            f"table {table.name!r} has the primary key ({', '.join(found)}); keylane's has ({', '.join(wanted)}), "
            "which exactly once needs: drop the table, and keylane creates it again"
        )
