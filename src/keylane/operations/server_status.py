"""What a server says about itself: its clock, and how often it syncs to disk.

The clock is for every user. The variables of a server are the system account's, unless that account exports them.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import nats.errors

from keylane.errors import ApiUnavailable, KeylaneError, RequestTimeout
from keylane.jetstream import Connection, parse_time

_USER_INFO = "$SYS.REQ.USER.INFO"
_VARIABLES = "$SYS.REQ.SERVER.PING.VARZ"
_FIRST_S, _NEXT_S = 1.0, 0.3
_MOST_SERVERS = 100
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ServerClock:
    """The server's clock against this machine's."""

    ahead_s: float
    error_s: float
    cluster: str | None
    """The cluster that the server belongs to."""


async def server_clock(connection: Connection, timeout_s: float) -> ServerClock:
    """Ask the server for its time. Raises `KeylaneError` if it does not say."""
    sent_at, begun = datetime.now(UTC), time.monotonic()
    try:
        answer = json.loads((await connection.nats.ask(_USER_INFO, b"", timeout_s)).data)
        took_s = time.monotonic() - begun
        there = parse_time(answer["server"]["time"])
    except nats.errors.TimeoutError as error:
        raise RequestTimeout(f"no answer on {_USER_INFO} within {timeout_s:g} s") from error
    except nats.errors.Error as error:
        raise ApiUnavailable(f"nobody answers on {_USER_INFO}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ApiUnavailable(f"what answers on {_USER_INFO} is no server: {error!r}") from error
    ahead_s = (there - sent_at).total_seconds() - took_s / 2
    return ServerClock(ahead_s, took_s / 2, answer["server"].get("cluster"))


async def sync_intervals(connection: Connection) -> dict[str, float]:
    """Server -> seconds between two syncs to disk, 0: every write. Raises `KeylaneError` if no server says."""
    client = connection.nats
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    found: dict[str, float] = {}
    try:
        await client.publish(_VARIABLES, b"", reply=inbox)
        while len(found) < _MOST_SERVERS:
            message = await subscription.next_msg(timeout=_NEXT_S if found else _FIRST_S)
            if not message.data:
                break  # the server's word for "nobody listens"
            answer = json.loads(message.data)
            config = (answer.get("data") or {}).get("jetstream", {}).get("config")
            if config is not None:
                found[answer["server"]["name"]] = _sync_s(config)
    except (TimeoutError, nats.errors.TimeoutError):
        pass  # those that answer have done so
    except (ValueError, KeyError, TypeError) as error:
        raise ApiUnavailable(f"what answers on {_VARIABLES} is no server: {error!r}") from error
    finally:
        await subscription.unsubscribe()
    if not found:
        raise KeylaneError(f"no server answers on {_VARIABLES}, which is for the system account unless that exports it")
    return found


def _sync_s(config: dict[str, Any]) -> float:
    return 0.0 if config.get("sync_always") else config.get("sync_interval", 120 * _NANOSECONDS) / _NANOSECONDS
