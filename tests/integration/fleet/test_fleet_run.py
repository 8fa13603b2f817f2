"""`keylane fleet run` as a user runs it: real processes, real signals, and the evidence of their handlers."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keylane import fleet
from keylane.cli.fleet.run import FleetRunOptions
from keylane.core.consumer_filters import SUBJECT_CAP
from keylane.core.fleet_records import FleetSpec
from keylane.metrics import METRICS
from tests.integration.fleet.rig import PARTITIONS, FleetGround
from tests.integration.groups.rig import flawless
from tests.integration.run_command import RunCommand, run_command
from tests.waiter import until

HANDLER = """
import os

evidence = os.open("evidence", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

async def handle(message):
    os.write(evidence, f"{message.key} {message.sequence} {os.getpid()}\\n".encode())

text = "no function"

async def two(message, other): ...
"""


def running(
    ground: FleetGround, directory: Path, *options: str, workers: int = 3
) -> AbstractAsyncContextManager[RunCommand]:
    (directory / "shop.py").write_text(HANDLER)
    hashed = ["--partitions", str(PARTITIONS), "--filter", f"{ground.stream}.*", "--key", "1"]
    fleet_run = ["fleet", "run", "shop:handle", ground.stream, "f", "--workers", str(workers)]
    return run_command(directory, *fleet_run, *hashed, "-s", ground.url, *options)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_sigterm_under_load_repeats_and_loses_nothing(limits: FleetGround, tmp_path: Path) -> None:
    async with running(limits, tmp_path) as command:
        await command.owned(PARTITIONS)
        async with limits.load() as sent:
            await until(lambda: len(command.effects()) > 400)
            command.process.send_signal(signal.SIGTERM)
            assert await command.end() == 0
        pids = command.pids()
        assert not any(map(is_running, pids.values()))
        assert [one["code"] for one in command.all("exited")] == [0, 0, 0]
    async with running(limits, tmp_path) as rest:
        verdict = await rest.handled(sent)
    assert flawless(verdict), verdict


async def test_a_killed_worker_is_started_again_with_its_id(limits: FleetGround, tmp_path: Path) -> None:
    async with running(limits, tmp_path, "--lease", "1") as command:
        await command.owned(PARTITIONS)
        async with limits.load() as sent:
            await until(lambda: len(command.effects()) > 200)
            ids = {one["worker"]: one["id"] for one in command.all("ready")}
            before = len(command.all("ready"))
            os.kill(command.pids()[1], signal.SIGKILL)
            await command.ready(before + 1)
            (exited,) = command.all("exited")
            assert (exited["worker"], exited["code"]) == (1, -9)
            assert "killed by SIGKILL" in exited["reason"]
            assert command.all("ready")[-1]["id"] == ids[1]
        verdict = await command.handled(sent)
        assert verdict.clean, verdict


@pytest.mark.long("kills a supervisor of several processes")
async def test_workers_drain_and_end_when_the_supervisor_is_killed(limits: FleetGround, tmp_path: Path) -> None:
    async with running(limits, tmp_path) as command:
        await command.owned(PARTITIONS)
        async with limits.load() as sent:
            await until(lambda: len(command.effects()) > 200)
            command.process.kill()
            await until(lambda: [pid for pid in command.pids().values() if is_running(pid)], lambda pids: not pids)
    async with running(limits, tmp_path) as rest:
        verdict = await rest.handled(sent)
    assert flawless(verdict), verdict


@pytest.mark.long("three processes are replaced, each when the one before is at work")
async def test_sighup_replaces_the_workers_one_by_one(limits: FleetGround, tmp_path: Path) -> None:
    async with running(limits, tmp_path) as command:
        await command.owned(PARTITIONS)
        before = command.pids()
        async with limits.load() as sent:
            await until(lambda: len(command.effects()) > 200)
            command.process.send_signal(signal.SIGHUP)
            await until(lambda: command.all("rolled"))
        after = command.pids()
        assert not before.items() & after.items()
        assert not any(map(is_running, before.values()))
        kinds = [(one["event"], one["worker"]) for one in command.events if one["event"] in ("exited", "ready")]
        assert kinds[-6:] == [("exited", 0), ("ready", 0), ("exited", 1), ("ready", 1), ("exited", 2), ("ready", 2)]
        verdict = await command.handled(sent)
        assert flawless(verdict), verdict


async def test_a_replacement_that_cannot_load_leaves_the_old_one_at_work(limits: FleetGround, tmp_path: Path) -> None:
    async with running(limits, tmp_path, workers=2) as command:
        await command.owned(PARTITIONS, 2)
        before = command.pids()
        (tmp_path / "shop.py").write_text("raise RuntimeError('half written')")
        command.process.send_signal(signal.SIGHUP)
        (failed,) = await until(lambda: command.all("replacement_failed"))
        assert "RuntimeError: half written" in failed["reason"]
        await until(lambda: command.all("rolling_stopped"))
        verdict = await command.handled(await limits.publish(["k1", "k2"]))
        assert verdict.clean
        assert all(map(is_running, before.values()))


@pytest.mark.long("a process is started again until it is a crash loop")
async def test_a_crash_loop_is_named_with_its_reason(limits: FleetGround, tmp_path: Path) -> None:
    async with running(limits, tmp_path, workers=1) as command:
        await command.ready(1)
        (tmp_path / "shop.py").write_text("import sys\nprint('out of beans', file=sys.stderr)\nsys.exit(7)")
        os.kill(command.pids()[0], signal.SIGKILL)
        loop = (await until(lambda: command.all("crash_loop")))[0]
        assert loop["failures"] == 3
        assert loop["code"] == 7
        assert "out of beans" in loop["reason"]
        assert loop["stderr"] == ["out of beans"]
        command.process.send_signal(signal.SIGINT)
        assert await command.end() == 0


async def test_a_second_signal_ends_everything_at_once(limits: FleetGround, tmp_path: Path) -> None:
    async with running(limits, tmp_path, workers=1) as command:
        await command.owned(PARTITIONS, 1)
        os.kill(command.pids()[0], signal.SIGSTOP)  # it cannot drain
        command.process.send_signal(signal.SIGTERM)
        await until(lambda: command.all("stopping"))
        command.process.send_signal(signal.SIGTERM)
        assert await command.end() == 130
        await until(lambda: not is_running(command.pids()[0]))


@pytest.mark.parametrize(
    ("handler", "stream", "error"),
    [
        ("shop", "", "handler 'shop' names no function: write module:function"),
        ("shoop:handle", "", "there is no module 'shoop' in "),
        ("shop:handel", "", "module 'shop' has no 'handel': did you mean 'handle'?"),
        ("shop:text", "", "handler 'shop:text' is 'no function': name a function of one message"),
        ("shop:two", "", "handler 'shop:two' cannot be called with one message"),
        ("broken:handle", "", "module 'broken' cannot be imported: ZeroDivisionError: division by zero ("),
        ("shop:handle", "nothing", "there is no stream 'nothing'; there is: "),
    ],
)
async def test_what_cannot_work_is_one_error(
    limits: FleetGround, tmp_path: Path, handler: str, stream: str, error: str
) -> None:
    (tmp_path / "shop.py").write_text(HANDLER)
    (tmp_path / "broken.py").write_text("1 / 0")
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "keylane.cli.main", "fleet", "run", handler, stream or limits.stream, "f"],
        *["--partitions", "8", "--filter", f"{limits.stream}.*", "--key", "1", "--workers", "4", "-s", limits.url],
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert process.returncode in {1, 2}
    (line,) = err.decode().splitlines()
    assert line.startswith(f"keylane: {error}")
    assert out.decode().count("started") <= 1


async def test_a_value_that_no_fleet_takes_is_one_error(limits: FleetGround, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(HANDLER)
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "keylane.cli.main", "fleet", "run", "shop:handle", limits.stream, "f"],
        *["--partitions", "8", "--filter", f"{limits.stream}.*", "--key", "1", "-s", limits.url, "--layout", "row"],
        cwd=tmp_path,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        _, err = await process.communicate()
    said = "keylane: layout is 'row': use one of partition, worker, auto\n"
    assert (process.returncode, err.decode()) == (2, said)


async def test_how_a_fleet_is_laid_out_commits_and_keeps_its_state(limits: FleetGround, tmp_path: Path) -> None:
    async with running(limits, tmp_path, "--acks", "prefix", "--state", "checkpointed", workers=1) as command:
        await command.ready(1)
        spec = await fleet.stored_spec(limits.connection, limits.stream, "f")
    assert spec is not None
    assert (spec.layout, spec.acks, spec.state) == ("partition", "prefix", "checkpointed")


def test_what_is_not_given_is_as_in_the_fleet() -> None:
    def chosen(options: FleetRunOptions, stored: FleetSpec | None) -> dict[str, object]:
        given = options.join_options(stored)
        return {name: given[name] for name in ("layout", "acks", "state", "lease_s") if name in given}

    stored = FleetSpec(source={}, lease_s=5.0, layout="worker", acks="message", state="replicated")
    assert chosen(FleetRunOptions(), None) == {"state": "auto"}
    assert chosen(FleetRunOptions(), stored) == {"layout": "worker", "acks": "message", "state": "auto", "lease_s": 5.0}
    other = FleetRunOptions(layout="partition", acks="prefix", state="checkpointed", lease=2.0)
    assert chosen(other, stored) == {"layout": "partition", "acks": "prefix", "state": "checkpointed", "lease_s": 2.0}


async def test_one_port_has_the_metrics_and_the_health_of_all_workers(limits: FleetGround, tmp_path: Path) -> None:
    options = ("--metrics-port", "0", "--metrics-host", "127.0.0.1", "--layout", "worker")
    async with running(limits, tmp_path, *options, workers=2) as command:
        await command.owned(PARTITIONS, 2)
        port = command.all("metrics")[0]["port"]
        sent = await limits.publish([f"k{number}" for number in range(40)])
        await command.handled(sent)

        async def samples(name: str) -> dict[str, float]:
            content = (await asyncio.to_thread(ask, port, "/metrics"))[1]
            families = text_string_to_metric_families(content)
            return {
                one.labels.get("worker", ""): one.value
                for family in families
                for one in family.samples
                if one.name == name
            }

        await until(lambda: samples("keylane_fleet_lag_messages"), lambda lag: lag == {"f-0": 0, "f-1": 0})
        assert sum((await samples("keylane_consumer_messages_total")).values()) == len(sent)
        assert sum((await samples("keylane_fleet_partitions")).values()) == PARTITIONS
        assert (await samples("keylane_supervisor_workers_ready")) == {"": 2}
        assert (await samples("keylane_consumer_subject_limit")) == {"f-0": SUBJECT_CAP, "f-1": SUBJECT_CAP}
        families = text_string_to_metric_families((await asyncio.to_thread(ask, port, "/metrics"))[1])
        there = {family.name.removesuffix("_total") for family in families if family.samples}
        wanted = {one.name.removesuffix("_total") for one in METRICS if one.labels[:2] == ("stream", "fleet")}
        assert there == {f"keylane_{name}" for name in wanted}, "in the catalogue, and set by nobody"
        code, body = await asyncio.to_thread(ask, port, "/readyz")
        assert (code, json.loads(body)["status"]) == (200, "ok")
        os.kill(command.pids()[1], signal.SIGSTOP)
        try:
            code, body = await asyncio.to_thread(ask, port, "/readyz")
            assert (code, json.loads(body)["degraded"]) == (503, ["worker 1: no answer"])
            assert len(await samples("keylane_fleet_partitions")) == 1  # not 0: absent
        finally:
            os.kill(command.pids()[1], signal.SIGCONT)


def ask(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()
