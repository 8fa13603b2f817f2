"""Streams that keylane keeps beside a user's stream: one for dead letters, one for delayed retries.

Creates what is missing, with the storage and the replicas of the user's stream. Never changes what is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nats.js.api import StorageType

from keylane.errors import ApiError, GroupConflict, NotFound
from keylane.jetstream import streams

if TYPE_CHECKING:
    from keylane.jetstream import Connection

DUPLICATE_WINDOW_S = 3600
"""A message is stored again when another instance has failed on it too: long after the first time."""

_EXISTS_DIFFERENTLY = 10058
_SUBJECTS_OVERLAP = 10065


async def ensure_side_stream(
    connection: Connection, name: str, subjects: str, *, purpose: str, like: str, **fields: Any
) -> None:
    """Create the stream if it does not exist. One that exists keeps its limits.

    It gets the storage and the replicas of the stream `like`. `purpose`: what is in it, for errors. `fields`: in the
    server's words; those that are True must hold of an existing one too.
    """
    needed = [field for field, value in fields.items() if value is True]
    if await _is_there(connection, name, subjects, purpose, needed):
        return
    model = (await streams.info(connection, like)).config
    wanted = {
        "name": name,
        "subjects": [subjects],
        "storage": StorageType(model.storage or "file").value,
        "num_replicas": model.num_replicas or 1,
        "duplicate_window": DUPLICATE_WINDOW_S * 1_000_000_000,
        "allow_direct": True,
        **fields,
    }
    try:
        await streams.create_json(connection, wanted)
    except ApiError as error:
        if error.err_code == _SUBJECTS_OVERLAP:
            raise GroupConflict(
                f"stream {name!r} needs the subjects {subjects!r}, which another stream takes: "
                "give that one narrower subjects"
            ) from error
        if error.err_code != _EXISTS_DIFFERENTLY or not await _is_there(connection, name, subjects, purpose, needed):
            raise


async def _is_there(connection: Connection, name: str, subjects: str, purpose: str, needed: list[str]) -> bool:
    try:
        config = (await streams.info_json(connection, name))["config"]
    except NotFound:
        return False
    if subjects not in (config.get("subjects") or ()):
        raise GroupConflict(
            f"stream {name!r} is there and does not take {subjects!r}: it is not for {purpose}; "
            "rename it, or add the subjects"
        )
    if lacking := [field for field in needed if not config.get(field)]:
        raise GroupConflict(f"stream {name!r} is there without {lacking[0]}: set it, or delete the stream")
    return True
