"""Streams: create, update, look at, purge, delete. `StreamConfig` is nats-py's, which is complete."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from nats.js.api import RetentionPolicy, StorageType, StreamConfig, StreamInfo

from keylane.core.names import check_stream_name
from keylane.core.subjects import check_filter
from keylane.errors import InvalidInput
from keylane.jetstream.consumers import parse_time
from keylane.lazy import public_names

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection


__all__ = [
    "RetentionPolicy",
    "StorageType",
    "StreamConfig",
    "StreamInfo",
    "StreamState",
    "create",
    "create_json",
    "delete",
    "delete_message",
    "direct_subject",
    "get_message",
    "info",
    "info_json",
    "list_all",
    "list_json",
    "names",
    "purge",
    "state",
    "step_down",
    "subject_counts",
    "subjects",
    "update",
    "update_json",
]

__dir__ = public_names(__all__)


@dataclass(frozen=True, slots=True)
class StreamState:
    """How much a stream holds."""

    messages: int
    bytes: int
    first_sequence: int
    last_sequence: int
    consumers: int
    created: datetime
    leader: str | None

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> StreamState:
        state = wire["state"]
        return cls(
            messages=state["messages"],
            bytes=state["bytes"],
            first_sequence=state["first_seq"],
            last_sequence=state["last_seq"],
            consumers=state["consumer_count"],
            created=parse_time(wire["created"]),
            leader=wire.get("cluster", {}).get("leader"),
        )


async def create(connection: Connection, config: StreamConfig) -> StreamInfo:
    """Create a stream; an existing one with the identical configuration is fine."""
    return await _apply(connection, "CREATE", config)


async def create_json(connection: Connection, config: Mapping[str, Any]) -> None:
    """As `create`, for a configuration with fields or values that nats-py does not know."""
    await connection.api.request(f"STREAM.CREATE.{config['name']}", config)


async def update(connection: Connection, config: StreamConfig) -> StreamInfo:
    return await _apply(connection, "UPDATE", config)


async def update_json(connection: Connection, config: Mapping[str, Any]) -> None:
    """As `update`, for a configuration as `info_json` shows it, with every field that the server knows."""
    await connection.api.request(f"STREAM.UPDATE.{config['name']}", config)


async def info(connection: Connection, stream: str) -> StreamInfo:
    check_stream_name(stream)
    return _stream_info(await info_json(connection, stream))


async def info_json(
    connection: Connection, stream: str, *, subjects_filter: str | None = None, timeout_s: float | None = None
) -> dict[str, Any]:
    """As `info`, with every field that the server sent; with a filter also the count of messages per subject."""
    request = None if subjects_filter is None else {"subjects_filter": subjects_filter}
    return await connection.api.request(f"STREAM.INFO.{stream}", request, timeout_s)


async def state(connection: Connection, stream: str) -> StreamState:
    check_stream_name(stream)
    return StreamState.from_wire(await info_json(connection, stream))


async def subjects(connection: Connection, stream: str, subject_filter: str) -> list[str]:
    """Every subject that matches and has a message, page by page, sorted."""
    return sorted(await subject_counts(connection, stream, subject_filter))


async def subject_counts(connection: Connection, stream: str, subject_filter: str) -> dict[str, int]:
    """How many messages each subject has that matches, page by page."""
    found: dict[str, int] = {}
    while True:
        request = {"subjects_filter": check_filter(subject_filter), "offset": len(found)}
        answer = await connection.api.request(f"STREAM.INFO.{check_stream_name(stream)}", request)
        page = answer["state"].get("subjects") or {}
        found |= page
        if not page or len(found) >= answer.get("total", 0):
            return found


async def names(connection: Connection, *, subject: str | None = None) -> list[str]:
    """Every stream of the account, or those that take messages on a subject that this filter selects."""
    wanted = None if subject is None else {"subject": check_filter(subject)}
    return [name async for name in connection.api.paged("STREAM.NAMES", "streams", wanted)]


async def list_all(connection: Connection) -> AsyncIterator[StreamInfo]:
    """Every stream of the account, page by page."""
    async for wire in list_json(connection):
        yield _stream_info(wire)


async def list_json(connection: Connection) -> AsyncIterator[dict[str, Any]]:
    """As `list_all`, with every field that the server sent."""
    async for wire in connection.api.paged("STREAM.LIST", "streams"):
        yield wire


async def delete(connection: Connection, stream: str) -> None:
    check_stream_name(stream)
    await connection.api.request(f"STREAM.DELETE.{stream}")


async def purge(
    connection: Connection,
    stream: str,
    *,
    subject_filter: str | None = None,
    before_sequence: int | None = None,
) -> int:
    """Delete messages: all, those matching the filter, those below a sequence. Returns how many."""
    check_stream_name(stream)
    request: dict[str, Any] = {}
    if subject_filter is not None:
        request["filter"] = check_filter(subject_filter)
    if before_sequence is not None:
        if before_sequence < 1:
            # The server takes 0 for "not given" and would delete everything.
            raise InvalidInput(f"purge before sequence {before_sequence}: sequences start at 1")
        request["seq"] = before_sequence
    answer = await connection.api.request(f"STREAM.PURGE.{stream}", request)
    return int(answer["purged"])


async def step_down(connection: Connection, stream: str) -> None:
    """Let the stream's leader hand over to another server of the cluster."""
    check_stream_name(stream)
    await connection.api.request(f"STREAM.LEADER.STEPDOWN.{stream}")


async def get_message(
    connection: Connection,
    stream: str,
    *,
    sequence: int | None = None,
    start_time: datetime | None = None,
    last_by_subject: str | None = None,
    next_by_subject: str | None = None,
) -> dict[str, Any]:
    """A stored message as the leader sends it, headers and data in Base64.

    The message at `sequence`, the last one on subjects, or the next one on subjects from `sequence` or `start_time`
    (UTC) on. Raises `NotFound` if there is none.
    """
    request = {
        "seq": sequence,
        "start_time": start_time.isoformat().replace("+00:00", "Z") if start_time is not None else None,
        "last_by_subj": last_by_subject,
        "next_by_subj": next_by_subject,
    }
    answer = await connection.api.request(
        f"STREAM.MSG.GET.{stream}", {name: value for name, value in request.items() if value is not None}
    )
    message: dict[str, Any] = answer["message"]
    return message


async def delete_message(connection: Connection, stream: str, sequence: int) -> None:
    """Delete one message. Its bytes are not overwritten."""
    await connection.api.request(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})


def direct_subject(connection: Connection, stream: str) -> str:
    """Where any replica answers requests for stored messages (`direct.py`)."""
    return connection.api.subject(f"DIRECT.GET.{stream}")


async def _apply(connection: Connection, verb: str, config: StreamConfig) -> StreamInfo:
    if not config.name:
        raise InvalidInput("the stream configuration has no name")
    check_stream_name(config.name)
    for subject in config.subjects or ():
        check_filter(subject)
    wire = {key: value for key, value in config.as_dict().items() if value is not None}
    return _stream_info(await connection.api.request(f"STREAM.{verb}.{config.name}", wire))


def _stream_info(wire: dict[str, Any]) -> StreamInfo:
    read: StreamInfo = StreamInfo.from_response(wire)
    return read
