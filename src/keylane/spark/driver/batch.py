"""Plans a batch read on the driver: where it starts, where it ends, and the splits in between."""

from __future__ import annotations

from datetime import UTC, datetime

from keylane.core.subjects import shown
from keylane.errors import InvalidInput
from keylane.spark.driver.losses import Losses
from keylane.spark.driver.offsets import Range, Stand, planned
from keylane.spark.driver.options import Position, ReadOptions
from keylane.spark.driver.planning import plan
from keylane.spark.driver.standing import Source, warn_without_keys
from keylane.spark.executor.split import Reading, Split


def plan_batch(options: ReadOptions) -> list[Split]:
    """The splits of a batch read."""
    source = Source(options)
    warn_without_keys(source.layout)
    stand = source.stand()
    start = starting_at(options.start, source, stand)
    end = _ending_at(options.end, source, stand)
    if end < start and "sequence" in (options.start.kind, options.end.kind):
        raise InvalidInput(
            f"the read would start at sequence {start + 1} and end at {end} (starting {options.start}, ending "
            f"{options.end}): stream {stand.stream!r} holds {stand.first} to {stand.last}"
        )
    found = planned(stand.at(start), stand.at(max(start, end)), stand)
    if found.loss is not None and not (found.loss.kind == "trimmed" and source.layout.is_queue):
        Losses(fatal=options.fail_on_data_loss).report(found.loss)
    return make_splits(source, found, stand, newest=None, head_may_go=may_begin_later(options.start))


def starting_at(position: Position, source: Source, stand: Stand) -> int:
    """The sequence before the first one to read."""
    if position.kind == "earliest":
        return stand.first - 1
    if position.kind == "latest":
        return stand.last
    if position.kind == "sequence":
        if position.sequence > stand.last + 1:
            raise InvalidInput(
                f"option 'startingOffsets' is {position.sequence}: stream {stand.stream!r} holds {stand.first} to "
                f"{stand.last}; give at most {stand.last + 1}, which is the next one"
            )
        return position.sequence - 1
    if position.time > datetime.now(UTC):
        raise InvalidInput(f"option 'startingTimestamp' is {shown(str(position))}, which is in the future")
    before = source.before(position.time)
    return stand.last if before is None else min(before, stand.last)


def may_begin_later(position: Position) -> bool:
    """Whether the start is whatever the stream begins with: if that goes away before it is read, nothing is lost."""
    return position.kind in ("earliest", "time")


def make_splits(
    source: Source, found: Range, stand: Stand, *, newest: dict[str | None, int] | None, head_may_go: bool
) -> list[Split]:
    """The splits of a range; `newest` if it was asked for when the end of the range was there already."""
    if found.upto <= found.after:
        return []
    options = source.options
    layout = source.layout
    reading = Reading(
        address=options.address,
        stream=layout.stream,
        way=layout.way,
        numbered=layout.numbered,
        partitioning=layout.partitioning,
        with_headers=options.with_headers,
        with_data=options.with_data,
    )
    pieces = plan(
        found.after,
        found.upto,
        newest if newest is not None else source.newest(stand),
        split_by=layout.split_by,
        min_partitions=options.min_partitions,
    )
    return [
        Split(
            reading,
            one.after,
            one.upto,
            one.subject_filter,
            one.last,
            created=stand.created,
            head_may_go=head_may_go,
        )
        for one in pieces
    ]


def _ending_at(position: Position, source: Source, stand: Stand) -> int:
    """The last sequence to read."""
    if position.kind == "sequence":
        if position.sequence > stand.last:
            raise InvalidInput(
                f"option 'endingOffsets' is {position.sequence}: the newest message of stream {stand.stream!r} is "
                f"{stand.last}; give at most that, or latest"
            )
        return position.sequence
    if position.kind == "time":
        before = source.before(position.time)
        return stand.last if before is None else min(before, stand.last)
    return stand.last
