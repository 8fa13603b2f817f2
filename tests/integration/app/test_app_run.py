"""`keylane run` as a user runs it: real processes, real signals, files that change."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from keylane import groups
from keylane.cli.app.worker import load_app
from keylane.errors import InvalidInput
from keylane.jetstream import Connection
from keylane.server import NatsServer
from tests.integration.app.test_app import PARTITIONS, make_stream, publish
from tests.integration.run_command import RunCommand, run_command
from tests.waiter import until

SHOP = """
import os
import keylane

app = keylane.App("nats://127.0.0.1:1")  # the command line says where the server is
evidence = os.open("evidence", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
VERSION = 1

@app.handler("STREAM", group="billing")
async def bill(order: bytes, message: keylane.Message) -> None:
    os.write(evidence, f"{message.key} {message.sequence} {VERSION}\\n".encode())

@app.handler("STREAM", group="mail")
def mail(order: bytes) -> None: ...

empty = keylane.App()
"""


def running(url: str, directory: Path, *options: str, app: str = "shop:app") -> AbstractAsyncContextManager[RunCommand]:
    return run_command(directory, "run", app, "-s", url, *options, stderr=asyncio.subprocess.PIPE)


async def test_workers_run_are_replaced_when_a_file_changes_and_stop(
    connection: Connection, nats_server: NatsServer, unique: Callable[..., str], tmp_path: Path
) -> None:
    stream = unique("app")
    await make_stream(connection, stream, partitions=PARTITIONS)
    source = SHOP.replace("STREAM", stream)
    (tmp_path / "shop.py").write_text(source)
    keys = [(str(number % 8), b"x") for number in range(80)]
    async with running(nats_server.url, tmp_path, "--workers", "2", "--reload") as command:
        await command.ready(2)
        sent = await publish(connection, stream, keys)
        await command.handled(sent)
        await until(
            lambda: {one["group"] for one in command.all("partitions")},
            lambda owned: owned == {f"{stream}/billing", f"{stream}/mail"},
        )
        (tmp_path / "shop.py").write_text(source.replace("VERSION = 1", "VERSION = 22"))
        await until(lambda: command.all("rolled"))
        assert [one["file"] for one in command.all("changed")] == [str(tmp_path / "shop.py")]
        sent += await publish(connection, stream, keys)
        verdict = await command.handled(sent)
        assert (verdict.lost, verdict.duplicated, verdict.out_of_order) == ((), (), ())
        assert [one.by for one in command.effects()] == ["1"] * 80 + ["22"] * 80
        (tmp_path / "shop.py").write_text("oh no(")  # the old ones go on
        await until(lambda: command.all("replacement_failed"))
        command.process.send_signal(signal.SIGTERM)
        assert await command.end() == 0
    assert {one["code"] for one in command.all("exited")} == {0}


async def test_lines_that_handlers_print_are_whole_and_shown_at_once(
    connection: Connection, nats_server: NatsServer, unique: Callable[..., str], tmp_path: Path
) -> None:
    stream = unique("app")
    await make_stream(connection, stream, partitions=PARTITIONS)
    printing = """print('{"event":', '"billed", "key":', f'"{message.key}"', "}")"""
    source = re.sub(r"os\.write\(evidence.*", lambda _: printing, SHOP.replace("STREAM", stream))
    (tmp_path / "shop.py").write_text(source)
    async with running(nats_server.url, tmp_path, "--workers", "2") as command:
        await command.ready(2)
        await publish(connection, stream, [(str(number % 8), b"x") for number in range(200)])
        await until(lambda: command.all("billed"), lambda lines: len(lines) == 200)


async def test_metrics_and_health_of_an_app(
    connection: Connection, nats_server: NatsServer, unique: Callable[..., str], tmp_path: Path
) -> None:
    stream = unique("app")
    await make_stream(connection, stream, partitions=PARTITIONS)
    (tmp_path / "shop.py").write_text(SHOP.replace("STREAM", stream))
    async with running(nats_server.url, tmp_path, "--metrics-port", "0") as command:
        await command.ready(1)
        [port] = [one["port"] for one in command.all("metrics")]

        async def get(path: str) -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = (await reader.read()).decode()
            writer.close()
            return answer

        assert "200" in (await get("/readyz")).splitlines()[0]
        found = await get("/metrics")
        assert 'fleet="billing"' in found
        assert 'fleet="mail"' in found
        assert 'keylane_supervisor_workers_ready{fleet="shop:app",stream=""} 1' in found


async def test_metrics_of_two_instances_of_a_member(
    connection: Connection, nats_server: NatsServer, unique: Callable[..., str], tmp_path: Path
) -> None:
    stream = unique("app")
    await make_stream(connection, stream)
    await groups.create_elastic(connection, stream, "g", partitions=4, partition_by=f"{stream}.*", members=["a"])
    (tmp_path / "shop.py").write_text(
        f"""
import keylane

app = keylane.App()

@app.handler("{stream}", group="g", member="a")
async def bill(order: bytes) -> None: ...
"""
    )
    async with running(nats_server.url, tmp_path, "--metrics-port", "0", "--workers", "2") as command:
        await command.ready(2)
        [port] = [one["port"] for one in command.all("metrics")]

        async def page() -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = (await reader.read()).decode()
            writer.close()
            return answer

        def processes(told: str) -> set[str]:
            return set(re.findall(r'keylane_member_partitions\{.*process="([^"]+)"', told))

        await until(page, lambda told: len(processes(told)) == 2, deadline_s=30)
    await groups.delete(connection, stream, "g")


async def test_what_is_wrong_is_one_line(nats_server: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP.replace("STREAM", "nowhere"))
    for app, words in (
        ("shop:bill", "name a keylane.App"),
        ("shop:app", "there is no stream 'nowhere'"),
    ):
        async with running(nats_server.url, tmp_path, app=app) as command:
            assert await command.end() in (1, 2)
            assert command.process.stderr is not None
            line = (await command.process.stderr.read()).decode().splitlines()[-1]
            assert words in line


def test_how_an_app_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_shop.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for app, words in (
        ("named_shop:ap", "module 'named_shop' has no 'ap'"),
        ("named_shop", "argument 'named_shop' names no app: write module:app, such as shop:app"),
        ("named_shop:empty", "app 'named_shop:empty' has no handlers"),
    ):
        with pytest.raises(InvalidInput, match=words):
            load_app(app)
