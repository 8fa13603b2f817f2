"""Offsets: how far a query has read a stream, what the stream has lost of the rest, how far a batch goes. Pure.

Spark stores an offset as JSON and compares the text, so the keys always come in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keylane.core.subjects import shown
from keylane.errors import InvalidInput
from keylane.spark.stream_state import Loss, StreamSnapshot


@dataclass(frozen=True, slots=True)
class Offset:
    """Everything of the stream up to `sequence` is read; 0 is before the first message."""

    stream: str
    created: str
    sequence: int

    @classmethod
    def at(cls, state: StreamSnapshot, sequence: int) -> Offset:
        return cls(state.stream, state.created, sequence)

    def to_wire(self) -> dict[str, Any]:
        return {"stream": self.stream, "created": self.created, "sequence": self.sequence}

    @classmethod
    def from_wire(cls, wire: Any, stream: str, *, queue: str | None = None) -> Offset:
        """An offset out of Spark's checkpoint, which must be one of `stream`.

        `queue` is the queue of the group that names the keys: an offset of the queue gets an error of its own.
        """
        try:
            offset = cls(str(wire["stream"]), str(wire["created"]), int(wire["sequence"]))
        except (KeyError, TypeError, ValueError):
            raise InvalidInput(
                f"the checkpoint holds {shown(wire)}, which is not an offset of format('keylane'): it belongs to "
                "another source; use a checkpoint directory of its own for every query"
            ) from None
        if offset.stream == queue != stream:
            raise InvalidInput(
                f"the checkpoint is of {queue!r}, the queue of the group, and the query reads stream {stream!r}: "
                "option 'group' alone names the keys of the stream. Give queue=true to go on with the queue, or a new "
                "checkpoint directory to read the stream"
            )
        if offset.stream != stream:
            raise InvalidInput(
                f"the checkpoint is of stream {offset.stream!r}, and the query reads {stream!r}: sequences of one mean "
                "nothing in the other; use a new checkpoint directory, or the old stream"
            )
        return offset


@dataclass(frozen=True, slots=True)
class ReadableRange:
    """What can be read: (after, upto] of the stream as it is now, and what is missing before or in it."""

    after: int
    upto: int
    loss: Loss | None = None


def resume(start: Offset, state: StreamSnapshot) -> ReadableRange:
    """From where reading goes on after `start`, up to all there is now."""
    if start.created != state.created:
        return ReadableRange(state.first - 1, state.last, _recreated(start, state))
    if state.last < start.sequence:
        why = (
            f"stream {state.stream!r} ends at {state.last}, and {start.sequence} was read before: its newest messages "
            "were lost or an older copy was restored"
        )
        return ReadableRange(state.last, state.last, Loss("cut short", why, state.last + 1))
    if state.first > start.sequence + 1:
        why = f"stream {state.stream!r} was trimmed or purged and begins at {state.first} now"
        return ReadableRange(state.first - 1, state.last, Loss("trimmed", why, start.sequence + 1, state.first - 1))
    return ReadableRange(start.sequence, state.last)


def planned(start: Offset, end: Offset, state: StreamSnapshot) -> ReadableRange:
    """What can be read of a batch that was planned from `start` to `end`."""
    if end.created != state.created:
        first = start.sequence + 1 if start.created == end.created else 1
        loss = Loss("recreated", _recreated(end, state).why, first, max(first, end.sequence))
        return ReadableRange(state.first - 1, state.first - 1, loss)
    begun = resume(start, state)
    if state.last < end.sequence:
        why = (
            f"stream {state.stream!r} ends at {state.last}: its newest messages were lost or an older copy was restored"
        )
        return ReadableRange(
            min(begun.after, state.last), state.last, begun.loss or Loss("cut short", why, state.last + 1, end.sequence)
        )
    if begun.after > end.sequence:
        assert begun.loss is not None
        return ReadableRange(
            end.sequence, end.sequence, Loss(begun.loss.kind, begun.loss.why, begun.loss.first, end.sequence)
        )
    return ReadableRange(begun.after, end.sequence, begun.loss)


def _recreated(old: Offset, state: StreamSnapshot) -> Loss:
    why = (
        f"stream {state.stream!r} was deleted and recreated: the one that was read is of {old.created}, this one of "
        f"{state.created}"
    )
    return Loss("recreated", why, old.sequence + 1)


def admit(after: int, state: StreamSnapshot, *, max_offsets: int | None = None, max_bytes: int | None = None) -> int:
    """Where a batch that begins behind `after` ends: within both limits, but always one sequence further.

    Bytes are counted by the stream's average of bytes per sequence, so a batch of unusually large messages is larger
    than the limit.

    >>> state = StreamSnapshot("ORDERS", "", first=1, last=1000, messages=1000, bytes=100_000)
    >>> admit(10, state, max_offsets=50), admit(10, state, max_bytes=2_000), admit(990, state, max_offsets=50)
    (60, 30, 1000)
    """
    end = state.last
    if max_offsets is not None:
        end = min(end, after + max_offsets)
    if max_bytes is not None and state.bytes:
        sequences = max_bytes * (state.last - state.first + 1) // state.bytes
        end = min(end, after + max(1, sequences))
    return max(after, end)
