"""`keylane static prompt` and `keylane elastic prompt` on a real terminal, and with lines from a pipe."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from keylane import Connection, groups
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import plain_stream, publish, run, terminal

pytestmark = pytest.mark.timeout(240)

CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
PROMPT = r"\[(elastic|static)\]> $"


@pytest.fixture
def at(nats_server: NatsServer) -> tuple[str, str]:
    return ("-s", nats_server.url)


class History:
    """The file that the prompt keeps its lines in."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def lines(self) -> list[str]:
        return self._path.read_text().splitlines()

    def write(self, text: str) -> None:
        self._path.parent.mkdir()
        self._path.write_text(text)


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return History(tmp_path / "keylane" / "prompt_history")


@pytest.fixture
async def orders(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    """A stream with an elastic group `billing` of members `alice` and `bob`."""
    async with plain_stream(connection, unique("ORDERS")) as stream:
        await groups.create_elastic(
            connection,
            stream,
            "billing",
            partitions=6,
            partition_by=f"{stream}.*",
            members=["alice", "bob"],
        )
        yield stream


async def names(connection: Connection, stream: str) -> list[str]:
    return [one.group for one in await groups.list_groups(connection, stream)]


async def test_a_session(connection: Connection, orders: str, at: tuple[str, str], history: History) -> None:
    """Completion, a drawing, a wrong line, a question, the other kind, and the history of it all."""
    async with terminal("elastic", "prompt", *at) as screen:
        await screen.until(PROMPT)
        screen.type(f"inf\t{orders} bil\t")
        await screen.until(r"info \S+ billing ")
        screen.type("\n")
        shown = await screen.until(PROMPT)
        assert re.search(r"alice +0-2 +absent +nobody", shown)
        screen.type(f"drop {orders} billing \t\t")
        await screen.until(r"alice +bob[\s\S]*drop \S+ billing ")  # the choice, and the line drawn anew below it
        screen.type("b\t\n")
        assert "billing: 3 of 6 partitions change hands" in await screen.until(PROMPT)

        screen.type("nonsense\n")
        assert "No such command 'nonsense'" in await screen.until(PROMPT)
        screen.type("info 'open\n")
        assert "keylane: No closing quotation in the line" in await screen.until(PROMPT)
        screen.type(f"info {orders} gone\n")
        assert "keylane: stream" in await screen.until(PROMPT)
        screen.type(f"delete {orders} billing\n")
        await screen.until(r"\[y/N\] $")
        screen.type("n\n")
        assert "nothing was deleted" in await screen.until(PROMPT)
        assert await names(connection, orders) == ["billing"]

        screen.type("static\n")
        await screen.until(r"\[static\]> $")
        screen.type(f"elastic info {orders} billing --json\n")
        assert '"group": "billing"' in await screen.until(PROMPT)
        screen.type("cre\tm\t")
        await screen.until("create mapped ")
        await screen.interrupt(r"\[static\]> $")
        screen.type("help\n")
        assert "create       Create a static group." in await screen.until(PROMPT)
        screen.type(CTRL_D)
        assert await screen.end() == 0
    kept = history.lines
    assert kept[0].split() == ["info", orders, "billing"]
    assert kept[-2:] == [f"elastic info {orders} billing --json", "help"]
    assert "n" not in kept  # an answer is no command


async def test_the_history_is_there_the_next_time(orders: str, at: tuple[str, str], history: History) -> None:
    history.write(f"ls {orders}\n")
    async with terminal("elastic", "prompt", *at) as screen:
        await screen.until(PROMPT)
        screen.type(f"ls {orders} --user ann --password secret\n")
        await screen.until(PROMPT)
        screen.type(f"{UP}\n")
        assert re.search(r"billing +6 .* 2 balanced: alice, bob", await screen.until(PROMPT))
        screen.type("exit\n")
        assert await screen.end() == 0
    assert history.lines == [f"ls {orders}", f"ls {orders}", "exit"]


async def test_consume_within_the_prompt_ends_with_ctrl_c(
    connection: Connection, orders: str, at: tuple[str, str], history: History
) -> None:
    await publish(connection, orders, 20)
    async with terminal("elastic", "prompt", *at) as screen:
        await screen.until(PROMPT)
        screen.type(f"consume {orders} billing alice --sleep 0\n")
        await screen.until("partition 0")
        screen.type(CTRL_C)
        assert "ended: stopped" in await screen.until(PROMPT)
        screen.type(f"member-info {orders} billing alice\n")
        assert re.search(r"partitions +0-2", await screen.until(PROMPT))
        screen.type("quit\n")
        assert await screen.end() == 0


async def test_lines_from_a_pipe(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    """No prompt between the answers, an error does not end it, and --json counts for every line."""
    lines = f"plan {orders} billing --add carol\n\nprompt\nnonsense\nadd {orders} billing carol\n"
    done = await run("elastic", "prompt", "--json", *at, stdin=lines)
    assert done.returncode == 1, "two of the lines were wrong"
    assert "keylane: this is the prompt already" in done.stderr
    assert "No such command 'nonsense'" in done.stderr
    decoder = json.JSONDecoder()
    plan, end = decoder.raw_decode(done.stdout)
    added, _ = decoder.raw_decode(done.stdout[end:].lstrip())
    assert plan["balanced"]["moves"] == added["moves"]
    assert (await groups.get_config(connection, orders, "billing")).has_member("carol")


async def test_completion_without_a_server_stays_quiet(history: History) -> None:
    with NatsServer.start() as server:
        url = server.url
    async with terminal("elastic", "prompt", "-s", url, "--timeout", "0.5") as screen:
        await screen.until(PROMPT)
        screen.type("info \tS\n")
        shown = await screen.until(PROMPT)
        assert "Traceback" not in shown
        assert "Missing argument 'GROUP'" in shown
        screen.type(CTRL_D)
        assert await screen.end() == 0
