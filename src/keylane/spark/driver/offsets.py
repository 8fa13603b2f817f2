"""Offsets: how far a query has read a stream, and what the stream no longer has of the rest. Pure.

Spark stores an offset as JSON and compares the text, so the keys always come in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keylane.core.subjects import shown
from keylane.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Stand:
    """A stream at one moment. `created` is the server's own text: a stream that was made anew has another one."""

    stream: str
    created: str
    first: int
    last: int
    messages: int
    bytes: int
    leader: str | None = None
    """Who said so; None where there is no cluster."""

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Stand:
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

    def at(self, sequence: int) -> Offset:
        return Offset(self.stream, self.created, sequence)


@dataclass(frozen=True, slots=True)
class Offset:
    """Everything of the stream up to `sequence` is read; 0 is before the first message."""

    stream: str
    created: str
    sequence: int

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
                f"the checkpoint holds {shown(wire)}, which is no offset of format('keylane'): it belongs to another "
                "source; use a checkpoint directory of its own for every query"
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
class Loss:
    """What should still have been read and is gone: `first` to `last`, or an unknown number from `first` on."""

    kind: Literal["trimmed", "recreated", "cut short"]
    why: str
    first: int
    last: int | None = None

    @property
    def count(self) -> int | None:
        """How many messages at most; None where nobody can tell."""
        return None if self.last is None else self.last - self.first + 1

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.why}; what came after sequence {self.first - 1} in it is gone"
        return f"{self.why}; sequences {self.first} to {self.last}, at most {self.count} messages, are gone"


@dataclass(frozen=True, slots=True)
class Range:
    """What can be read: (after, upto] of the stream as it is now, and what is missing before or in it."""

    after: int
    upto: int
    loss: Loss | None = None


def resume(start: Offset, stand: Stand) -> Range:
    """From where reading goes on after `start`, up to all there is now."""
    if start.created != stand.created:
        return Range(stand.first - 1, stand.last, _recreated(start, stand))
    if stand.last < start.sequence:
        why = (
            f"stream {stand.stream!r} ends at {stand.last}, and {start.sequence} was read before: its newest messages "
            "were lost or an older copy was restored"
        )
        return Range(stand.last, stand.last, Loss("cut short", why, stand.last + 1))
    if stand.first > start.sequence + 1:
        why = f"stream {stand.stream!r} was trimmed or purged and begins at {stand.first} now"
        return Range(stand.first - 1, stand.last, Loss("trimmed", why, start.sequence + 1, stand.first - 1))
    return Range(start.sequence, stand.last)


def planned(start: Offset, end: Offset, stand: Stand) -> Range:
    """What can be read of a batch that was planned from `start` to `end`."""
    if end.created != stand.created:
        first = start.sequence + 1 if start.created == end.created else 1
        loss = Loss("recreated", _recreated(end, stand).why, first, max(first, end.sequence))
        return Range(stand.first - 1, stand.first - 1, loss)
    begun = resume(start, stand)
    if stand.last < end.sequence:
        why = (
            f"stream {stand.stream!r} ends at {stand.last}: its newest messages were lost or an older copy was restored"
        )
        return Range(
            min(begun.after, stand.last),
            stand.last,
            begun.loss or Loss("cut short", why, stand.last + 1, end.sequence),
        )
    if begun.after > end.sequence:
        assert begun.loss is not None
        return Range(end.sequence, end.sequence, Loss(begun.loss.kind, begun.loss.why, begun.loss.first, end.sequence))
    return Range(begun.after, end.sequence, begun.loss)


def _recreated(old: Offset, stand: Stand) -> Loss:
    why = (
        f"stream {stand.stream!r} was deleted and made anew: the one that was read is of {old.created}, this one of "
        f"{stand.created}"
    )
    return Loss("recreated", why, old.sequence + 1)
