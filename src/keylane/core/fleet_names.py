"""Names of a fleet: the fleet's own, the ids of its partitions, their consumers, and collisions with groups.

Owns: how these names are made, and which are refused. Never asks a server whether a name is taken.

A consumer is called `<fleet>-p<partition id>`. A partition id is a number (`3`), or a readable form of the partition's
subject with a digest (`dc-etch1-1f0c22ab90`). So no two partitions, of one fleet or of two on the same stream, share a
name: after the last `-` comes either `p` and digits, or ten hexadecimal digits that stand for one subject. Where a
worker has one consumer for all its partitions, that is called as the worker: `<fleet>-<n>`, of at most six digits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256

from keylane.core.subjects import shown
from keylane.errors import InvalidInput

MAX_FLEET_NAME = 128
"""Characters. The consumer of every partition fits into the 255 bytes that the server takes."""

_FLEET_NAME = re.compile(rf"[-_=A-Za-z0-9]{{1,{MAX_FLEET_NAME}}}")
_LABEL = re.compile(r"[-_=A-Za-z0-9]{1,64}")
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9]+")
_WORKER_CONSUMER = re.compile(r"(0|[1-9][0-9]{0,5})(=[1-9][0-9]*)?")
_READABLE_CHARS = 40
_DIGEST_CHARS = 10


def check_fleet_name(name: str) -> str:
    """Return the name of a fleet unchanged, or raise `InvalidInput`."""
    if not isinstance(name, str) or not _FLEET_NAME.fullmatch(name):
        raise InvalidInput(
            f"fleet name {shown(name)} is part of KV keys and of consumer names: "
            f"use 1 to {MAX_FLEET_NAME} of A-Z, a-z, 0-9, '-', '_' and '='"
        )
    return name


def check_label(label: str) -> str:
    """Return the label of a worker or a partition unchanged, or raise `InvalidInput`."""
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        raise InvalidInput(f"label {shown(label)}: use 1 to 64 of A-Z, a-z, 0-9, '-', '_' and '='")
    return label


def subject_id(subject: str) -> str:
    """The id of a partition that is a subject or filter of its own: readable, and another for every subject.

    >>> subject_id("dc.etch1.*.completion")
    'dc-etch1-completion-8361a88417'
    """
    digest = sha256(subject.encode("utf-8", "surrogateescape")).hexdigest()[:_DIGEST_CHARS]
    readable = _NOT_IN_IDS.sub("-", subject).strip("-")[:_READABLE_CHARS].strip("-")
    return f"{readable or 'subject'}-{digest}"


def partition_consumer(fleet: str, partition_id: str) -> str:
    """The name of a partition's consumer.

    >>> partition_consumer("billing", "3")
    'billing-p3'
    """
    return f"{fleet}-p{partition_id}"


def worker_consumer(worker_id: str, number: int = 0) -> str:
    """The name of a worker's consumer: its id, `<fleet>-<n>`. A second consumer, where it is needed, has a number.

    >>> worker_consumer("billing-3"), worker_consumer("billing-3", 1)
    ('billing-3', 'billing-3=1')
    """
    return f"{worker_id}={number}" if number else worker_id


def worker_in(consumer: str, fleet: str) -> int | None:
    """The number of the worker that a consumer belongs to; None: it is not a worker's of this fleet.

    >>> worker_in("billing-3=1", "billing"), worker_in("billing-p3", "billing")
    (3, None)
    """
    found = _WORKER_CONSUMER.fullmatch(consumer.removeprefix(f"{fleet}-")) if consumer.startswith(f"{fleet}-") else None
    return int(found[1]) if found is not None else None


def check_collisions(
    stream: str,
    fleet: str,
    consumers: Iterable[str],
    *,
    static: Mapping[str, Collection[str]],
    elastic: Collection[tuple[str, str]],
) -> None:
    """Raise `InvalidInput` if a fleet would share a name with a group.

    `consumers`: the names that the fleet needs on its stream. `static`: the static groups of the stream, each with its
    members. `elastic`: every elastic group of the account, as pairs of stream and group. A group of the same name on
    the same stream is refused as a whole: what is kept by group, such as the tables of exactly once, would be shared.
    """
    for source, group in sorted(elastic):
        if f"{source}-{group}" == stream:
            raise InvalidInput(
                f"stream {shown(stream)} is the queue of the elastic group {shown(group)} on {shown(source)}, and its "
                f"members take every message: join the fleet on {shown(source)}"
            )
    kinds = [(name, "a static") for name in static]
    kinds += [(group, "an elastic") for source, group in elastic if source == stream]
    for name, kind in kinds:
        if name == fleet:
            raise InvalidInput(
                f"fleet {shown(fleet)} has the name of {kind} group on stream {shown(stream)}: choose another name"
            )
    needed = frozenset(consumers)
    for group, members in sorted(static.items()):
        for member in sorted(members):
            if f"{group}-{member}" in needed:
                raise InvalidInput(
                    f"consumer {shown(f'{group}-{member}')} belongs to member {shown(member)} of the static group "
                    f"{shown(group)}, and fleet {shown(fleet)} needs the name: choose another name for the fleet"
                )
