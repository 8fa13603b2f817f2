"""The stream that rows are written to, as it stood when the driver looked: what it takes and how it takes it.

Owns what is checked about a stream before anything is written. Travels to the executors.
"""

from __future__ import annotations

import logging
from typing import Any

from keylane.errors import InvalidInput, KeylaneError, NotFound
from keylane.jetstream import Connection, Version, streams, supports
from keylane.spark.retry import ask
from keylane.spark.tasks import PublishMethod, Target
from keylane.spark.write_options import WriteOptions

_log = logging.getLogger("keylane.spark")


SHORT_WINDOW_S = 120.0
_SERVER_DEFAULT_WINDOW_NS = 120_000_000_000

_warned: set[str] = set()
"""Every micro-batch looks at the stream."""


def look_at_target(options: WriteOptions) -> Target:
    """Ask the server for the stream, on the driver; raises `InvalidInput` where it cannot take the rows."""

    async def look(connection: Connection) -> tuple[dict[str, Any], Version]:
        answer = await streams.info_json(connection, options.stream)
        return answer["config"], connection.server_version

    try:
        config, version = ask(options.address, look, f"look at stream {options.stream!r}")
    except KeylaneError as error:
        if not isinstance(error, NotFound) and not isinstance(error.__cause__, NotFound):
            raise
        raise InvalidInput(
            f"there is no stream {options.stream!r} to write to: create it, or correct option 'stream'"
        ) from error
    target = target_of(config, version, options)
    if target.window_s < SHORT_WINDOW_S and target.stream not in _warned:
        _warned.add(target.stream)
        _log.warning(
            "stream %r remembers a message id for %g s only: what a task writes again after that is stored twice; "
            "raise its duplicate_window",
            target.stream,
            target.window_s,
        )
    return target


def target_of(config: dict[str, Any], version: Version, options: WriteOptions) -> Target:
    """The target in a stream's configuration; raises `InvalidInput` where it cannot take the rows."""
    name, subjects = config["name"], tuple(config.get("subjects") or ())
    if config.get("mirror") or not subjects:
        raise InvalidInput(
            f"stream {name!r} copies other streams and takes no subjects: write to the one that it copies"
        )
    if config.get("no_ack"):
        raise InvalidInput(f"stream {name!r} has no_ack: nothing written to it is confirmed; update it without no_ack")
    if config.get("sealed"):
        raise InvalidInput(f"stream {name!r} is sealed and takes nothing any more: write to another one")
    atomic = bool(config.get("allow_atomic")) and supports(version, "atomic_batch")
    if options.atomic == "true" and not atomic:
        raise InvalidInput(
            f"option 'atomic' is true, and stream {name!r} takes no atomic batches: update it with allow_atomic "
            "(nats-server 2.12 or newer), or give auto"
        )
    largest = int(config.get("max_msg_size", -1))
    target = Target(
        stream=name,
        subjects=subjects,
        max_message_bytes=largest if largest >= 0 else None,
        replicas=int(config.get("num_replicas") or 1),
        window_s=int(config.get("duplicate_window") or _SERVER_DEFAULT_WINDOW_NS) / 1e9,
        way=_way(config, version, options, atomic=atomic),
    )
    if options.subject is not None and not target.takes(options.subject):
        raise InvalidInput(
            f"option 'subject' is {options.subject!r}, which stream {name!r} does not take: its subjects are "
            f"{', '.join(subjects)}"
        )
    return target


def _way(config: dict[str, Any], version: Version, options: WriteOptions, *, atomic: bool) -> PublishMethod:
    if options.atomic == "true":
        return "atomic"
    if config.get("allow_batched") and supports(version, "fast_ingest"):
        return "ingest"
    return "atomic" if atomic and options.atomic == "auto" else "lanes"
