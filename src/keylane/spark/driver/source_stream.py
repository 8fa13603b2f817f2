"""The stream that a query reads, as the driver sees it: its layout, its group, the newest message of each filter.

Asks the stream's leader. Never reads messages for Spark.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from keylane.errors import ApiUnavailable, InvalidInput, NotFound
from keylane.groups import ElasticConfig, get_config, queue_stream
from keylane.jetstream import Connection, streams
from keylane.spark.driver.layout import GroupRecord, Layout, Numbering, lay_out, numbering
from keylane.spark.driver.offsets import Offset
from keylane.spark.options import ReadOptions
from keylane.spark.retry import ask
from keylane.spark.stream_state import StreamSnapshot, state_of, stream_info

_log = logging.getLogger("keylane.spark")

_SUBJECTS_LOOKED_AT = 100_000
"""The server lists this many subjects in one answer. A stream with more is taken as its configuration says."""
_NO_MESSAGE = 10037
LEADER_PATIENCE_S = 10.0
_LEADER_PAUSE_S = 0.25
_LEADERS = 20

_warned: set[str] = set()
"""Streams whose unknown keys this process has logged."""


class SourceStream:
    """The stream that a query reads, seen from the driver. Sends no request before the first call."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self._layout: Layout | None = None
        self.replicas = 1

    @property
    def layout(self) -> Layout:
        """What is read; looked up once."""
        if self._layout is None:
            self._layout = ask(self.options.address, self._find_layout, f"look at stream {self.options.stream!r}")
        return self._layout

    def narrow(self, layout: Layout) -> None:
        """Read no more than this layout of the same stream."""
        self._layout = layout

    @property
    def queue(self) -> str | None:
        """The queue that the group would have if it is elastic."""
        return None if self.options.group is None else queue_stream(self.options.stream, self.options.group)

    def state(self, least: Offset | None = None) -> StreamSnapshot:
        """The stream as it is now.

        `least` is known to be in it. A newly elected leader may not have stored everything yet that the one before it
        had, so it gets some time. A stream that still ends before `least` has lost something.
        """
        deadline = time.monotonic() + LEADER_PATIENCE_S
        while True:
            state = state_of(self.options.address, self.layout.stream)
            behind = least is not None and state.created == least.created and state.last < least.sequence
            if not behind or time.monotonic() > deadline:
                return state
            time.sleep(_LEADER_PAUSE_S)

    def newest(self, state: StreamSnapshot) -> dict[str | None, int]:
        """The last sequence of each filter; 0 where nothing matches. Everything that is in `state` counts."""
        layout = self.layout

        async def look(connection: Connection) -> dict[str | None, int]:
            found = await asyncio.gather(*(_last(connection, layout.stream, one) for one in layout.subject_filters))
            return dict(zip(layout.subject_filters, found, strict=True))

        for _ in range(_LEADERS):
            found = ask(self.options.address, look, f"look at stream {layout.stream!r}")
            if state.leader is None:
                return found
            # Another leader may have answered, and it may not have had everything yet.
            now = self.state(least=Offset.at(state, state.last))
            if now.leader == state.leader:
                return found
            state = now
        raise ApiUnavailable(
            f"stream {layout.stream!r} changed its leader {_LEADERS} times in a row: check its servers"
        )

    def before(self, time: datetime) -> int | None:
        """The sequence before the first message that is not older than `time`; None if all are older."""
        name = self.layout.stream

        async def look(connection: Connection) -> int | None:
            found = await _sequence_of(connection, name, start_time=time, next_by_subject=">")
            return found - 1 if found else None

        return ask(self.options.address, look, f"look for the first message since {time.isoformat()} in {name!r}")

    async def _find_layout(self, connection: Connection) -> Layout:
        options = self.options
        group: GroupRecord | None = None
        name = options.stream
        if options.group is not None:
            await stream_info(connection, options.stream)
            group = await get_config(connection, options.stream, options.group)
            if options.queue and not isinstance(group, ElasticConfig):
                raise InvalidInput(
                    f"option 'queue' is true, but group {options.group!r} of stream {options.stream!r} is static and "
                    "has no queue: leave 'queue' out; a static group is read from the stream itself"
                )
            if options.queue:
                name = queue_stream(options.stream, options.group)
        wire = await stream_info(connection, name)
        config = wire["config"]
        self.replicas = config["num_replicas"]
        numbers = numbering(config, await _origin(connection, config))
        stored = await _subjects(connection, wire) if _may_hold_strays(options, numbers) else ()
        return lay_out(options, config, group, numbers, stored)


def warn_without_keys(layout: Layout) -> None:
    """Log once in this process that nothing says what the key of a message is, and what to do about it."""
    if layout.partitioning or layout.stream in _warned:
        return
    _warned.add(layout.stream)
    _log.warning(
        "stream %r does not say what the key of a message is: the columns 'key' and 'partition' are null%s. Give "
        "option 'group' for the keys of one of its groups (`keylane elastic ls %s` lists them), or 'keyFilter', "
        "'keyWildcards' and 'keyPartitions'",
        layout.stream,
        " except for the partition numbers in its subjects" if layout.numbered else "",
        layout.stream,
    )


def _may_hold_strays(options: ReadOptions, numbers: Numbering) -> bool:
    named = options.group is not None or options.partitions is not None
    return bool(numbers.partitioning) and not named and options.split_by != "sequence"


async def _origin(connection: Connection, config: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration of the stream that this one copies as it is, if it is in our reach."""
    mirror = config.get("mirror") or {}
    if not mirror or mirror.get("subject_transforms") or mirror.get("external"):
        return None
    try:
        found: dict[str, Any] = (await streams.info_json(connection, mirror["name"]))["config"]
    except NotFound:
        return None
    return found


async def _subjects(connection: Connection, wire: dict[str, Any]) -> Iterable[str]:
    if wire["state"].get("num_subjects", 0) > _SUBJECTS_LOOKED_AT:
        return ()
    name = wire["config"]["name"]
    answer = await streams.info_json(connection, name, subjects_filter=">")
    found: Iterable[str] = answer["state"].get("subjects") or ()
    return found


async def _last(connection: Connection, stream: str, subject_filter: str | None) -> int:
    found = await _sequence_of(connection, stream, last_by_subject=subject_filter or ">")
    if found or subject_filter not in (None, ">"):
        return found
    # For `>` the server looks at the last sequence only, and that one may be deleted.
    return max([await _sequence_of(connection, stream, last_by_subject=each) for each in ("*", "*.>")])


async def _sequence_of(connection: Connection, stream: str, **message: Any) -> int:
    """The sequence of a message, named as for `streams.get_message`; 0 if there is none."""
    try:
        found = await streams.get_message(connection, stream, **message)
    except NotFound as error:
        if error.err_code == _NO_MESSAGE:
            return 0
        raise
    sequence: int = found["seq"]
    return sequence
