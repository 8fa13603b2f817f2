"""Times, ages and payloads as text. Pure, and free of rich: commands that print JSON start faster without it."""

from __future__ import annotations

import base64
import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keylane.groups import RetryCounts

_EXCERPT_CHARS = 60


def as_utc(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock(time: datetime) -> str:
    return time.astimezone().strftime("%H:%M:%S")


def age(since: datetime, now: datetime) -> str:
    """How long ago, in at most two units. A clock that lags behind the server's gives 0 s."""
    seconds = max(0, int((now - since).total_seconds()))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    if minutes:
        return f"{minutes} min {seconds % 60} s"
    return f"{seconds} s"


def retry_line(counts: RetryCounts) -> str:
    """How many messages of a group wait for a delayed retry.

    >>> retry_line(RetryCounts(waiting=3, due=1))
    '3 wait for a delayed retry, 1 is due'
    """
    waiting = f"{counts.waiting:,} {'waits' if counts.waiting == 1 else 'wait'} for a delayed retry"
    return f"{waiting}, {counts.due:,} {'is' if counts.due == 1 else 'are'} due"


def printable(text: str) -> str:
    """Escape control characters, so that a message cannot control the terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def excerpt(data: bytes) -> str:
    """The beginning of a payload, on one line."""
    text = printable(data[: 2 * _EXCERPT_CHARS].decode("utf-8", "backslashreplace"))
    return text if len(text) <= _EXCERPT_CHARS else f"{text[:_EXCERPT_CHARS]}… ({len(data):,} bytes)"


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON in which names are as they are, escaped only where the output cannot show them."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def payload_fields(data: bytes) -> dict[str, str]:
    """For JSON: `data` if the payload is text, else `data_base64`."""
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(data).decode()}
