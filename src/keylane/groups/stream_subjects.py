"""Which subjects a stream stores, and whether a group's filters match them.

A subject transform, and those of sources, change what is published before it is stored; groups see what is stored. The
configuration of the stream answers first, and its messages where that says nothing. Changes nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace

from nats.js.api import StreamConfig, StreamInfo, StreamSource, SubjectTransform

from keylane.core.subjects import is_subset, overlaps
from keylane.errors import InvalidInput, KeylaneError, NotFound
from keylane.groups.config import ElasticConfig, StaticConfig
from keylane.jetstream import Connection, streams

_log = logging.getLogger("keylane.groups")

_INSERTED = re.compile(r"\{\{.*\}\}|\$\d+")
_PARTITION = re.compile(r"\{\{\s*[Pp]artition\s*\(")
_LOOKED_AT = 8
_SHOWN = 5


# ---- as the configuration says it -----------------------------------------------------------------------


def stored_subjects(config: StreamConfig) -> list[str] | None:
    """Filters that together match everything the stream can store; None where only its messages can tell.

    What a transform inserts is a `*` here.
    """
    transform = config.subject_transform
    found: list[str] = []
    for subject in config.subjects or ():
        if transform is None or not transform.dest:
            found.append(subject)
            continue
        source = transform.src or ">"
        if overlaps(subject, source):
            found.append(_pattern(transform.dest))
        if not is_subset(subject, source):
            found.append(subject)
    for other in [*([config.mirror] if config.mirror else []), *(config.sources or ())]:
        copied = _copied(other)
        if copied is None:
            return None
        found += copied
    return list(dict.fromkeys(found))


def can_store(config: StreamConfig, subject_filter: str) -> bool | None:
    """Whether the stream can store a subject that the filter selects; None where only its messages can tell."""
    transform = config.subject_transform
    untouched = config
    if transform is not None and transform.dest and is_subset(subject_filter, transform.src or ">"):
        # All that is published on such subjects is stored under others.
        covered = [one for one in config.subjects or () if overlaps(one, transform.src or ">")]
        untouched = replace(config, subjects=covered, subject_transform=SubjectTransform(src=">", dest=transform.dest))
    stored = stored_subjects(untouched)
    return None if stored is None else any(overlaps(subject_filter, one) for one in stored)


def may_carry_numbers(stored: str) -> bool:
    """Whether a subject that matches this filter can begin with a partition number.

    >>> may_carry_numbers("*.orders.>"), may_carry_numbers("orders.>")
    (True, False)
    """
    first = stored.split(".", 1)[0]
    return (first in ("*", ">") or first.isdecimal()) and overlaps(stored, "*.>")


def inserts_numbers(config: StreamConfig) -> bool:
    """Whether a transform that is applied, of the stream or of what it copies, puts a partition number in front."""
    copied = [*([config.mirror] if config.mirror else []), *(config.sources or ())]
    applied = [one for source in copied for one in source.subject_transforms or ()]
    own = config.subject_transform
    if own is not None and any(overlaps(one, own.src or ">") for one in config.subjects or ()):
        applied.append(own)
    return any(one.dest and _PARTITION.match(one.dest) for one in applied)


def _copied(source: StreamSource) -> list[str] | None:
    """What is copied from another stream; None if only that stream's configuration can tell."""
    if source.subject_transforms:
        return [_pattern(one.dest or one.src or ">") for one in source.subject_transforms]
    return [source.filter_subject] if source.filter_subject else None


def _pattern(destination: str) -> str:
    return ".".join("*" if _INSERTED.fullmatch(token) else token for token in destination.split("."))


# ---- as a new group sees it -----------------------------------------------------------------------------


async def check_partition_numbers(connection: Connection, group: str, config: StaticConfig, source: StreamInfo) -> None:
    """Check that a stream can have subjects that begin with a partition number, which a static group needs.

    Raises `InvalidInput` if it cannot; logs a warning if it has none yet.
    """
    stored, stream = stored_subjects(source.config), source.config.name
    if not inserts_numbers(source.config) and not await _has_numbers(connection, source, config.partitions):
        if stored is not None and not any(may_carry_numbers(one) for one in stored):
            raise InvalidInput(
                f"stream {stream!r} has no partition numbers: it stores {_listed(stored)}, so no member could get a "
                "message. Give the stream a subject transform that begins with "
                f"{{{{Partition({config.partitions},…)}}}} first, or create an elastic group, which takes any stream"
            )
        _log.warning(
            "group %r: stream %r has no transform that inserts partition numbers, and no message there begins with one "
            "yet; members get only what is published on subjects that begin with 0 to %d",
            group,
            stream,
            config.partitions - 1,
        )
    for one in config.filters:
        numbered = (can_store(source.config, f"{number}.{one}") for number in range(config.partitions))
        if stored is not None and not any(numbered):
            _log.warning(
                "group %r: filter %r matches nothing that stream %r stores (%s); members get nothing of it. Filters of "
                "a static group are without the partition number",
                group,
                one,
                stream,
                _listed(stored),
            )


async def check_filters_match(connection: Connection, group: str, config: ElasticConfig, source: StreamInfo) -> None:
    """Log which filters of an elastic group match nothing."""
    stored, stream = stored_subjects(source.config), source.config.name
    if stored is None and not source.state.messages:
        return
    for one in config.group_filters:
        if can_store(source.config, one) or await _has_message(connection, source, one):
            continue
        _log.warning(
            "group %r: filter %r matches nothing that stream %r stores (%s); members get nothing of it. Delete the "
            "group and create it with another filter, unless the stream is to be changed",
            group,
            one,
            stream,
            "it copies other streams, and has no such message yet" if stored is None else _listed(stored),
        )


async def _has_numbers(connection: Connection, source: StreamInfo, partitions: int) -> bool:
    for partition in range(min(partitions, _LOOKED_AT)):
        if await _has_message(connection, source, f"{partition}.>"):
            return True
    return False


async def _has_message(connection: Connection, source: StreamInfo, subject_filter: str) -> bool:
    if not source.state.messages:
        return False
    try:
        await streams.get_message(connection, source.config.name or "", last_by_subject=subject_filter)
    except NotFound:
        return False
    except KeylaneError as error:  # this is for a warning only
        _log.debug("cannot look for %s in stream %s: %s", subject_filter, source.config.name, error)
    return True


def _listed(subjects: Sequence[str]) -> str:
    more = f" and {len(subjects) - _SHOWN} more" if len(subjects) > _SHOWN else ""
    return (", ".join(subjects[:_SHOWN]) or "nothing") + more
