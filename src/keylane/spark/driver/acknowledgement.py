"""The durable progress of a query, reported to the stream: what is done leaves a queue, or no longer counts as lag.

By the stream's retention:

- work queue, `acknowledge=true`: the messages are purged, exactly up to the durable offset. Refused while anybody else
  reads them, at the start and again before every purge.
- interest, `acknowledge=true`: a durable consumer of the query keeps its messages, and is moved forward. Other
  consumers keep theirs.
- limits: nothing is deleted. A consumer that nobody reads is moved along, so that its `num_pending` is the query's lag.

Spark's checkpoint decides what is durable, not this module. Trouble with the server never ends a query; a refusal does,
because to go on would mean two readers of one queue.

Two queries that purge the same messages would each delete what the other has not read. So each claims its filters in
one record per stream, changed by compare-and-set. A claim counts for as long as the lease of its query is renewed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from keylane.core.subjects import is_subset, overlaps
from keylane.errors import AcknowledgeRefused, InvalidInput, KeylaneError, NoSuchGroup, NotFound, QueryFenced
from keylane.groups import get_config
from keylane.jetstream import AckPolicy, Connection, ConsumerConfig, ConsumerInfo, KvEntry, change, consumers, streams
from keylane.spark.driver.lease import Lease, LeaseExpiry
from keylane.spark.query_records import BUCKET, bucket_of, claim_key, lease_key

_log = logging.getLogger("keylane.spark.driver.acknowledgement")

# ---- work queues ---------------------------------------------------------------------------------------------


_AT_ONCE = 16
_ADVICE = (
    "Nothing is purged. A queue has one reader: stop the other one, or read without 'acknowledge', or let Spark read "
    "other partitions"
)


class QueuePurge:
    """The purges of one query. No filters: the whole stream."""

    def __init__(self, connection: Connection, stream: str, filters: Sequence[str]) -> None:
        self._connection = connection
        self._stream = stream
        self._filters = tuple(filters)

    async def try_out(self) -> None:
        """Purge nothing, so that a stream or a user that may not purge is known at once."""
        await streams.purge(self._connection, self._stream, before_sequence=1)

    async def refuse_if_shared(self, wire: Mapping[str, Any]) -> None:
        """Raise `AcknowledgeRefused` if somebody else reads these messages. `wire` is the stream's info of now."""
        await self._refuse_members(wire["config"])
        if wire["state"]["consumer_count"]:
            async for one in consumers.list_all(self._connection, self._stream):
                if self._meets(one.config):
                    raise AcknowledgeRefused(
                        f"acknowledge=true would delete messages of queue {self._stream!r} that its consumer "
                        f"{one.name!r} has not handled. {_ADVICE}. Delete the consumer if nobody uses it"
                    )

    async def purge(self, sequence: int) -> None:
        """Delete everything up to `sequence`."""
        filters: Sequence[str | None] = self._filters or (None,)
        for begin in range(0, len(filters), _AT_ONCE):
            await asyncio.gather(
                *(
                    streams.purge(self._connection, self._stream, subject_filter=one, before_sequence=sequence + 1)
                    for one in filters[begin : begin + _AT_ONCE]
                )
            )

    async def _refuse_members(self, config: Mapping[str, Any]) -> None:
        """A member may be listed and only not running: its messages wait for it."""
        for source in config.get("sources") or ():
            stream, _, group = self._stream.partition(f"{source['name']}-")
            if stream or not group:
                continue
            try:
                found = await get_config(self._connection, source["name"], group, kind="elastic")
            except NoSuchGroup:
                continue
            if found.plan.members:
                raise AcknowledgeRefused(
                    f"acknowledge=true would delete messages of queue {self._stream!r} that group {group!r} of stream "
                    f"{source['name']!r} has not handled: it has the members {', '.join(found.plan.members)}. {_ADVICE}"
                )

    def _meets(self, config: ConsumerConfig) -> bool:
        one = config.filter_subject
        theirs = config.filter_subjects or ((one,) if one else ())
        if not theirs or not self._filters:
            return True
        return any(overlaps(mine, other) for mine in self._filters for other in theirs)


# ---- interest and limits -------------------------------------------------------------------------------------


_QUERY = "keylane-query"


