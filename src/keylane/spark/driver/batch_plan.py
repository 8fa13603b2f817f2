"""Plans a batch on the driver: where it starts, where it ends, and the splits in between, one for each task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from keylane.core.subjects import shown
from keylane.errors import InvalidInput
from keylane.spark.driver.filter_pushdown import PushedFilters
from keylane.spark.driver.offsets import Offset, ReadableRange, planned
from keylane.spark.driver.source_stream import SourceStream, warn_without_keys
from keylane.spark.options import RangeBound, ReadOptions, SplitBy
from keylane.spark.stream_state import Losses, StreamSnapshot
from keylane.spark.tasks import ReadSpec, Split

SEQUENCES_A_PIECE = 250_000
MOST_PIECES = 32
"""What a read by sequence is cut into where `minPartitions` says nothing."""
CLOCKS_APART = timedelta(seconds=1)
"""When another server becomes the leader of a stream, times may go back by the difference of their clocks."""


@dataclass(frozen=True, slots=True)
class SplitRange:
    """(after, upto] of what matches a filter; None is the whole stream. `last` is the newest that matches it."""

    subject_filter: str | None
    after: int
    upto: int
    last: int


def plan(
    after: int, upto: int, newest: Mapping[str | None, int], *, split_by: SplitBy, min_partitions: int | None = None
) -> list[SplitRange]:
    """The pieces of (after, upto]: each message that matches a filter is in exactly one of them.

    `newest` has the last sequence of each filter, asked for when `upto` was in the stream already. A filter with
    nothing behind `after` gets no piece.

    >>> plan(0, 100, {"0.>": 98, "1.>": 0}, split_by="partition")
    [SplitRange(subject_filter='0.>', after=0, upto=98, last=98)]
    """
    live = {one: last for one, last in newest.items() if last > after}
    if not live or upto <= after:
        return []
    wanted = min_partitions or (_usual(upto - after) if split_by == "sequence" else 1)
    cuts = -(-wanted // len(live))
    return [
        SplitRange(one, low, high, last)
        for one, last in live.items()
        for low, high in _cut(after, min(upto, last), cuts)
    ]


def _usual(sequences: int) -> int:
    return min(MOST_PIECES, -(-sequences // SEQUENCES_A_PIECE))


def _cut(after: int, upto: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Neighbouring ranges of nearly the same length, none of them empty."""
    span = upto - after
    pieces = min(pieces, span)
    for index in range(pieces):
        yield after + span * index // pieces, after + span * (index + 1) // pieces


def plan_batch(
    options: ReadOptions, source: SourceStream | None = None, pushed: PushedFilters | None = None
) -> list[Split]:
    """The splits of a batch read; `pushed`: of what filters leave of it."""
    source = source or SourceStream(options)
    warn_without_keys(source.layout)
    state = source.state()
    start = starting_at(options.start, source, state)
    end = _ending_at(options.end, source, state)
    if end < start and "sequence" in (options.start.kind, options.end.kind):
        raise InvalidInput(
            f"the read would start at sequence {start + 1} and end at {end} (starting {options.start}, ending "
            f"{options.end}): stream {state.stream!r} holds {state.first} to {state.last}"
        )
    if pushed is not None:
        if pushed.is_empty:
            return []
        start, end = _narrowed(start, end, pushed, source)
        source.narrow(pushed.layout)
    found = planned(Offset.at(state, start), Offset.at(state, max(start, end)), state)
    if found.loss is not None and not (found.loss.kind == "trimmed" and source.layout.is_queue):
        Losses(fatal=options.fail_on_data_loss).report(found.loss)
    return make_splits(source, found, state, newest=None, head_may_go=may_begin_later(options.start))


def _narrowed(start: int, end: int, pushed: PushedFilters, source: SourceStream) -> tuple[int, int]:
    """What filters on sequence and time leave of (start, end]."""
    apart = CLOCKS_APART if source.replicas > 1 else timedelta()
    start = max(start, pushed.after)
    if pushed.upto is not None:
        end = min(end, pushed.upto)
    if pushed.since is not None:
        before = source.before(pushed.since - apart)
        start = end if before is None else max(start, before)
    if pushed.until is not None and (before := source.before(pushed.until + apart)) is not None:
        end = min(end, before)
    return start, end


def starting_at(position: RangeBound, source: SourceStream, state: StreamSnapshot) -> int:
    """The sequence before the first one to read."""
    if position.kind == "earliest":
        return state.first - 1
    if position.kind == "latest":
        return state.last
    if position.kind == "sequence":
        if position.sequence > state.last + 1:
            raise InvalidInput(
                f"option 'startingOffsets' is {position.sequence}: stream {state.stream!r} holds {state.first} to "
                f"{state.last}; give at most {state.last + 1}, which is the next one"
            )
        return position.sequence - 1
    if position.time > datetime.now(UTC):
        raise InvalidInput(f"option 'startingTimestamp' is {shown(str(position))}, which is in the future")
    before = source.before(position.time)
    return state.last if before is None else min(before, state.last)


def may_begin_later(position: RangeBound) -> bool:
    """Whether the start is whatever the stream begins with: if that goes away before it is read, nothing is lost."""
    return position.kind in ("earliest", "time")


def make_splits(
    source: SourceStream,
    found: ReadableRange,
    state: StreamSnapshot,
    *,
    newest: dict[str | None, int] | None,
    head_may_go: bool,
) -> list[Split]:
    """The splits of a range; `newest` if it was asked for when the end of the range was there already."""
    if found.upto <= found.after:
        return []
    options = source.options
    layout = source.layout
    reading = ReadSpec(
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
        newest if newest is not None else source.newest(state),
        split_by=layout.split_by,
        min_partitions=options.min_partitions,
    )
    return [
        Split(
            reading, one.after, one.upto, one.subject_filter, one.last, created=state.created, head_may_go=head_may_go
        )
        for one in pieces
    ]


def _ending_at(position: RangeBound, source: SourceStream, state: StreamSnapshot) -> int:
    """The last sequence to read."""
    if position.kind == "sequence":
        if position.sequence > state.last:
            raise InvalidInput(
                f"option 'endingOffsets' is {position.sequence}: the newest message of stream {state.stream!r} is "
                f"{state.last}; give at most that, or latest"
            )
        return position.sequence
    if position.kind == "time":
        before = source.before(position.time)
        return state.last if before is None else min(before, state.last)
    return state.last
