"""The state of a stream at one moment, as its leader reports it. Driver, executors and pipelines ask for it here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keylane.errors import NotFound
from keylane.jetstream import Connection, streams
from keylane.spark.address import Address
from keylane.spark.retry import ask


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """A stream at one moment. `created` is the server's own text: a recreated stream has another one."""

    stream: str
    created: str
    first: int
    last: int
    messages: int
    bytes: int
    leader: str | None = None
    """The leader that answered; None where there is no cluster."""

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> StreamSnapshot:
        """From the server's answer to STREAM.INFO."""
        state = wire["state"]
        return cls(
            stream=wire["config"]["name"],
            created=wire["created"],
            first=max(1, state["first_seq"]),  # 0 in a stream that never held a message
            last=state["last_seq"],
            messages=state["messages"],
            bytes=state["bytes"],
            leader=(wire.get("cluster") or {}).get("leader"),
        )


def state_of(address: Address, stream: str) -> StreamSnapshot:
    """A stream as it is now."""
    wire = ask(address, lambda connection: stream_info(connection, stream), f"look at stream {stream!r}")
    return StreamSnapshot.from_wire(wire)


async def stream_info(connection: Connection, stream: str) -> dict[str, Any]:
    """The leader's answer to STREAM.INFO; `NotFound` says what may be wrong."""
    try:
        return await streams.info_json(connection, stream)
    except NotFound as error:
        raise NotFound(
            404, error.err_code, f"there is no stream {stream!r} on {connection.server}: it was deleted, or the name "
            "or the account is wrong", doing="look at the stream to read"
        ) from error  # fmt: skip
