"""The stream of a journal: its name, its subjects, its settings.

Its name ends in `+journal`. No group's queue (`<stream>-<group>`) can have such a name: a group's name contains no `+`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StoreCompression, StreamConfig

from keylane.core.names import check_group_name, check_member_name, check_stream_name
from keylane.core.subjects import is_subset
from keylane.errors import ApiError, InvalidInput, JournalConflict, NotFound
from keylane.jetstream import check_seconds, existing_stream, streams

if TYPE_CHECKING:
    from keylane.jetstream import Connection

DEFAULT_MAX_AGE_S = 7 * 24 * 3600.0
DUPLICATE_WINDOW_S = 120.0
_SUFFIX = "+journal"
_EXISTS_DIFFERENTLY = 10058
_SUBJECTS_OVERLAP = 10065


def journal_stream(stream: str) -> str:
    """The name of the stream that holds the journal of this stream's groups.

    >>> journal_stream("ORDERS")
    'ORDERS+journal'
    """
    return check_stream_name(check_stream_name(stream) + _SUFFIX)


def journal_subject(stream: str, group: str | None = None, member: str | None = None) -> str:
    """The subject of a member's batches; without names, a filter.

    >>> journal_subject("ORDERS", "billing")
    'keylane.journal.ORDERS.billing.*'
    """
    check_stream_name(stream)
    group_token = "*" if group is None else check_group_name(group)
    member_token = "*" if member is None else check_member_name(member)
    return f"keylane.journal.{stream}.{group_token}.{member_token}"


async def prepare(
    connection: Connection, stream: str, *, max_age_s: float | None = None, max_bytes: int | None = None
) -> None:
    """Create the journal's stream, or check the existing one.

    Given limits must be those of the stream; omitted limits stay as they are.
    """
    if max_age_s is not None:
        check_seconds(max_age_s, "max_age_s")
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1):
        raise InvalidInput(f"max_bytes is {max_bytes!r}: give a whole number, at least 1, or nothing for no limit")
    name = journal_stream(stream)
    try:
        found = (await streams.info(connection, name)).config
    except NotFound:
        found = await _create(connection, stream, max_age_s, max_bytes)
    if problem := _problem(found, stream) or _other_limits(found, max_age_s, max_bytes):
        raise JournalConflict(f"stream {name!r} cannot hold the journal of {stream!r}: {problem}")


async def _create(connection: Connection, stream: str, max_age_s: float | None, max_bytes: int | None) -> StreamConfig:
    name = journal_stream(stream)
    source = await existing_stream(connection, stream)
    age_s = DEFAULT_MAX_AGE_S if max_age_s is None else max_age_s
    config = StreamConfig(
        name=name,
        description=f"What the members of {stream}'s groups did",
        subjects=[f"keylane.journal.{stream}.>"],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        num_replicas=source.config.num_replicas,
        max_age=age_s,
        max_bytes=max_bytes,
        duplicate_window=min(DUPLICATE_WINDOW_S, age_s),
        compression=StoreCompression.S2,
        allow_direct=True,
    )
    try:
        return (await streams.create(connection, config)).config
    except ApiError as error:
        if error.err_code == _SUBJECTS_OVERLAP:
            raise JournalConflict(
                f"another stream has subjects below keylane.journal.{stream}, so the journal cannot use {name!r}: "
                f"remove these subjects from the other stream ({error})"
            ) from error
        if error.err_code != _EXISTS_DIFFERENTLY:
            raise
    # Another member created it at the same time, with other limits.
    return (await streams.info(connection, name)).config


def _problem(config: StreamConfig, stream: str) -> str:
    """Why a stream would lose or change published messages; empty if it would not."""
    needed = f"keylane.journal.{stream}.>"
    if not any(is_subset(needed, subject) for subject in config.subjects or ()):
        return f"its subjects are {config.subjects}, without {needed}; add it, or rename that stream"
    wrong = {
        f"retention is {config.retention}, not limits": config.retention != RetentionPolicy.LIMITS,
        f"discard is {config.discard}, not old": config.discard not in (None, DiscardPolicy.OLD),
        "allow_direct is off": not config.allow_direct,
        "no_ack is on": bool(config.no_ack),
        "it is sealed": bool(config.sealed),
        "it has a subject transform": config.subject_transform is not None,
        f"max_msgs_per_subject is {config.max_msgs_per_subject}": (config.max_msgs_per_subject or 0) > 0,
    }
    found = [text for text, is_so in wrong.items() if is_so]
    return f"{', '.join(found)}; change it, or delete the stream, and keylane creates it again" if found else ""


def _other_limits(config: StreamConfig, max_age_s: float | None, max_bytes: int | None) -> str:
    if max_age_s is not None and config.max_age != max_age_s:
        return f"max_age is {config.max_age} s there and {max_age_s} s here; change one of the two, or give none"
    if max_bytes is not None and config.max_bytes != max_bytes:
        return f"max_bytes is {config.max_bytes} there and {max_bytes} here; change one of the two, or give none"
    return ""
