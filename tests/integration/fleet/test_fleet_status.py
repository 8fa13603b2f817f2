"""What `fleet.status` and `keylane fleet` say of a fleet at work."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import pytest

from keylane import fleet
from keylane.cli.fleet.render import lag_text
from keylane.errors import NoSuchFleet
from keylane.groups import GroupMessage
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround
from tests.waiter import until


async def test_how_far_behind_partitions_are_that_share_a_consumer(ground: FleetGround) -> None:
    go_on = asyncio.Event()
    handled = 0

    async def slow(message: GroupMessage) -> None:
        nonlocal handled
        if message.data == b"late":
            await go_on.wait()
        handled += 1

    await ground.shared(await ground.join("a", slow, layout="worker"))
    await ground.publish(KEYS)
    await until(lambda: handled, lambda count: count == len(KEYS))
    await ground.publish(KEYS * 2, data=b"late")
    found = await until(
        lambda: fleet.status(ground.connection, ground.stream, "f"), lambda seen: seen.lag == 2 * len(KEYS)
    )
    assert all((one.oldest_s is not None) == bool(one.lag) for one in found.partitions)
    assert {one.in_flight for one in found.partitions} == {None}  # nobody knows
    go_on.set()
    await until(lambda: fleet.status(ground.connection, ground.stream, "f"), lambda seen: seen.lag == 0)


async def test_who_owns_what_and_how_far_behind_it_is(limits: FleetGround) -> None:
    go_on = asyncio.Event()

    async def slow(message: GroupMessage) -> None:
        await go_on.wait()

    a, b = await limits.join("a", slow), await limits.join("b", slow)
    await limits.shared(a, b)
    await limits.publish(KEYS)
    found = await until(
        lambda: fleet.status(limits.connection, limits.stream, "f"),
        lambda seen: seen.lag == len(KEYS) and sum(one.in_flight or 0 for one in seen.partitions) == len(KEYS),
    )
    owned = {worker.id: worker.partitions for worker in (a, b)}
    assert {one.id: one.partitions for one in found.workers} == owned
    assert [one.is_leader for one in found.workers].count(True) == 1
    assert all(one.owner == one.assigned and one.token > 0 for one in found.partitions)
    assert all((one.oldest_s is not None) == bool(one.lag) for one in found.partitions)
    assert len(found.partitions) == PARTITIONS
    go_on.set()
    idle = await until(lambda: fleet.status(limits.connection, limits.stream, "f"), lambda seen: seen.lag == 0)
    assert all(one.oldest_s is None for one in idle.partitions)


async def test_the_commands(limits: FleetGround) -> None:
    worker = await limits.join("a")
    await limits.shared(worker)

    async def keylane(*arguments: str) -> str:
        command = [sys.executable, "-m", "keylane.cli.main", "fleet", *arguments, "-s", limits.url]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert {"stream": limits.stream, "fleet": "f"} in json.loads(await keylane("ls", "--json"))
    told = json.loads(await keylane("status", limits.stream, "f", "--json"))
    assert told["workers"][0]["id"] == "f-0"
    assert told["lag"] == 0
    text = await keylane("status", limits.stream, "f", "--partitions")
    assert "f-0" in text
    assert "0-7" in text


async def test_a_fleet_that_does_not_exist(limits: FleetGround) -> None:
    with pytest.raises(NoSuchFleet, match=r"has no fleet 'nothing'; there is: none"):
        await fleet.status(limits.connection, limits.stream, "nothing")


async def test_the_command_that_changes_the_number_of_partitions(limits: FleetGround) -> None:
    await limits.shared(await limits.join("a"))
    command = [sys.executable, "-m", "keylane.cli.main", "fleet", "repartition", limits.stream, "f", "12"]
    done = await asyncio.to_thread(
        subprocess.run, [*command, "-s", limits.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{limits.stream} / f has 12 partitions"
    assert "8 → 12 partitions" in done.stderr
    found = await fleet.status(limits.connection, limits.stream, "f")
    assert (found.change, len(found.partitions)) == (None, 12)


async def test_the_assignment_and_a_watch(limits: FleetGround) -> None:
    a, b = await limits.join("a"), await limits.join("b")
    await limits.shared(a, b)
    command = [sys.executable, "-m", "keylane.cli.main", "fleet"]
    end = [limits.stream, "f", "--json", "-s", limits.url]
    watch = await asyncio.create_subprocess_exec(*command, "status", "--watch", *end, stdout=asyncio.subprocess.PIPE)
    lines = watch.stdout
    assert lines is not None
    try:
        done = await asyncio.create_subprocess_exec(*command, "assignments", *end, stdout=asyncio.subprocess.PIPE)
        told = json.loads((await done.communicate())[0])
        assert told["workers"] == {worker.id: list(worker.partitions) for worker in (a, b)}
        assert (told["moving"], told["unassigned"]) == ([], [])

        shown: dict[str | None, tuple[str, list[str]]] = {}

        async def until_shown(**workers: tuple[str, list[str]]) -> None:
            async with asyncio.timeout(30):
                while shown != {worker.id: workers[name] for name, worker in (("a", a), ("b", b))}:
                    event = json.loads(await lines.readline())
                    if event["event"] == "worker":
                        shown[event["id"]] = (event["state"], event["partitions"])

        await until_shown(a=("live", list(a.partitions)), b=("live", list(b.partitions)))
        await b.stop()
        await until_shown(a=("live", [str(number) for number in range(PARTITIONS)]), b=("left", []))
        watch.send_signal(signal.SIGINT)
        assert await watch.wait() == 0
    finally:
        if watch.returncode is None:
            watch.kill()
            await watch.wait()


def test_an_unknown_lag_is_never_0() -> None:
    def partition(lag: int | None, oldest_s: float | None) -> fleet.PartitionStatus:
        return fleet.PartitionStatus(
            id="0", assigned=None, owner=None, token=0, lag=lag, in_flight=lag, oldest_s=oldest_s
        )

    assert lag_text([partition(None, None)]) == "unknown"
    assert lag_text([partition(5, 2.04), partition(None, None)]) == "5 and 1 partitions unknown"
    assert lag_text([partition(5, None)]) == "5, age unknown"
    assert lag_text([partition(5, 2.04), partition(0, None)]) == "5, oldest 2.0 s"
    assert lag_text([partition(0, None)]) == "0"