class ProgressConsumer:
    """The consumer `spark-<query>` of a stream. `keeps` messages for the query on streams with interest retention."""

    def __init__(
        self, connection: Connection, stream: str, query: str, filters: Sequence[str], *, keeps: bool = False
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._query = query
        self._keeps = keeps
        self._there = True
        ack_policy: AckPolicy = "explicit" if keeps else "none"
        self._config = ConsumerConfig(
            durable_name=f"spark-{query}",
            description=f"how far the Spark query {query} is; nobody reads here",
            ack_policy=ack_policy,
            filter_subjects=tuple(filters) or None,
            metadata={_QUERY: query},
        )

    @property
    def name(self) -> str:
        return f"spark-{self._query}"

    async def ensure(self) -> None:
        """Make the consumer, or take the one that an earlier run of the query made."""
        try:
            found = await consumers.info(self._connection, self._stream, self.name)
        except NotFound:
            await consumers.create(self._connection, self._stream, self._config, action="create")
            return
        if (found.config.metadata or {}).get(_QUERY) != self._query:
            raise InvalidInput(
                f"stream {self._stream!r} has a consumer {self.name!r} that is not the query's: delete it, or give the "
                "query another name"
            )
        if _filters(found) == sorted(self._config.filter_subjects or ()):
            return
        if self._keeps:
            raise InvalidInput(
                f"query {self._query!r} kept {', '.join(_filters(found)) or 'all'} of stream {self._stream!r} before, "
                f"and now reads {', '.join(self._config.filter_subjects or ()) or 'all'}: what it did not keep is "
                "gone. Give the old filters or partitions, or a new queryName and a new checkpoint directory"
            )
        await consumers.delete(self._connection, self._stream, self.name)
        await consumers.create(self._connection, self._stream, self._config, action="create")

    async def move(self, sequence: int) -> None:
        """Move behind `sequence`: what is pending then is what the query has not done."""
        if not self._connection.supports("consumer_reset"):
            await self._replace(sequence + 1)
            return
        if not self._there:
            await self.ensure()
        self._there = False  # a server without this consumer does not answer at all
        await consumers.reset(self._connection, self._stream, self.name, sequence=sequence + 1)
        self._there = True

    async def _replace(self, first: int) -> None:
        """Without resets (server 2.13 and older) a consumer is moved by recreating it."""
        assert not self._keeps, "without its consumer the stream would drop what the query has not read"
        with suppress(NotFound):
            await consumers.delete(self._connection, self._stream, self.name)
        moved = replace(self._config, deliver_policy="by_start_sequence", opt_start_seq=first)
        await consumers.create(self._connection, self._stream, moved, action="create")


def _filters(found: ConsumerInfo) -> list[str]:
    one = found.config.filter_subject
    return sorted(found.config.filter_subjects or ((one,) if one else ()))


# ---- both ----------------------------------------------------------------------------------------------------


_TELL_S = 5.0
_FINISH_S = 2.0
_PAUSE_S = 1.0
"""After trouble; and between two moves of a lag cursor, which cost the server more the more messages it counts."""


class Acknowledgement:
    """Mirrors the durable progress of one query to its stream. Made by `prepare`.

    >>> acknowledging = await Acknowledgement.prepare(connection, stream="ORDERS-billing", filters=("0.>", "1.>"),
    ...     whole=True, from_earliest=True, lease=lease, acknowledge=True)
    >>> await acknowledging.mirror(4711, created)   # with every durable offset
    >>> await acknowledging.finish()                # before the lease is released
    """

    def __init__(
        self, connection: Connection, stream: str, lease: Lease, way: QueuePurge | ProgressConsumer | None
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._lease = lease
        self._way = way
        self._newest: tuple[str, int] | None = None
        self._told: tuple[str, int] | None = None
        self._refused: AcknowledgeRefused | None = None
        self._trouble = ""
        self._not_before = 0.0
        self._news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Acknowledgement {self._stream} by {type(self._way).__name__}, told {self._told}>"

    @classmethod
    async def prepare(
        cls,
        connection: Connection,
        *,
        stream: str,
        filters: Sequence[str | None],
        whole: bool,
        from_earliest: bool,
        lease: Lease,
        acknowledge: bool,
    ) -> Acknowledgement:
        """Check everything and make what is needed; at the start of a query, once it has its lease.

        `stream` is what is read (the queue, of an elastic group), `filters` are those of the stored subjects, with
        partition numbers (None: no filter), `whole` says that they leave nothing out, and `from_earliest` that the
        query was started with everything there was.

        Raises `AcknowledgeRefused` where acknowledging would delete what others read (to find out whether another
        query lives can take that query's lease), `InvalidInput` where options and stream do not go together, and what
        the server says if it does not allow it.
        """
        wire = await streams.info_json(connection, stream)
        retention = wire["config"].get("retention", "limits")
        exact = tuple(one for one in filters if one is not None) if None not in filters else ()
        way: QueuePurge | ProgressConsumer | None = None
        if retention == "limits":
            way = await _lag_consumer(ProgressConsumer(connection, stream, lease.name, () if whole else exact))
        elif acknowledge and retention == "interest":
            connection.require("consumer_reset")
            way = ProgressConsumer(connection, stream, lease.name, exact, keeps=True)
            await way.ensure()
        elif acknowledge:
            if not from_earliest:
                raise InvalidInput(
                    f"option 'acknowledge' is true and the query does not start with the earliest message: what is "
                    f"older would be deleted from queue {stream!r} unread. Give startingOffsets=earliest"
                )
            way = QueuePurge(connection, stream, exact)
            await way.refuse_if_shared(wire)
            await way.try_out()
            await claim(connection, stream, wire["created"], exact, lease)
        made = cls(connection, stream, lease, way)
        if retention == "limits" and way is not None:
            made._following = asyncio.get_running_loop().create_task(made._follow())
        return made

    async def mirror(self, sequence: int, created: str) -> None:
        """Tell the stream that everything up to `sequence` is durably done; call it with every durable offset.

        `created` is the offset's: an offset of a stream that was recreated since says nothing about the new one.
        Returns at once where nothing changed. Trouble with the server is logged, and tried again with the next call.
        Raises `AcknowledgeRefused` if somebody else reads these messages now, and `QueryFenced` if the lease is lost:
        the query must end then. In both cases nothing was deleted.
        """
        self._lease.check()
        if self._refused is not None:
            raise self._refused
        self._newest = (created, sequence)
        if self._following is not None:
            self._news.set()
        elif self._newest != self._told and time.monotonic() >= self._not_before:
            await self._tell(_TELL_S)

    async def finish(self) -> None:
        """Tell the last progress, if that was not possible before. For a query that ends; never raises."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
            self._following = None
        if self._refused is not None or self._newest in (None, self._told):
            return
        try:
            await self._tell(_FINISH_S)
        except (AcknowledgeRefused, QueryFenced) as error:
            _log.warning("query %r ends; its last progress was not reported to the stream: %s", self._lease.name, error)

    async def _follow(self) -> None:
        """Lag cursor: whenever there is news, but not all the time, and never in the way of a batch."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._newest == self._told:
                continue
            try:
                await self._tell(_TELL_S)
            except QueryFenced:
                return
            if self._newest != self._told:
                self._news.set()
            await asyncio.sleep(_PAUSE_S)

    async def _tell(self, deadline_s: float) -> None:
        newest = self._newest
        assert newest is not None
        try:
            async with asyncio.timeout(deadline_s):
                await self._move(*newest)
        except AcknowledgeRefused as refused:
            self._refused = refused
            raise
        except QueryFenced:
            raise
        except (KeylaneError, TimeoutError) as trouble:
            self._not_before = time.monotonic() + _PAUSE_S
            text = str(trouble) or f"no answer within {deadline_s:g} s"
            level = logging.DEBUG if text == self._trouble else logging.WARNING
            self._trouble = text
            _log.log(level, "query %r: its progress could not be reported to the stream: %s", self._lease.name, text)
        else:
            self._trouble = ""
            self._told = newest

    async def _move(self, created: str, sequence: int) -> None:
        if self._way is None:
            return
        wire = await streams.info_json(self._connection, self._stream)
        if wire["created"] != created or wire["state"]["last_seq"] < sequence:
            # Another stream of the same name, or an older copy of it: these sequences are other messages.
            return
        if isinstance(self._way, ProgressConsumer):
            self._lease.check()
            await self._way.move(sequence)
        else:
            await self._way.refuse_if_shared(wire)
            self._lease.check()
            await self._way.purge(sequence)


async def _lag_consumer(cursor: ProgressConsumer) -> ProgressConsumer | None:
    """The cursor, or None where it cannot be made: a query runs without one as well."""
    try:
        await cursor.ensure()
    except KeylaneError as trouble:
        _log.warning("no consumer %r shows the lag of this query: %s", cursor.name, trouble)
        return None
    return cursor


# ---- claims: which query acknowledges which messages of a work queue --------------------------------------------

_LOOK_S = 0.5
_LONGEST_LOOK_S = 30.0


@dataclass(frozen=True, slots=True)
class QueueClaim:
    """What one query acknowledges. No filters: the whole stream. `created` is the stream's: a recreated one differs."""

    query: str
    filters: tuple[str, ...]
    created: str

    def overlaps(self, other: QueueClaim) -> bool:
        if self.created != other.created:
            return False
        if not self.filters or not other.filters:
            return True
        return any(overlaps(mine, theirs) for mine in self.filters for theirs in other.filters)

    def covers(self, other: QueueClaim) -> bool:
        """Whether all that `other` would acknowledge was read under this claim."""
        if not self.filters:
            return True
        return bool(other.filters) and all(any(is_subset(one, mine) for mine in self.filters) for one in other.filters)


async def claim(connection: Connection, stream: str, created: str, filters: Sequence[str], lease: Lease) -> None:
    """Claim these filters for the query that holds `lease`.

    Raises `AcknowledgeRefused` while another query that lives has claimed some of them: whether it lives can take that
    query's lease to find out. Raises `InvalidInput` if this query acknowledged less before: what it has not read lies
    below its offsets, and would be deleted.
    """
    bucket = bucket_of(connection)
    key = claim_key(stream)
    mine = QueueClaim(lease.name, tuple(filters), created)

    async def write(entry: KvEntry | None) -> None:
        known = [one for one in _read(entry, key) if one.created == created]
        for one in known:
            if one.query == mine.query and not one.covers(mine):
                raise InvalidInput(
                    f"query {mine.query!r} acknowledged {_shown(one.filters)} of stream {stream!r} before, and now "
                    f"would acknowledge {_shown(mine.filters)}: older messages that it never read would be deleted. "
                    "Give the old filters or partitions, or a new queryName and a new checkpoint directory"
                )
        rivals = [one for one in known if one.query != mine.query and one.overlaps(mine)]
        for one in rivals:
            holder = await living_holder(connection, one.query, lease)
            if holder is not None:
                raise AcknowledgeRefused(
                    f"query {one.query!r} ({holder}) acknowledges {_shown(one.filters)} of stream {stream!r}, and "
                    f"query {mine.query!r} would acknowledge {_shown(mine.filters)}: each would delete what the other "
                    "has not read. Stop that query, or read other partitions, or leave 'acknowledge' out"
                )
            _log.warning("query %r takes over the claim of query %r, which does not run", mine.query, one.query)
        kept = [one for one in known if one.query != mine.query and one not in rivals]
        # Written even if nothing changes: a rival that found us dead a moment ago must be refused.
        await bucket.put(key, _to_json([*kept, mine]), revision=entry.revision if entry is not None else 0)

    await change(lambda: bucket.get(key), write)


async def living_holder(connection: Connection, query: str, lease: Lease) -> str | None:
    """Who runs the query, or None: nobody has its lease, or nobody renewed it for as long as it lasts.

    A lease that may last longer than half a minute is believed after that. `lease` is the asker's own, which is checked
    meanwhile.
    """
    bucket = bucket_of(connection)
    changed = asyncio.Event()
    expiry = LeaseExpiry()
    believed_at = time.monotonic() + _LONGEST_LOOK_S
    async with bucket.hints(lease_key(query), changed.set):
        first: int | None = None
        while True:
            changed.clear()
            entry = await bucket.get(lease_key(query))
            if expiry.saw(entry):
                return None
            revision = entry.revision if entry is not None else 0
            if (first is not None and revision != first) or time.monotonic() > believed_at:
                return expiry.holder
            first = revision
            while expiry.left_s and not changed.is_set() and time.monotonic() <= believed_at:
                lease.check()
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(expiry.left_s, _LOOK_S))


def _shown(filters: Sequence[str]) -> str:
    return ", ".join(repr(one) for one in filters) if filters else "all"


def _to_json(claims: Sequence[QueueClaim]) -> bytes:
    wire = [{"query": one.query, "filters": list(one.filters), "created": one.created} for one in claims]
    return json.dumps({"claims": wire}).encode()


def _read(entry: KvEntry | None, key: str) -> list[QueueClaim]:
    if entry is None or entry.value is None:
        return []
    try:
        return [
            QueueClaim(str(one["query"]), tuple(map(str, one["filters"])), str(one["created"]))
            for one in json.loads(entry.value)["claims"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"record {key!r} in bucket {BUCKET!r} is not a list of claims ({entry.value[:80]!r}): stop the queries "
            "that acknowledge this stream, delete this key, and start them again"
        ) from error
