"""Which partitions of a stream a handler's fleet shares, and whether through a copy. Never changes an existing stream.

- The stream has a transform that numbers its subjects: the fleet reads the stream itself.
- It has none: the fleet makes a copy of it that has (`<stream>-<group>`), and trims what is handled.
- It does not exist: an error, or, where the app may create streams, a new one with the transform.
"""

from __future__ import annotations

import logging

from keylane.app.handler import AppHandler
from keylane.core.fleet_partitions import source_from_wire
from keylane.core.name_suggestions import similar_name
from keylane.core.partitions import Partitioning, parse_transform
from keylane.errors import GroupError, NotFound
from keylane.fleet import HashedPartitions, StreamCopy, hashed, stored_spec
from keylane.groups import can_store
from keylane.jetstream import Connection, StreamConfig, StreamInfo, streams

_log = logging.getLogger("keylane.app")

PARTITIONS = 32


async def stream_of(connection: Connection, handler: AppHandler, *, may_create: bool) -> StreamInfo:
    """The stream of a handler, created where that is allowed and needed."""
    try:
        return await streams.info(connection, handler.stream)
    except NotFound as error:
        if not may_create or handler.partition_by is None:
            raise await _no_stream(connection, handler, error) from error
    wanted = handler.partition_by.over(handler.partitions or PARTITIONS)
    await streams.create_json(
        connection,
        {
            "name": handler.stream,
            "subjects": [wanted.filter],
            "subject_transform": {"src": wanted.filter, "dest": wanted.destination},
            "retention": "limits",
            "storage": "file",
            "num_replicas": 1,
            "allow_direct": True,
        },
    )
    _log.info("stream %r was created, with %d partitions of %r", handler.stream, wanted.partitions, wanted.filter)
    return await streams.info(connection, handler.stream)


async def partitions_of(connection: Connection, handler: AppHandler, config: StreamConfig) -> HashedPartitions:
    """What the fleet of a handler shares: as the fleet was created, else as the stream and the handler say."""
    spec = await stored_spec(connection, handler.stream, handler.group)
    stored = source_from_wire(spec.source) if spec is not None else None
    if isinstance(stored, HashedPartitions):
        by = handler.partition_by or stored.partitioning.by
        number = handler.partitions or stored.partitioning.partitions
        return hashed(number, by, copy=stored.copy)
    numbered = _numbered(config)
    if handler.partition_by is None:
        if numbered is None:
            raise GroupError(
                f"stream {handler.stream!r} numbers no partitions, and handler {handler.signature.name} does not say "
                "what they are: give it partition_by, such as partition_by='orders.*'"
            )
        return hashed(numbered.partitions, numbered.by)
    by = handler.partition_by
    number = handler.partitions or (numbered.partitions if numbered is not None else PARTITIONS)
    if numbered is not None or can_store(config, f"0.{by.filter}") is not False:
        return hashed(number, by)
    _log.info(
        "stream %r numbers no partitions: group %r reads a copy of it, stream %r, which is trimmed as it is handled",
        handler.stream,
        handler.group,
        f"{handler.stream}-{handler.group}",
    )
    return hashed(number, by, copy=StreamCopy())


async def check_output(connection: Connection, handler: AppHandler) -> None:
    """Refuse results that no stream takes: they could never be published."""
    assert handler.publish is not None
    pattern = handler.publish.pattern(handler.partition_by)
    if not await streams.names(connection, subject=pattern):
        raise GroupError(
            f"no stream takes what handler {handler.signature.name} publishes on {pattern!r}: create one, such as "
            f"`keylane stream create RESULTS --subjects '{pattern}'`"
        )


def _numbered(config: StreamConfig) -> Partitioning | None:
    transform = config.subject_transform
    if transform is None or not transform.dest:
        return None
    return parse_transform(transform.src or ">", transform.dest)


async def _no_stream(connection: Connection, handler: AppHandler, error: NotFound) -> NotFound:
    meant = similar_name(handler.stream, await streams.names(connection))
    by = handler.partition_by.filter if handler.partition_by is not None else "orders.*"
    advice = (
        f"did you mean {meant!r}?"
        if meant is not None
        else f"`keylane stream create {handler.stream} --partition-by '{by}' --partitions "
        f"{handler.partitions or PARTITIONS}` makes one, and so does App(…, create_streams=True)"
    )
    return NotFound(error.code, error.err_code, f"there is no stream {handler.stream!r}: {advice}")
