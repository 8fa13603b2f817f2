"""What the command loads: only what it needs, because the start is most of what a short command takes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable

import pytest

import keylane
from keylane import Connection, groups
from keylane.jetstream import StreamConfig, streams
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import DEADLINE_S, plain_stream, run

pytestmark = pytest.mark.timeout(240)

REPORT = """
import sys
from keylane.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(sorted(sys.modules), file=sys.stderr)
"""


@pytest.fixture
async def orders(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    async with plain_stream(connection, unique("ORDERS")) as name:
        yield name


async def loaded_by(*arguments: str) -> set[str]:
    """The modules that a command has loaded at its end, without those that load themselves when used."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", REPORT, *arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE_S):
        _, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    return set(json.loads(stderr.decode().splitlines()[-1].replace("'", '"')))


@pytest.mark.parametrize("arguments", ["--help", "elastic --help", "elastic info --help", "--version"])
async def test_help_loads_neither_the_client_nor_drawings(arguments: str) -> None:
    assert not {"nats", "asyncio", "rich", "keylane.groups"} & await loaded_by(*arguments.split())


async def test_json_loads_neither_drawings_nor_websockets_nor_other_commands(
    connection: Connection, nats_server: NatsServer, orders: str
) -> None:
    await groups.create_elastic(connection, orders, "g", max_members=2, partitioning=[(f"{orders}.*", [1])])
    loaded = await loaded_by("elastic", "info", orders, "g", "--json", "-s", nats_server.url)
    assert {"nats", "keylane.cli.groups.elastic"} <= loaded
    assert not {"rich", "aiohttp.client", "keylane.cli.groups.static", "keylane.cli.server"} & loaded


async def test_a_websocket_loads_what_it_needs(free_port: int) -> None:
    pytest.importorskip("aiohttp", reason="websocket connections need aiohttp")
    with NatsServer.start(extra_config=f'websocket {{ host: "127.0.0.1", port: {free_port}, no_tls: true }}') as server:
        async with await keylane.connect(server.url) as connection:
            await streams.create(connection, StreamConfig(name="S", subjects=["s.*"]))
        at = ("-s", f"ws://127.0.0.1:{free_port}")
        done = await run("elastic", "create", "S", "g", "2", "s.*", "1", "--json", *at)
        assert done.json["max_members"] == 2
        assert "aiohttp.client" in await loaded_by("elastic", "ls", "S", "--json", *at)


async def test_a_misspelt_command_names_the_right_one() -> None:
    done = await run("elastc", "ls")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean 'elastic'?" in done.stderr
