"""The state of a stream at one moment, as its leader reports it, and what it has lost before a query has read it.

Driver, executors and pipelines ask for it here. A loss ends the query, or is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keylane.errors import DataLost
from keylane.jetstream import Connection, naming_missing, streams
from keylane.spark.address import Address
from keylane.spark.retry import ask

_log = logging.getLogger("keylane.spark")


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
    """The leader's answer to STREAM.INFO; `NotFound` names the streams that exist."""
    async with naming_missing(connection):
        return await streams.info_json(connection, stream)


@dataclass(frozen=True, slots=True)
class Loss:
    """What should still have been read and is gone: `first` to `last`, or an unknown number from `first` on."""

    kind: Literal["trimmed", "recreated", "cut short"]
    why: str
    first: int
    last: int | None = None

    @property
    def count(self) -> int | None:
        """How many messages at most; None where it is unknown."""
        return None if self.last is None else self.last - self.first + 1

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.why}; what came after sequence {self.first - 1} in it is gone"
        return f"{self.why}; sequences {self.first} to {self.last}, at most {self.count} messages, are gone"


class Losses:
    """The losses of one query. `fatal` is `failOnDataLoss`."""

    def __init__(self, *, fatal: bool) -> None:
        self.fatal = fatal
        self.count = 0
        """Messages lost so far, at most; unknown numbers are not included."""
        self._last: Loss | None = None

    def report(self, loss: Loss) -> None:
        """Raise `DataLost`, or log it once: planning the batch finds the same loss again."""
        if self.fatal:
            raise DataLost(
                f"{loss}. The query has not read them. Set failOnDataLoss=false to go on with what there is, or start "
                "again with another checkpoint directory"
            )
        if loss == self._last:
            return
        self._last = loss
        self.count += loss.count or 0
        _log.warning("%s. The query goes on (failOnDataLoss=false); %d lost so far, at most", loss, self.count)
