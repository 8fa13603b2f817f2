"""Where plain functions run: in as many threads as may run at once, or in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from keylane.dead_letters import list_dead_letters
from keylane.errors import HandlerCrashed, HandlerProcessDied, InvalidInput, RemoteError
from keylane.groups import GroupMessage, Member, MemberHooks
from keylane.jetstream import ConsumerConfig, Outgoing, publish_many
from tests.integration.groups import process_handlers
from tests.integration.groups.rig import Ground
from tests.integration.odd_handlers import Odd
from tests.waiter import until

CALM = ConsumerConfig(ack_wait_s=20.0)


# ---- threads --------------------------------------------------------------------------------------------


async def test_as_many_threads_as_concurrency(ground: Ground) -> None:
    """asyncio's own pool has 6 of them on two cores."""
    await ground.elastic(members=["a"])
    together = threading.Barrier(20)

    def handler(_: GroupMessage) -> None:
        together.wait(20)

    await ground.join("a", handler, concurrency=20, settings=CALM)
    await ground.publish(f"k{number}" for number in range(20))
    await ground.drained(20)
    assert not together.broken


async def test_no_more_threads_than_concurrency_and_none_are_left(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    most, now, lock = [0], [0], threading.Lock()

    def handler(_: GroupMessage) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        threading.Event().wait(0.02)
        with lock:
            now[0] -= 1

    one = await ground.join("a", handler, concurrency=3, settings=CALM)
    await ground.publish(f"k{number}" for number in range(20))
    await ground.drained(20)
    assert most == [3]
    await one.stop()
    await until(
        lambda: not [one for one in threading.enumerate() if one.name.startswith("keylane-handler")], deadline_s=5
    )


# ---- processes ------------------------------------------------------------------------------------------


class Work:
    """Messages for handlers in other processes, and what those did."""

    def __init__(self, ground: Ground, file: Path) -> None:
        self.ground = ground
        self.failures: list[tuple[int, BaseException]] = []
        self._file = file
        file.touch()

    async def send(self, *what: tuple[str, str]) -> list[int]:
        """Each a key and what is to be done."""
        headers = {"File": str(self._file)}
        outgoing = [Outgoing(f"{self.ground.stream}.{key}", do.encode(), headers) for key, do in what]
        return [ack.sequence for ack in await publish_many(self.ground.connection, outgoing)]  # type: ignore[union-attr]

    async def join(self, handler: Callable[[GroupMessage], Any] = process_handlers.work, **options: Any) -> Member:
        def failed(message: GroupMessage, error: BaseException, _: int) -> None:
            self.failures.append((message.sequence, error))

        options = {"settings": CALM, "hooks": MemberHooks(on_failure=failed), "executor": "process", **options}
        return await self.ground.join("a", handler, **options)

    @property
    def lines(self) -> list[tuple[int, str, int, str]]:
        """Process, key, sequence, and more, in the order of the effects."""
        found = [line.split(" ", 3) for line in self._file.read_text().splitlines()]
        return [(int(pid), key, int(sequence), more) for pid, key, sequence, more in found]

    def sequences(self, key: str) -> list[int]:
        return [sequence for _, of, sequence, _ in self.lines if of == key]

    @property
    def processes(self) -> set[int]:
        return {pid for pid, *_ in self.lines}


@pytest.fixture
async def jobs(ground: Ground, tmp_path: Path) -> Work:
    await ground.elastic(members=["a"])
    return Work(ground, tmp_path / "done")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def test_processes_work_at_once_and_keep_the_order_of_each_key(jobs: Work) -> None:
    sent = await jobs.send(*((f"k{number % 3}", "") for number in range(60)))
    one = await jobs.join(concurrency=2)
    await jobs.ground.drained(60)
    for number in range(3):
        assert jobs.sequences(f"k{number}") == sent[number::3]
    assert os.getpid() not in jobs.processes
    await jobs.send(("k1", "slowly"), ("k2", "slowly"), ("k3", "slowly"))
    await jobs.ground.drained(63)
    assert len(jobs.processes) == min(2, len(os.sched_getaffinity(0)))
    await one.stop()
    assert not [pid for pid in jobs.processes if is_running(pid)]


async def test_a_message_in_another_process_reads_as_here(jobs: Work) -> None:
    [sequence] = await jobs.send(("k1", "hello"))
    await jobs.join(process_handlers.describe)
    await jobs.ground.drained(1)
    [(_, key, done, told)] = jobs.lines
    assert (key, done) == ("k1", sequence)
    seen = json.loads(told)
    assert seen["subject"] == f"{jobs.ground.stream}.k1"
    assert (seen["data"], seen["sequence"], seen["delivered_count"]) == ("hello", 1, 1)
    assert seen["headers"]["File"].endswith("done")
    assert seen["timestamp"].endswith("+00:00")
    assert seen["member"] == f"{jobs.ground.stream}/g/a"
    assert f"partition={seen['partition']} sequence=1" in seen["repr"]


DIED = "the process of the handler (exit code %d) ended before the handler was done"
FAILURES = {
    "raise": (ValueError, "in the other process"),
    "raise unsendable": (RemoteError, "Unsendable: 1 and 2"),
    "ack": (InvalidInput, "a handler in another process cannot settle its message: return, or raise"),
    "die": (HandlerProcessDied, DIED % -signal.SIGKILL),
    "exit": (HandlerProcessDied, DIED % 3),
}


async def test_a_failure_there_is_a_failure_of_its_message_here(jobs: Work) -> None:
    """And of no other: not of what was at work in other processes."""
    keys = {f"k{number}": do for number, do in enumerate(FAILURES)}
    sent = await jobs.send(*keys.items(), ("good", "slowly"), *((key, "") for key in keys), ("good", "slowly"))
    await jobs.join(concurrency=2)
    await jobs.ground.drained(len(sent))
    failed = dict(zip(sent, keys.values(), strict=False))
    assert {failed[sequence]: (type(error), str(error)) for sequence, error in jobs.failures} == FAILURES
    assert len(jobs.failures) == len(FAILURES)
    for number, key in enumerate([*keys, "good"]):
        assert jobs.sequences(key) == [sent[number], sent[number + 6]]
    [error] = [error for _, error in jobs.failures if type(error) is ValueError]
    assert 'raise ValueError("in the other process")' in str(error.__cause__)


async def test_a_dead_letter_has_the_traceback_of_the_other_process(jobs: Work) -> None:
    await jobs.send(("bad", "raise"))
    await jobs.join(max_tries=1)
    await jobs.ground.drained(1)
    [letter] = [one async for one in list_dead_letters(jobs.ground.connection, jobs.ground.stream)]
    assert 'raise ValueError("in the other process")' in letter.traceback
    assert letter.traceback.endswith("\nValueError: in the other process")


async def test_what_is_no_exception_there_ends_the_member_here(jobs: Work) -> None:
    await jobs.send(("bad", "odd"))
    one = await jobs.join()
    with pytest.raises(HandlerCrashed) as crash:
        async with asyncio.timeout(10):
            await one.wait()
    assert isinstance(crash.value.__cause__, Odd)


async def test_a_time_limit_ends_the_process(jobs: Work) -> None:
    sent = await jobs.send(("k", "hang"), ("k", ""))
    await jobs.join(time_limit_s=0.5)
    await jobs.ground.drained(2)
    [(sequence, error)] = jobs.failures
    assert (sequence, type(error)) == (sent[0], TimeoutError)
    assert jobs.sequences("k") == [sent[0], sent[0], sent[1]]
    hung = jobs.lines[0][0]
    await until(lambda: not is_running(hung), deadline_s=20)


async def test_a_member_that_stops_leaves_no_process(jobs: Work) -> None:
    """Also if one hangs."""
    await jobs.send(("k", "hang"))
    one = await jobs.join()
    await until(lambda: jobs.lines, deadline_s=10)
    async with asyncio.timeout(10):
        await one.stop(timeout_s=0.1)
    [hung] = jobs.processes
    assert not is_running(hung)


async def double(_: GroupMessage) -> None:
    """No plain function."""


@pytest.mark.parametrize(
    ("handler", "options", "words"),
    [
        (lambda _: None, {}, "cannot be sent to another process"),
        (double, {}, "an async function: executor='process' is for plain functions"),
        (process_handlers.work, {"manual_ack": True}, "manual_ack needs the handler in this process"),
        (process_handlers.work, {"executor": "rocket"}, "executor is 'rocket': use one of thread, process"),
    ],
)
async def test_what_cannot_run_there_is_refused_at_join(
    jobs: Work, handler: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        await jobs.join(handler, **options)


PROGRAM = """
import asyncio, sys, keylane
from keylane import groups
from tests.integration.groups.process_handlers import leave, work

async def main(url, stream):
    async with await keylane.connect(url) as connection:
        member = await groups.join(connection, stream, "g", "a", {handler}, executor="process")
        print("joined", flush=True)
        await member.wait()

{guard}asyncio.run(main(*sys.argv[1:]))
"""
GUARD = "if __name__ == '__main__': "


def program(file: Path, handler: str, guard: str) -> Path:
    file.write_text(textwrap.dedent(PROGRAM.format(handler=handler, guard=guard)))
    return file


async def start(jobs: Work, file: Path, handler: str, guard: str = GUARD) -> asyncio.subprocess.Process:
    paths = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).parents[3])])
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program(file, handler, guard)), str(jobs.ground.url), jobs.ground.stream,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip

    async def end() -> None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    jobs.ground.stack.push_async_callback(end)
    return process


async def test_a_program_that_is_killed_leaves_no_process(jobs: Work, tmp_path: Path) -> None:
    process = await start(jobs, tmp_path / "program.py", "work")
    await jobs.send(("k", "hang"))
    await until(lambda: jobs.lines, deadline_s=20)
    [hung] = jobs.processes
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await until(lambda: not is_running(hung), deadline_s=20)


async def test_a_handler_there_can_end_the_program(jobs: Work, tmp_path: Path) -> None:
    process = await start(jobs, tmp_path / "program.py", "leave")
    await jobs.send(("k", ""))
    async with asyncio.timeout(20):
        assert await process.wait() == 5


async def test_a_program_that_cannot_be_imported_is_told_at_join(jobs: Work, tmp_path: Path) -> None:
    process = await start(jobs, tmp_path / "program.py", "work", guard="")
    async with asyncio.timeout(20):
        out, said = await process.communicate()
    assert out == b""
    assert process.returncode == 1
    assert b"HandlerProcessDied: the process of the handler (exit code 1) could not start." in said
    assert b"needs `if __name__ == '__main__':`" in said
