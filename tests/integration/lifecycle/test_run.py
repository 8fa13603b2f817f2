"""`keylane.run`: what the first and the second signal do, with uvloop and without it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from signal import SIGINT, SIGTERM, Signals

import pytest

import keylane
from keylane import loop

STOPS_CLEANLY = """
try:
    await asyncio.sleep(60)
finally:
    await asyncio.sleep(0.05)
    print("drained", flush=True)
"""
IGNORES_ITS_CANCELLATION = """
try:
    await asyncio.sleep(60)
except asyncio.CancelledError:
    print("goes on", flush=True)
await asyncio.sleep(60)
"""
BLOCKS_THE_LOOP = """
while True:
    time.sleep(0.01)
"""
WAITS_FOR_A_THREAD = """
await asyncio.to_thread(time.sleep, 60)
"""
RETURNS_WHEN_CANCELLED = """
try:
    await asyncio.sleep(60)
except asyncio.CancelledError:
    return "the end"
"""
FAILS_WHEN_CANCELLED = """
try:
    await asyncio.sleep(60)
finally:
    raise ValueError("it could not be drained")
"""
HANDLES_SIGNALS_ITSELF = """
asked = asyncio.Event()
asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
asyncio.get_running_loop().add_signal_handler(signal.SIGINT, asked.set)
print("own handlers", flush=True)
await asked.wait()
return "the end"
"""


class Program:
    """A program whose main coroutine has this body."""

    def __init__(self, body: str, *, uvloop: bool = True, before: str = "") -> None:
        lines = [
            "import asyncio, logging, signal, sys, time",
            before if uvloop else "sys.modules['uvloop'] = None",
            "import keylane",
            "async def main():",
            "    print(type(asyncio.get_running_loop()).__module__, flush=True)",
            *(f"    {line}" for line in body.strip().splitlines()),
            "print('run returned', keylane.run(main()))",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", "\n".join(lines)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.loop = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.mark.parametrize("by", [SIGINT, SIGTERM])
@pytest.mark.parametrize("uvloop", [True, False])
def test_the_first_signal_stops_cleanly(by: Signals, uvloop: bool) -> None:
    program = Program(STOPS_CLEANLY, uvloop=uvloop)
    assert program.loop.startswith("uvloop" if uvloop else "asyncio")
    program.process.send_signal(by)
    assert program.end() == (0, "drained\n", "")


@pytest.mark.parametrize("by", [SIGINT, SIGTERM])
@pytest.mark.parametrize("uvloop", [True, False])
def test_the_second_signal_ends_a_main_that_ignored_the_first(by: Signals, uvloop: bool) -> None:
    program = Program(IGNORES_ITS_CANCELLATION, uvloop=uvloop)
    program.process.send_signal(by)
    assert program.line() == "goes on"
    program.process.send_signal(by)
    assert program.end() == (-by, "", "")


@pytest.mark.parametrize("body", [BLOCKS_THE_LOOP, WAITS_FOR_A_THREAD])
def test_the_second_signal_needs_no_event_loop(body: str) -> None:
    program = Program(body)
    program.process.send_signal(SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        program.process.wait(0.5)
    program.process.send_signal(SIGTERM)
    assert program.end() == (-SIGTERM, "", "")


def test_what_main_returns_is_returned_also_after_a_signal() -> None:
    program = Program(RETURNS_WHEN_CANCELLED)
    program.process.send_signal(SIGTERM)
    assert program.end() == (0, "run returned the end\n", "")


def test_an_error_on_the_way_out_is_not_hidden() -> None:
    program = Program(FAILS_WHEN_CANCELLED)
    program.process.send_signal(SIGTERM)
    code, out, err = program.end()
    assert (code, out) == (1, "")
    assert "ValueError: it could not be drained" in err


@pytest.mark.parametrize("by", [SIGINT, SIGTERM])
def test_handlers_of_the_program_itself_go_before(by: Signals) -> None:
    program = Program(HANDLES_SIGNALS_ITSELF)
    assert program.line() == "own handlers"
    program.process.send_signal(by)
    assert program.end() == (0, "run returned the end\n", "")


def test_an_ignored_signal_stays_ignored() -> None:
    """As under nohup, or in the background of a script."""
    program = Program(STOPS_CLEANLY, before="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    program.process.send_signal(SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        program.process.wait(0.5)
    program.process.send_signal(SIGTERM)
    assert program.end() == (0, "drained\n", "")


def test_it_is_logged() -> None:
    program = Program(STOPS_CLEANLY, before="logging.basicConfig(level=logging.INFO)")
    program.process.send_signal(SIGTERM)
    code, _, err = program.end()
    assert (code, err) == (0, "INFO:keylane:SIGTERM: stopping cleanly; another signal ends the process at once\n")


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    handlers: list[object] = []

    async def main() -> None:
        handlers.extend(signal.getsignal(number) for number in (SIGINT, SIGTERM))

    before = [signal.getsignal(number) for number in (SIGINT, SIGTERM)]
    thread = threading.Thread(target=lambda: keylane.run(main()))
    thread.start()
    thread.join(10)
    assert handlers == before


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (SIGINT, SIGTERM)]

    async def main() -> str:
        assert [signal.getsignal(number) for number in (SIGINT, SIGTERM)] != before
        return "the end"

    assert keylane.run(main()) == "the end"
    assert [signal.getsignal(number) for number in (SIGINT, SIGTERM)] == before


def test_a_cancellation_that_no_signal_caused_is_raised() -> None:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    with pytest.raises(asyncio.CancelledError):
        keylane.run(main())


def test_a_signal_before_main_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pytest.fail("main was begun")

    def interrupted() -> None:
        signal.raise_signal(SIGTERM)

    monkeypatch.setattr(loop, "loop_factory", interrupted)
    with pytest.raises(SystemExit) as ended:
        keylane.run(main())
    assert ended.value.code == 0
