"""What the command loads: only what it needs, because the start is most of what a short command takes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable

import pytest

import keylane
from keylane import Connection, groups
from keylane.cli.main import COMMANDS
from keylane.jetstream import StreamConfig, streams
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import DEADLINE_S, KEYLANE, here, plain_stream, run

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


async def test_the_list_of_commands_loads_none_of_them() -> None:
    loaded = {name for name in await loaded_by("--help") if name.startswith("keylane.")}
    assert loaded == {"keylane.cli", "keylane.cli.command", "keylane.cli.main", "keylane.errors", "keylane.lazy"}


async def test_json_loads_neither_drawings_nor_websockets_nor_other_commands(
    connection: Connection, nats_server: NatsServer, orders: str
) -> None:
    await groups.create_elastic(connection, orders, "g", partitions=2, partition_by=f"{orders}.*")
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


# ---- what every command has -------------------------------------------------------------------------------------


async def test_server_and_context_may_come_before_the_command(
    nats_server: NatsServer, orders: str, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("NATS_URL", f"nats://127.0.0.1:{free_port}")
    assert orders in (await here("-s", nats_server.url, "stream", "ls")).stdout
    assert (await here("-s", "nats://127.0.0.1:1", "stream", "ls", "-s", nats_server.url)).returncode == 0
    assert "nats context 'nope' is not in" in (await here("--context", "nope", "elastic", "ls")).refusal
    said = (await here("-s", nats_server.url, "elastic", "prompt", stdin=f"info {orders} nope\n")).stderr
    assert f"stream '{orders}' has no elastic group 'nope'" in said


async def test_connection_options_stand_apart_in_help() -> None:
    shown = (await here("elastic", "info", "--help")).stdout
    options, apart = shown.split("Connection options:")
    assert "--json" in options
    assert "--creds" in apart
    assert "--creds" not in options


@pytest.mark.parametrize("name", list(COMMANDS))
async def test_every_command_of_the_list_is_there(name: str) -> None:
    done = await here(name, "-h")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: keylane {name} ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_the_completion_script_of_a_shell_asks_the_command(shell: str) -> None:
    script = (await here("completion", shell)).stdout
    assert f"_KEYLANE_COMPLETE=complete_{shell}" in script


async def test_bash_completes_commands_options_and_streams(nats_server: NatsServer, orders: str) -> None:
    """As bash calls it: the words of the line, and which of them the cursor is in."""
    link = f"-s {nats_server.url}"
    for line, offered in {
        "keylane str": ["stream"],
        f"keylane {link} stream cr": ["create"],
        "keylane pub orders.a x --cou": ["--count"],
        f"keylane {link} elastic info {orders[:-3]}": [orders],
    }.items():
        words = line.split()
        asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_KEYLANE_COMPLETE": "complete_bash"}
        process = await asyncio.create_subprocess_exec(*KEYLANE, env=os.environ | asked, stdout=asyncio.subprocess.PIPE)
        stdout, _ = await process.communicate()
        assert stdout.decode().split() == offered, line


async def test_a_piped_prompt_that_failed_ends_with_exit_code_1(nats_server: NatsServer, orders: str) -> None:
    assert (await here("elastic", "prompt", "-s", nats_server.url, stdin=f"ls {orders}\nhelp\n")).returncode == 0
    for lines in (f"info {orders} nope\nls {orders}\n", "ls 'open\n", "nonsense\n", "ls NOT_THERE\nexit\n"):
        assert (await here("elastic", "prompt", "-s", nats_server.url, stdin=lines)).returncode == 1, lines


async def test_ls_without_a_stream_lists_the_groups_of_all(
    connection: Connection, nats_server: NatsServer, orders: str
) -> None:
    async with plain_stream(connection, f"{orders}-other") as other:
        for stream in (orders, other):
            await groups.create_elastic(connection, stream, "g", partitions=2, partition_by=f"{stream}.*")
        found = (await here("elastic", "ls", "--json", "-s", nats_server.url)).json["groups"]
        assert {(one["stream"], one["group"]) for one in found} >= {(orders, "g"), (other, "g")}
        shown = (await here("elastic", "ls", "-s", nats_server.url)).stdout
        assert orders in shown
        assert other in shown
    with NatsServer.start() as empty:
        assert (await here("static", "ls", "-s", empty.url)).stdout == "there are no static groups\n"
