"""Somebody who has a page, an empty directory and a terminal, and does what the page says (`pages.py`).

Nothing runs before the page starts it, not even a nats-server. Ports of the page are replaced by free ones, and put
back into what is printed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from keylane.server.ports import ReservedPort
from tests.integration.docs.pages import ROOT, Command, File, Program, Step
from tests.integration.docs.printed import ANYTHING, difference

PORTS = ("4222", "9464", "8230")
DEADLINE_S = 120.0
QUIET_START_S = 5.0
"""How long the reader waits for a command in a terminal of its own that shows nothing, before going on."""
HOST = "host-a"
"""The name that pages give to the machine that the reader sits at."""
_LINES, _COLUMNS = 50, 120
_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")
"""How a terminal is told of bold letters and the like."""


class PageFailed(AssertionError):
    """What the page says did not happen."""


class Running:
    """A command in a terminal of its own, and what that shows so far."""

    def __init__(self, command: Command, directory: Path, environment: dict[str, str], text: str) -> None:
        self.command = command
        self._terminal, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (_LINES, _COLUMNS))
        self._process = subprocess.Popen(
            ["bash", "-c", text], cwd=directory, env=environment, start_new_session=True,
            stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        self._shown = bytearray()
        self._answers = command.answers
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()

    def _watch(self) -> None:
        try:
            while some := os.read(self._terminal, 65536):
                self._shown += some
                if self._answers and self._shown.endswith(b"[y/N] "):
                    os.write(self._terminal, f"{self._answers.pop(0)}\n".encode())
        except OSError:  # the last process that had it is gone
            pass
        finally:
            os.close(self._terminal)

    @property
    def printed(self) -> str:
        return _ESCAPE.sub("", self._shown.decode(errors="replace")).replace("\r\n", "\n")

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, is_so: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
        end = time.monotonic() + deadline_s
        while not is_so():
            if self.ended or time.monotonic() > end:
                return is_so()
            time.sleep(0.05)
        return True

    def exit_code(self) -> int | None:
        """None if it does not end."""
        try:
            code = self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            return None
        self._watching.join(DEADLINE_S)
        return code

    def interrupt(self) -> int | None:
        """Ctrl-C reaches all processes of a terminal."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGINT)
        return self.exit_code()

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()


