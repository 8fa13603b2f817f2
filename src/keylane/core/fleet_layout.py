"""Which layout a fleet takes: one consumer for each partition, or one for each worker.

The figures behind the rule are in docs/fleet.md. What decides, first match:

| stream | partitions | layout | why |
| --- | --- | --- | --- |
| one replica, files, 100 to 50,000 distinct subjects | up to 10,000 | partition | a second filter costs ten times |
| one replica, anything else | up to 1,000 | partition | moves disturb nobody; servers allow 1,000 consumers |
| one replica, anything else | more | worker | consumers cost more than filters |
| replicated | up to 100 | partition | as above |
| replicated, files, 100 to 50,000 distinct subjects | up to 1,000 | partition | Raft groups cost less than filters |
| replicated | more | worker | every consumer is a Raft group |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Layout = Literal["partition", "worker"]

_FEW_SUBJECTS, _MANY_SUBJECTS = 100, 50_000
_DEFAULT_MAX_CONSUMERS = 1000
_MOST_CONSUMERS = 10_000
_MOST_RAFT_GROUPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamShape:
    """What the choice depends on."""

    in_files: bool
    replicas: int
    subjects: int
    """Distinct ones that the stream holds now; 0: it is empty, and nobody knows."""
    partitions: int


class LayoutChoice(NamedTuple):
    layout: Layout
    reason: str


def choose_layout(shape: StreamShape) -> LayoutChoice:
    """The layout for a fleet that is created now; it stays what it is.

    >>> choose_layout(StreamShape(in_files=False, replicas=1, subjects=640, partitions=32)).layout
    'partition'
    """
    count = shape.partitions
    is_steep = shape.in_files and _FEW_SUBJECTS <= shape.subjects <= _MANY_SUBJECTS
    if shape.replicas > 1:
        most = _DEFAULT_MAX_CONSUMERS if is_steep else _MOST_RAFT_GROUPS
        cost = f"each of {count} replicated consumers would be a Raft group"
    else:
        most = _MOST_CONSUMERS if is_steep else _DEFAULT_MAX_CONSUMERS
        cost = f"{count} consumers cost a server more than filters"
    if count > most:
        return LayoutChoice("worker", cost)
    if is_steep:
        return LayoutChoice(
            "partition", f"on file storage with {shape.subjects} distinct subjects a second filter costs ten times"
        )
    return LayoutChoice("partition", f"{count} consumers are cheap, and a move disturbs no other partition")
