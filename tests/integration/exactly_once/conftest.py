"""Fixtures for the tests of exactly once: a PostgreSQL for the run, a database and a stream for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import psycopg
import pytest

import keylane
from keylane.server import NatsServer
from tests.integration.exactly_once.postgres import find_postgres, postgres
from tests.integration.exactly_once.rig import Database
from tests.integration.groups.rig import Ground, make_ground
from tests.peers.presence import require


@pytest.fixture(scope="session")
def postgres_at() -> Iterator[str]:
    require(find_postgres)
    with postgres() as at:
        yield at


def _new_database(at: str, name: str) -> Database:
    with psycopg.connect(f"postgresql://{at}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return Database("postgresql", f"{at}/{name}")


@pytest.fixture
async def databases() -> AsyncIterator[list[Database]]:
    """Those of the test. Their connections are closed last, after the members that use them have stopped."""
    made: list[Database] = []
    yield made
    for one in made:
        await one.dispose()


@pytest.fixture
async def on_postgres(postgres_at: str, databases: list[Database], unique: Callable[..., str]) -> Database:
    """A database of its own on a real PostgreSQL."""
    made = _new_database(postgres_at, unique("once"))
    databases.append(made)
    made.make_effects()
    return made


@pytest.fixture
async def on_sqlite(databases: list[Database], tmp_path: Path) -> Database:
    made = Database("sqlite", str(tmp_path / "once.db"))
    databases.append(made)
    made.make_effects()
    return made


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.long("again, on SQLite")), "postgresql"])
def database(request: pytest.FixtureRequest) -> Database:
    """The same test on both; `make test` has PostgreSQL, on which more can happen at once."""
    found: Database = request.getfixturevalue("on_sqlite" if request.param == "sqlite" else "on_postgres")
    return found


@pytest.fixture
async def ground(
    nats_server: NatsServer, databases: list[Database], unique: Callable[..., str]
) -> AsyncIterator[Ground]:
    """A stream in memory on the server of the run. Ends before `databases`."""
    assert databases is not None
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(await keylane.connect(nats_server.url))
        yield await make_ground(stack, connection, unique("once"), nats_server.url)