class Session:
    """The reader's Python, started with the first block."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        answers, theirs = os.pipe()
        self._out, self._err = directory / ".session-out", directory / ".session-err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("session.py")), str(theirs)],
                cwd=directory, env=environment, pass_fds=[theirs], start_new_session=True,
                stdin=subprocess.PIPE, stdout=out, stderr=err, text=True,
            )  # fmt: skip
        os.close(theirs)
        self._answers = os.fdopen(answers)

    def next_page(self, environment: dict[str, str]) -> None:
        self._send({"code": "", "where": "the next page", "environment": environment})

    def run(self, code: str, where: str) -> str:
        """What it printed."""
        return self._send({"code": code, "where": where})

    def _send(self, block: dict[str, Any]) -> str:
        before = self._out.stat().st_size
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(block) + "\n")
        self._process.stdin.flush()
        line = self._answers.readline()  # the timeout of the test is the deadline
        error = json.loads(line)["error"] if line else "the Python session ended\n" + self._err.read_text()
        if error:
            raise PageFailed(f"{block['where']}: {error}")
        with self._out.open("rb") as out:
            out.seek(before)
            return out.read().decode()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()
        assert self._process.stdin is not None
        self._process.stdin.close()


class Reader:
    """Takes the steps of one page. `finish` ends what still runs, as the reader would."""

    def __init__(
        self, directory: Path, ports: dict[str, str], environment: dict[str, str], session: Session | None
    ) -> None:
        self._directory = directory
        self._ports = ports
        self._environment = environment
        self._session = session
        self._is_own_session = session is None
        self._open: list[Running] = []

    def take(self, step: Step) -> None:
        match step:
            case File():
                path = self._directory / step.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._with_our_ports(step.text), encoding="utf-8")
            case Program():
                self._run(step)
            case Command(stays=True):
                self._start(step)
            case Command():
                self._command(step)

    def finish(self) -> None:
        for running in reversed(self._open):
            command = running.command
            if command.shown:
                self._wait_for_shown(running)
            code = running.interrupt()
            if code != 0:
                raise PageFailed(f"{command.where}: `{command.text}` ended with {code}:\n{running.printed}")
        self._open.clear()

    def close(self) -> None:
        for running in self._open:
            running.kill()
        if self._session is not None and self._is_own_session:
            self._session.close()

    def _run(self, step: Program) -> None:
        if self._session is None:
            self._session = Session(self._directory, self._environment)
        printed = self._session.run(self._with_our_ports(step.code), step.where)
        if step.shown is not None:
            self._compare(step.where, step.shown, printed)

    def _start(self, command: Command) -> Running:
        running = Running(command, self._directory, self._environment, self._with_our_ports(command.text))
        self._open.append(running)
        if command.stays:
            running.wait(
                lambda: bool(running.printed.strip()) and not self._missing(running),
                DEADLINE_S if command.shown else QUIET_START_S,
            )
        return running

    def _command(self, command: Command) -> None:
        running = self._start(command)
        if command.interrupted:
            self._wait_for_shown(running)
            before = len(running.printed)
            code = running.interrupt()
            self._compare(command.where, command.after_interrupt or [], running.printed[before:], any_order=True)
        else:
            code = running.exit_code()
        if code is None or (code != 0 and command.shown is None):
            raise PageFailed(f"{command.where}: `{command.text}` ended with {code}:\n{running.printed}")
        if command.shown is not None and not command.interrupted:
            self._compare(command.where, command.shown, running.printed, numbers_vary=command.numbers_vary)
        self._open.remove(running)

    def _wait_for_shown(self, running: Running) -> None:
        """Until everything that is shown is there. Programs that stay do several things at once: in any order."""
        command = running.command
        running.wait(lambda: not self._missing(running))
        how = {"any_order": True, "numbers_vary": command.numbers_vary}
        self._compare(command.where, command.shown or [], running.printed, **how)

    def _missing(self, running: Running) -> bool:
        command = running.command
        shown = [*(command.shown or []), ANYTHING]
        how = {"any_order": True, "numbers_vary": command.numbers_vary}
        return self._different(shown, running.printed, **how) is not None

    def _different(self, shown: list[str], printed: str, **how: bool) -> str | None:
        return difference(shown, self._with_its_ports(printed).splitlines(), **how)

    def _compare(self, where: str, shown: list[str], printed: str, **how: bool) -> None:
        if (different := self._different(shown, printed, **how)) is not None:
            raise PageFailed(f"{where}\n{different}")

    def _with_our_ports(self, text: str) -> str:
        return re.sub(rf"\b({'|'.join(PORTS)})\b", lambda found: self._ports[found[1]], text)

    def _with_its_ports(self, text: str) -> str:
        for its, ours in self._ports.items():
            text = re.sub(rf"\b{ours}\b", its, text)
        return re.sub(rf"\b{re.escape(socket.gethostname())}\b", HOST, text)


def reader_environment(home: Path, port: str = "4222") -> dict[str, str]:
    """That of somebody who has installed keylane, and nothing else that could play a part."""
    others = ("NATS_", "KEYLANE_", "XDG_", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "TERM": "xterm",
        "NO_COLOR": "1",
        "NATS_URL": f"nats://127.0.0.1:{port}",
    }


@contextmanager
def reader(directory: Path, more: dict[str, str] | None = None, session: Session | None = None) -> Iterator[Reader]:
    """Somebody who begins a page in this directory, with an empty home. `session` is kept from the page before."""
    with ExitStack() as stack:
        ports = {}
        for its in PORTS:
            reserved = ReservedPort()
            stack.callback(reserved.release)
            ports[its] = str(reserved.number)
        if not (directory / "examples").exists():
            (directory / "examples").symlink_to(ROOT / "examples")
        home = Path(mkdtemp(prefix="home-", dir=directory))
        environment = reader_environment(home, ports["4222"]) | (more or {})
        if session is not None:
            session.next_page({"NATS_URL": environment["NATS_URL"]})
        person = Reader(directory, ports, environment, session)
        stack.callback(person.close)
        yield person
