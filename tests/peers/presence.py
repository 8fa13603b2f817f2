"""Whether a peer can be used, and what a test does where it cannot.

Owns the two errors of peers and `require`. Never starts or builds anything itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import pytest

MUST_HAVE = "KEYLANE_REQUIRE_PEERS"


class PeerMissing(Exception):
    """A tool that the machine's owner may lack; the message says what to install."""


class PeerBroken(Exception):
    """The tool is there, and building, fetching or starting the peer failed."""


def peers_are_required(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(MUST_HAVE, "") not in {"", "0"}


def require(find: Callable[[], object]) -> None:
    """Skips the test where `find` raises PeerMissing; fails it there if KEYLANE_REQUIRE_PEERS is set."""
    reason = _why_missing(find)
    if reason is None:
        return
    if peers_are_required():
        pytest.fail(f"{reason} ({MUST_HAVE} is set, so this is a failure)", pytrace=False)
    pytest.skip(reason)


def _why_missing(find: Callable[[], object]) -> str | None:
    try:
        find()
    except PeerMissing as missing:
        return str(missing)
    return None
