"""`keylane doctor` as a user runs it: exit codes, JSON, and what a person reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from keylane import Connection, groups
from keylane.server import NatsServer
from tests.integration.cli.conftest import Done


async def test_nothing_to_do_is_exit_code_0(
    nats_server: NatsServer, stream: str, keylane_here: Callable[..., Done]
) -> None:
    done = await asyncio.to_thread(keylane_here, "doctor", stream, "-s", nats_server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing to do (1 not checked)" in done.stdout
    assert "? how often the server syncs to disk" in done.stdout


async def test_something_to_do_is_exit_code_1(
    nats_server: NatsServer, connection: Connection, stream: str, keylane_here: Callable[..., Done]
) -> None:
    await groups.create_elastic(connection, stream, "billing", partitions=4, partition_by=f"{stream}.*")
    try:
        done = await asyncio.to_thread(keylane_here, "doctor", stream, "billing", "-s", nats_server.url)
        assert done.returncode == 1
        assert f"✗ {stream}/billing  partitions 0-3 belong to no member" in done.stdout
        assert f"→ keylane elastic add {stream} billing MEMBER" in done.stdout
        done = await asyncio.to_thread(keylane_here, "doctor", stream, "--json", "-s", nats_server.url)
        assert done.returncode == 1
        wire = json.loads(done.stdout)
        assert [one["rule"] for one in wire["findings"]] == ["unowned-partitions"]
        assert wire["server"]["sync_s"] is None
        assert wire["unchecked"]
    finally:
        await groups.delete(connection, stream, "billing")


async def test_what_cannot_be_looked_at_is_exit_code_2(
    nats_server: NatsServer, stream: str, free_port: int, keylane_here: Callable[..., Done]
) -> None:
    for arguments, words in (
        (("doctor", "NOWHERE", "-s", nats_server.url), "there is no stream 'NOWHERE'"),
        (("doctor", stream, "nobody", "-s", nats_server.url), "has no group and no fleet 'nobody'"),
        (("doctor", "-s", f"nats://127.0.0.1:{free_port}", "--timeout", "1"), "no server could be reached"),
    ):
        done = await asyncio.to_thread(keylane_here, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
