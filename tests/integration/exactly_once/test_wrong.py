"""What is wrong is said in one clear error, before anything is written."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any, cast

import pytest
from sqlalchemy import create_engine
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from keylane.errors import InvalidInput, WrongTables
from keylane.exactly_once import ExactlyOnce, ack_then_commit
from keylane.extras import install_command
from keylane.groups import GroupMessage
from tests.integration.exactly_once.rig import Database, Instance, write, write_plainly


class Exotic(SQLiteDialect_pysqlite):
    name = "exotic"
    supports_statement_cache = True


@pytest.mark.parametrize("engine", ["sqlite://", None, 7])
def test_no_engine(engine: object) -> None:
    for use in (lambda: ExactlyOnce(cast("Any", engine)), lambda: ack_then_commit(cast("Any", engine), write)):
        with pytest.raises(InvalidInput, match=r"engine is .*create_async_engine\(\) or create_engine\(\)"):
            use()


def test_another_database() -> None:
    registry.impls["exotic"] = lambda: Exotic
    engine = create_engine("exotic://")
    with pytest.raises(InvalidInput, match="'exotic': exactly once supports postgresql and sqlite"):
        ExactlyOnce(engine)
    engine.dispose()


async def test_effects_of_the_wrong_kind(on_sqlite: Database) -> None:
    with pytest.raises(InvalidInput, match="not a coroutine function, but the engine is asynchronous"):
        ExactlyOnce(on_sqlite.engine()).handler(write_plainly)
    with pytest.raises(InvalidInput, match="a coroutine function, but the engine is synchronous"):
        ExactlyOnce(on_sqlite.plain_engine()).session_handler(cast("Any", write))
    with pytest.raises(InvalidInput, match="effect is 'write': give a function"):
        ExactlyOnce(on_sqlite.engine()).handler(cast("Any", "write"))
    with pytest.raises(InvalidInput, match="a coroutine function, but the engine is synchronous"):
        ack_then_commit(cast("Any", on_sqlite.plain_engine()), write)


@pytest.mark.parametrize("name", ["lock_timeout_s", "idle_timeout_s"])
async def test_timeouts_that_are_none(on_sqlite: Database, name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        ExactlyOnce(on_sqlite.engine(), **{name: 0})


async def test_a_message_of_no_group(on_sqlite: Database) -> None:
    with pytest.raises(InvalidInput, match="has no origin"):
        await ExactlyOnce(on_sqlite.engine()).handler(write)(cast("GroupMessage", object()))


async def test_a_table_with_other_columns(database: Database) -> None:
    database.do("CREATE TABLE keylane_progress (topic TEXT PRIMARY KEY, at INTEGER)")
    with pytest.raises(WrongTables, match="'keylane_progress' has the columns topic, at; keylane's has stream, "):
        await ExactlyOnce(database.engine()).handler(write)(Instance(5, 100).message(1))
    assert database.rows() == []


async def test_a_table_without_its_key(database: Database) -> None:
    once = ExactlyOnce(database.engine())
    await once.create_tables()
    database.do("CREATE TABLE copied AS SELECT * FROM keylane_fence")
    database.do("DROP TABLE keylane_fence")
    database.do("ALTER TABLE copied RENAME TO keylane_fence")
    with pytest.raises(WrongTables, match=r"'keylane_fence' has the primary key \(\)"):
        await ExactlyOnce(database.engine()).create_tables()


async def test_many_that_make_the_tables_at_once(database: Database) -> None:
    await asyncio.gather(*(ExactlyOnce(database.engine()).create_tables() for _ in range(8)))
    assert database.ask("SELECT * FROM keylane_fence") == []


def test_without_sqlalchemy() -> None:
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sqlalchemy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import keylane, keylane.groups
try:
    import keylane.exactly_once
except keylane.groups.member.KeylaneError as error:
    print(type(error).__name__, isinstance(error, ImportError), error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert said.stdout.startswith("ExtraMissing True keylane.exactly_once needs SQLAlchemy")
    assert install_command("sql") in said.stdout


def test_importing_keylane_does_not_import_sqlalchemy() -> None:
    program = "import sys, keylane, keylane.groups; print('sqlalchemy' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert said.stdout.strip() == "False"
