"""What a handler raises that cannot count as a failed try ends its member, with the reason, and nothing waits."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from keylane.errors import HandlerCrashed
from keylane.groups import GroupMessage, Member, MemberHooks
from keylane.jetstream import ConsumerConfig
from tests.integration.groups.conftest import MakeGround
from tests.integration.groups.rig import Ground, flawless
from tests.integration.odd_handlers import Odd

CRASHES: dict[str, Callable[[], BaseException]] = {
    "own class": lambda: Odd("no Exception"),
    "GeneratorExit": GeneratorExit,
    "in a group": lambda: BaseExceptionGroup("children", [ValueError("one"), Odd("two")]),
}


async def ended(member: Member) -> HandlerCrashed:
    with pytest.raises(HandlerCrashed) as crash:
        async with asyncio.timeout(5):
            await member.wait()
    return crash.value


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("what", CRASHES)
async def test_the_member_ends_with_its_reason_and_another_has_the_message(
    ground: Ground, what: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    await ground.elastic(members=["a"])
    sent = await ground.publish(["bad", "good", "bad", "good", "bad"])
    told: list[tuple[int, BaseException, int]] = []
    reasons: list[str] = []

    def plain(message: GroupMessage) -> None:
        if message.key == "bad":
            raise CRASHES[what]()

    async def handler(message: GroupMessage) -> None:
        plain(message)

    hooks = MemberHooks(
        on_failure=lambda message, error, tries: told.append((message.sequence, error, tries)),
        on_ended=reasons.append,
    )
    with caplog.at_level(logging.ERROR, "keylane.groups"):
        one = await ground.join("a", handler if kind == "async" else plain, hooks=hooks, concurrency=4)
        crash = await ended(one)
    assert type(crash.__cause__) is type(CRASHES[what]())
    assert str(crash).startswith(f"member 'a' of {ground.stream}/g has ended: the handler raised ")
    assert type(crash.__cause__).__name__ in str(crash)
    assert [(sequence, tries) for sequence, _, tries in told] == [(sent[0], 1)]
    assert told[0][1] is crash.__cause__
    assert reasons == [str(crash)]
    [record] = [one for one in caplog.records if one.name == "keylane.groups"]
    assert record.exc_info is not None
    assert record.exc_info[1] is crash.__cause__
    begin = time.monotonic()
    await one.stop()
    assert time.monotonic() - begin < 1
    await ground.join("a")
    await ground.evidence.all_of([one for one in sent if one not in (sent[1], sent[3])], 10)
    assert ground.evidence.verdict(sent).out_of_order == ()
    await ground.drained(len(sent))


async def test_nothing_more_starts_and_what_is_at_work_may_finish(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    sent = await ground.publish(["slow", "bad", "bad", "slow", "later"])
    started = asyncio.Event()
    began: list[int] = []

    async def handler(message: GroupMessage) -> None:
        began.append(message.sequence)
        if message.key == "slow":
            started.set()
            await asyncio.sleep(0.2)
            await ground.evidence.note("a", message)
        else:
            await started.wait()
            raise Odd

    one = await ground.join("a", handler, concurrency=2)
    await ended(one)
    assert began == sent[:2]
    assert [line.sequence for line in ground.evidence.lines] == [sent[0]]
    await ground.join("a")
    await ground.evidence.all_of(sent, 10)
    assert flawless(ground.evidence.verdict(sent))


async def test_a_handler_that_hangs_does_not_keep_the_member(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    await ground.publish(["hangs", "bad"])
    hanging = asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        if message.key == "bad":
            await hanging.wait()
            raise Odd
        hanging.set()
        await asyncio.sleep(60)

    begin = time.monotonic()
    await ended(await ground.join("a", handler, grace_s=0.2))
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("acks", ["explicit", "none"])
async def test_a_static_member_ends_as_well(make: MakeGround, acks: str) -> None:
    ground = await make(partitions=4)
    await ground.static(members=["a"])
    await ground.publish(["k1", "k2", "k1", "k2"])

    async def handler(_: GroupMessage) -> None:
        raise Odd

    settings = ConsumerConfig(ack_policy="none") if acks == "none" else ConsumerConfig(ack_wait_s=1.0)
    await ended(await ground.join("a", handler, settings=settings))


async def test_a_crash_while_it_stops_is_told(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    await ground.publish(["k"])
    at_work, go_on = asyncio.Event(), asyncio.Event()

    async def handler(_: GroupMessage) -> None:
        at_work.set()
        await go_on.wait()
        raise Odd

    one = await ground.join("a", handler)
    await at_work.wait()
    stopping = asyncio.create_task(one.stop())
    await asyncio.sleep(0.05)
    go_on.set()
    async with asyncio.timeout(5):
        await stopping
    await ended(one)


class LoudJournal:
    """A journal that raises."""

    def __init__(self, stream: str, error: BaseException) -> None:
        self.stream = stream
        self._error = error

    def now_ns(self) -> int:
        return 1

    def note(self, *_: object) -> None:
        raise self._error


@pytest.mark.parametrize("error", [Odd("note"), RuntimeError("note")], ids=["odd", "plain"])
async def test_a_journal_that_raises_ends_the_member(ground: Ground, error: BaseException) -> None:
    await ground.elastic(members=["a"])
    await ground.publish(["k", "k"])
    one = await ground.join("a", journal=LoudJournal(ground.stream, error))
    crash = await ended(one)
    assert crash.__cause__ is error


async def test_a_hook_that_raises_something_odd_ends_the_member(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    sent = await ground.publish(["k", "k"])
    error = Odd("the hook")

    def hook(*_: object) -> None:
        raise error

    async def handler(_: GroupMessage) -> None:
        raise ValueError("the handler")

    one = await ground.join("a", handler, hooks=MemberHooks(on_failure=hook))
    crash = await ended(one)
    assert crash.__cause__ is error
    await ground.join("a")
    await ground.evidence.all_of(sent, 10)
    assert flawless(ground.evidence.verdict(sent))


async def test_a_thread_that_raises_stop_iteration_has_failed(ground: Ground) -> None:
    """Python 3.11 loses a StopIteration between a thread and the event loop."""
    await ground.elastic(members=["a"])
    sent = await ground.publish(["k", "k"])
    failures: list[tuple[int, str]] = []
    first = [True]
    loop = asyncio.get_running_loop()

    def handler(message: GroupMessage) -> None:
        if first:
            first.clear()
            next(iter(()))
        asyncio.run_coroutine_threadsafe(ground.evidence.note("a", message), loop).result()

    def failed(message: GroupMessage, error: BaseException, tries: int) -> None:
        failures.append((message.sequence, type(error.__cause__).__name__))

    await ground.join("a", handler, hooks=MemberHooks(on_failure=failed))
    await ground.evidence.all_of(sent, 10)
    assert failures == [(sent[0], "StopIteration")]
    assert flawless(ground.evidence.verdict(sent))


@pytest.mark.parametrize("kind", ["async def", "def"])
@pytest.mark.parametrize("error", ["SystemExit(7)", "KeyboardInterrupt()"])
async def test_what_ends_a_program_ends_it(ground: Ground, tmp_path: Path, kind: str, error: str) -> None:
    await ground.elastic(members=["a"])
    await ground.publish(["k"])
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import asyncio, sys, keylane
        from keylane import groups

        {kind} handler(message):
            raise {error}

        async def main(url, stream):
            async with await keylane.connect(url) as connection:
                member = await groups.join(connection, stream, "g", "a", handler)
                await member.wait()

        asyncio.run(main(*sys.argv[1:]))
        """)
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), str(ground.url), ground.stream, stderr=asyncio.subprocess.PIPE, env=os.environ
    )
    try:
        async with asyncio.timeout(45):
            _, said = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if error == "SystemExit(7)":
        assert process.returncode == 7
    else:
        assert process.returncode != 0
        assert said.rstrip().endswith(b"KeyboardInterrupt")
