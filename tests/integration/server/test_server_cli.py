"""`keylane server run` as a user runs it: what it prints, how it stops, how it fails."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from keylane import __version__
from keylane.cli.main import main
from keylane.server import NatsServer

DEADLINE_S = 40.0
KEYLANE = [sys.executable, "-c", "from keylane.cli.main import main; main()"]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def keylane(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command in this process, for what ends at once. Its signal handlers are put back."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["keylane", *arguments])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, *capsys.readouterr())

    return run


@contextmanager
def server_run(*arguments: str, data_home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command until it has said how to stop it; give the process and what it said so far."""
    process = subprocess.Popen(
        [*KEYLANE, "server", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_DATA_HOME": str(data_home)},
    )
    with process:
        try:
            assert process.stdout is not None
            said = ""
            for line in process.stdout:
                said += line
                if line.lstrip().startswith("stop "):
                    break
            yield process, said
        finally:
            process.kill()


def urls_in(said: str) -> list[tuple[str, int]]:
    return [("127.0.0.1", int(port)) for port in re.findall(r"nats://127\.0\.0\.1:(\d+)", said)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with server_run(data_home=tmp_path) as (process, said):
        store_dir = tmp_path / "keylane" / "server"
        assert str(store_dir) in said
        assert "synced to disk every 1s: a power cut" in said
        assert f"Ctrl-C, or: kill {process.pid}" in said
        (address,) = urls_in(said)
        with socket.create_connection(address, timeout=DEADLINE_S) as link:
            assert link.recv(4) == b"INFO"
        process.send_signal(number)
        output, errors = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, output, errors) == (0, "stopped\n", "")
        assert "Server Exiting" in (store_dir / "server.log").read_text()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=DEADLINE_S)


def test_options_reach_the_server(tmp_path: Path, keylane: Callable[..., Done]) -> None:
    with NatsServer.start() as spare:
        port = spare.port
    store_dir = tmp_path / "mine"
    with server_run("--port", str(port), "--store-dir", str(store_dir), "--sync", "always", data_home=tmp_path) as (
        process,
        said,
    ):
        assert urls_in(said) == [("127.0.0.1", port)]
        assert str(store_dir) in said
        assert "before each acknowledgement" in said
        refused = keylane("server", "run", "--store-dir", str(store_dir))
        assert refused.returncode == 1
        assert "in use by a running nats-server (pid" in refused.stderr
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
    assert not (tmp_path / "keylane").exists()


def test_a_cluster_runs_and_reports_a_node_that_ends(tmp_path: Path) -> None:
    with server_run("--cluster", "3", data_home=tmp_path) as (process, said):
        assert len(urls_in(said)) == 3
        assert str(tmp_path / "keylane" / "cluster-3") in said
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", said)]
        os.kill(pids[1], signal.SIGKILL)
        assert process.stderr is not None
        assert "node-2" in process.stderr.readline()
        process.terminate()
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, output) == (0, "stopped\n")


def test_it_fails_when_its_server_ends(tmp_path: Path) -> None:
    with server_run(data_home=tmp_path) as (process, said):
        match = re.search(r"pid (\d+)", said)
        assert match is not None
        os.kill(int(match[1]), signal.SIGKILL)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
        assert re.fullmatch(r"keylane: nats-server keylane \(pid \d+\) ended by itself; its log is .+\n", errors)


@pytest.mark.parametrize("sync", ["soon", "0s"])
def test_a_bad_value_is_one_line_and_exit_code_1(tmp_path: Path, sync: str, keylane: Callable[..., Done]) -> None:
    done = keylane("server", "run", "--sync", sync, "--store-dir", str(tmp_path / "s"))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"keylane: sync '{sync}' is neither .+\n", done.stderr)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "arguments",
    [["--port", "0"], ["--port", "65536"], ["--port", "x"], ["--cluster", "1"], ["--nonsense"]],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], keylane: Callable[..., Done]) -> None:
    done = keylane("server", "run", *arguments)
    assert done.returncode == 2
    assert "Usage: " in done.stderr
    assert "Traceback" not in done.stderr


def test_help_says_what_each_sync_can_lose(keylane: Callable[..., Done]) -> None:
    done = keylane("server", "run", "--help")
    said = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert "can lose about the last second of acknowledged messages" in said
    assert "always Loses no acknowledged message, and is far slower: 3,900" in said
    assert "a killed server process loses no acknowledged message" in said


def test_version_and_no_arguments(keylane: Callable[..., Done]) -> None:
    assert keylane("--version").stdout == f"keylane {__version__}\n"
    assert "server" in keylane("--help").stdout
    bare = keylane()
    assert "Usage: " in bare.stdout + bare.stderr


def test_help_loads_no_heavy_module() -> None:
    script = "import sys, keylane.cli.main; print([name for name in ('nats', 'asyncio') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
