"""The mechanism itself: peers are built once, asked for by name, and never outlive the test run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers import store, tether
from tests.peers.presence import MUST_HAVE, PeerBroken, PeerMissing, require
from tests.peers.store import REPOSITORY, content_key, kept, run_tool, silent
from tests.waiter import wait_until


def nothing_there() -> None:
    raise PeerMissing("the Frob is not on PATH: install Frob")


def test_missing_peer_skips_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MUST_HAVE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="install Frob"):
        require(nothing_there)


def test_missing_peer_fails_where_peers_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MUST_HAVE, "1")
    with pytest.raises(pytest.fail.Exception, match="install Frob"):
        require(nothing_there)


def test_broken_peer_is_never_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MUST_HAVE, raising=False)

    def broken() -> None:
        raise PeerBroken("the build failed")

    with pytest.raises(PeerBroken):
        require(broken)


def test_present_peer_lets_the_test_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MUST_HAVE, "1")
    require(lambda: None)


def test_kept_builds_once_per_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PEERS", tmp_path)
    built: list[Path] = []

    def build(directory: Path) -> None:
        built.append(directory)
        (directory / "thing").write_text(str(len(built)))

    for key, content in [("a", "1"), ("a", "1"), ("b", "2"), ("b", "2")]:
        assert (kept("some/thing", key, build) / "thing").read_text() == content
    assert len(built) == 2


def test_failed_build_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PEERS", tmp_path)
    kept("thing", "a", lambda directory: (directory / "good").touch())

    def fail(directory: Path) -> None:
        (directory / "half").touch()
        raise PeerBroken("no")

    with pytest.raises(PeerBroken):
        kept("thing", "b", fail)
    assert (kept("thing", "a", fail) / "good").exists()
    assert not (tmp_path / "thing.draft").exists()


def test_key_follows_names_contents_and_facts(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.write_text("x")
    key = content_key([one], "fact")
    assert content_key([one], "fact") == key
    assert content_key([one], "other") != key
    assert content_key([one.rename(tmp_path / "two")], "fact") != key


def test_failing_tool_shows_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(PeerBroken, match=r"(?s)exit code 3.*on fire"):
        run_tool(
            ["sh", "-c", "echo on fire; exit 3"],
            cwd=tmp_path,
            environ=os.environ,
            timeout_s=20,
            on_line=silent,
        )


def test_tool_without_end_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(PeerBroken, match="no end after"):
        run_tool(["sleep", "60"], cwd=tmp_path, environ=os.environ, timeout_s=0.2, on_line=silent)


def test_tethered_process_dies_with_its_parent() -> None:
    parent_code = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, sys.argv[1], 'sleep', '60'], stdout=subprocess.PIPE); "
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, tether.__file__],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n")
        parent.kill()
    wait_until(lambda: has_ended(child))


def has_ended(pid: int) -> bool:
    """Gone, or dead and only waiting to be reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
