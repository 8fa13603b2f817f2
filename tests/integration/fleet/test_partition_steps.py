"""What a worker asks the reader of one partition for, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from keylane.core.fleet_events import ChangeToken, ClosePartition, StartPartition
from keylane.fleet.worker import _PartitionRun

PIN_TRUST_S = 0.2


class Reader:
    """Says when it was asked for what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    def change_token(self, token: int) -> None:
        self.calls.append((f"change_token {token}", asyncio.get_running_loop().time()))

    def __getattr__(self, name: str) -> Any:
        async def call(*_: object, **__: object) -> None:
            self.calls.append((name, asyncio.get_running_loop().time()))

        return call


def new_run(core: Any, tasks: asyncio.TaskGroup, **processor: Any) -> _PartitionRun:
    run = _PartitionRun(
        core,
        SimpleNamespace(guard=lambda _guarded: None, **processor),  # type: ignore[arg-type]
        tasks,
        asyncio.Semaphore(),
        tell=lambda _event: None,
        over=lambda _run: None,
        started=lambda: None,
        opening=asyncio.Semaphore(),
        reads_copy=False,
        is_open=lambda: True,
        failed=lambda error: pytest.fail(str(error)),
        updated=lambda _seconds, _error: None,
    )
    run.partition = "0"
    return run


async def performed(*actions: Any) -> list[tuple[str, float]]:
    """What a reader was asked for, and when, in the order of a worker's actions."""

    async def closed() -> None:
        pass

    async with asyncio.TaskGroup() as tasks:
        run = new_run(SimpleNamespace(pin_trust_s=PIN_TRUST_S), tasks, close=closed)
        reader = Reader()
        run.reader = reader  # type: ignore[assignment]
        for action in (*actions, ClosePartition("0")):
            run.do(action)
        run.task = tasks.create_task(run.work())
    return reader.calls


async def test_a_takeover_by_force_starts_when_nobody_trusts_the_pin_of_before() -> None:
    """The owner before may have had its pin confirmed until it was cleared, and starts messages for so long."""
    (cleared, cleared_at), (started, started_at), _ = await performed(StartPartition("0", 7, force=True))
    assert (cleared, started) == ("take_pin", "start")
    assert started_at - cleared_at >= PIN_TRUST_S


async def test_a_partition_that_was_released_starts_without_a_look_at_its_pin() -> None:
    calls = await performed(StartPartition("0", 7), ChangeToken("0", 9))
    assert [call for call, _ in calls] == ["start", "change_token 9", "close"]


class Lease:
    """A lease whose deadline the test sets; the clock is the machine's."""

    def __init__(self) -> None:
        self.is_confirmed = True

    def is_sure(self, _now: float) -> bool:
        return self.is_confirmed


@pytest.mark.parametrize(("when", "trusted"), [("while the lease was sure", "mine"), ("after that", None)])
async def test_only_a_pin_from_before_an_outage_is_trusted_however_late_the_outage_is_noticed(
    when: str, trusted: str | None
) -> None:
    lease = Lease()
    core = SimpleNamespace(
        lease=lease, is_unconfirmed=lambda _now: not lease.is_confirmed, spec=SimpleNamespace(lease_s=3)
    )
    run = new_run(core, asyncio.TaskGroup())
    run.reader = SimpleNamespace(pin_id="mine")  # type: ignore[assignment]
    lease.is_confirmed = when == "while the lease was sure"
    run.pinned()
    lease.is_confirmed = False
    run.guard(True)
    assert run._trusted_pin == trusted
    run.guard(False)
    run.guard(True)
    assert run._trusted_pin == "mine"  # it was confirmed meanwhile
