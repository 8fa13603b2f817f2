"""A streaming query seen from the driver: its lease, where it starts, how far each batch goes, what it has lost.

Lives in the one process that Spark keeps for the source. Every call of Spark's is one method here; each may wait out
trouble with the server, and asks it as rarely as it can: an idle query asks once in `IDLE_S`.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from typing import Any

from keylane.errors import KeylaneError
from keylane.spark.driver.acknowledgement import Acknowledgement
from keylane.spark.driver.batch_plan import make_splits, may_begin_later, starting_at
from keylane.spark.driver.lease import Lease, holder_name
from keylane.spark.driver.offsets import Offset, ReadableRange, admit, planned, resume
from keylane.spark.driver.source_stream import SourceStream, warn_without_keys
from keylane.spark.options import ReadOptions
from keylane.spark.parent_process import end_properly
from keylane.spark.query_records import durable_start, forget_start
from keylane.spark.retry import ask
from keylane.spark.stream_state import Losses, StreamSnapshot
from keylane.spark.sync_connection import SyncConnection, shared_connection
from keylane.spark.tasks import Split

_log = logging.getLogger("keylane.spark")

IDLE_S = 0.75
"""Between two requests for the state of an idle stream. Spark itself asks about sixty times a second."""
END_TIMEOUT_S = 10.0
QUIET_S = 10.0
"""How long a query with filters stays where it is while only other messages arrive.

Each step costs a micro-batch, and an empty one is not worth much; but a place that never moves is trimmed one day.
"""


class Query:
    """One streaming query. Made by Spark's reader; sends no request before `begin`."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.newest_seen: Offset | None = None
        self._source = SourceStream(options)
        self._losses = Losses(fatal=options.fail_on_data_loss)
        self._lease: Lease | None = None
        self._acknowledging: Acknowledgement | None = None
        self._ending: concurrent.futures.Future[None] | None = None
        self._begun = False
        self._first: Offset | None = None
        self._target: Offset | None = None
        self._look_at = 0.0
        self._quiet: tuple[Offset, float] | None = None
        self._known: tuple[StreamSnapshot, dict[str | None, int] | None] | None = None
        self._start_forgotten = options.start.kind != "latest"

    # ---- Spark's calls, in their order ----------------------------------------------------------------

    def begin(self) -> None:
        """Take the lease; waits while another driver runs the query. Spark has not read its checkpoint yet."""
        if self._begun:
            return
        warn_without_keys(self._source.layout)  # wrong options fail here, not after a long wait
        if self.options.query_name is not None:
            self._take_lease(self.options.query_name)
        self._begun = True

    def aim(self) -> None:
        """Fix the end of an availableNow query: what is there now."""
        state = self._source.state()
        self._target = Offset.at(state, state.last)

    def initial(self) -> Offset:
        """Where the query starts if its checkpoint is empty. Spark asks again until the first batch is committed."""
        self.begin()
        self._check_lease()
        state = self._source.state()
        offset = Offset.at(state, starting_at(self.options.start, self._source, state))
        if self.options.start.kind == "latest":
            offset = self._written_down(offset)
        self._first = offset
        return offset

    def latest(self, wire: dict[str, Any], *, limited: bool) -> Offset:
        """How far the next batch goes; `wire` itself if there is nothing to do."""
        self.begin()
        self._check_lease()
        start = self._offset(wire)
        self._durable(start)
        target = self._target
        if target is not None and start.created == target.created and start.sequence >= target.sequence:
            return start
        self._wait_for_turn()
        state = self._look(start)
        going = self._going(start, resume(start, state))
        if self._holds_still(start, going, state):
            self._look_at = time.monotonic() + IDLE_S
            return start
        end = state.last
        if limited:
            end = admit(going.after, state, max_offsets=self.options.max_offsets, max_bytes=self.options.max_bytes)
        if target is not None and target.created == state.created:
            end = max(going.after, min(end, target.sequence))
        return Offset.at(state, end)

    def splits(self, start_wire: dict[str, Any], end_wire: dict[str, Any]) -> list[Split]:
        """The splits of a batch, which may be one of an earlier run."""
        self._check_lease()
        start, end = self._offset(start_wire), self._offset(end_wire)
        state, newest = self._known or (None, None)
        self._known = None
        if state is None or end.created != state.created or end.sequence > state.last:
            state, newest = self._look(end), None
        found = self._going(start, planned(start, end, state))
        return make_splits(self._source, found, state, newest=newest, head_may_go=self._starts_anywhere(start))

    def commit(self, wire: dict[str, Any]) -> None:
        """Everything up to here is durably done."""
        self._check_lease()
        self._durable(self._offset(wire))

    def end(self) -> None:
        """The query is over: a standby need not wait. A call that a signal interrupted is repeated."""
        if self._lease is None:
            return
        try:
            if self._ending is None:
                self._ending = self._link().start(self._end(self._lease, self._acknowledging))
            self._ending.result(END_TIMEOUT_S)
        except (KeylaneError, concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as trouble:
            reason = str(trouble) or f"no answer within {END_TIMEOUT_S:g} s"
            _log.warning("query %r ends, and its lease runs out by itself: %s", self.options.query_name, reason)
        self._lease = self._acknowledging = self._ending = None

    # ---- implementation ----------------------------------------------------------------------------

    async def _end(self, lease: Lease, acknowledging: Acknowledgement | None) -> None:
        if acknowledging is not None:
            await acknowledging.finish()
        await lease.release()

    def _take_lease(self, query: str) -> None:
        end_properly(self.end)
        link = self._link()
        lease = Lease(link.connection, query, holder_name(), self.options.lease_s, replicas=self._source.replicas)
        link.start(lease.take()).result()
        self._lease = lease
        _log.info("query %r has its lease", query)
        self._source = SourceStream(self.options)  # the group may have changed while another driver had the query
        try:
            self._acknowledging = self._prepared(lease)
        except KeylaneError:
            self.end()
            raise

    def _prepared(self, lease: Lease) -> Acknowledgement:
        layout = self._source.layout
        return ask(
            self.options.address,
            lambda connection: Acknowledgement.prepare(
                connection,
                stream=layout.stream,
                filters=layout.subject_filters,
                whole=layout.whole,
                from_earliest=self.options.start.kind == "earliest",
                lease=lease,
                acknowledge=self.options.acknowledge,
            ),
            f"prepare stream {layout.stream!r} for the progress of query {lease.name!r}",
        )

    def _offset(self, wire: Any) -> Offset:
        return Offset.from_wire(wire, self._source.layout.stream, queue=self._source.queue)

    def _look(self, least: Offset) -> StreamSnapshot:
        state = self._source.state(least)
        self.newest_seen = Offset.at(state, state.last)
        return state

    def _wait_for_turn(self) -> None:
        wait_s = self._look_at - time.monotonic()
        self._look_at = 0.0
        if wait_s > 0:
            time.sleep(wait_s)

    def _going(self, start: Offset, found: ReadableRange) -> ReadableRange:
        """The range, after its loss was reported: raises `DataLost` where that is asked for."""
        if found.loss is not None and not (found.loss.kind == "trimmed" and self._may_be_trimmed(start)):
            self._losses.report(found.loss)
        return found

    def _may_be_trimmed(self, start: Offset) -> bool:
        """Whether a stream that begins later than `start` has lost nothing of ours."""
        if self._starts_anywhere(start):
            return True
        # Messages leave a queue when they are handled. Only where that is our own doing it begins where we are.
        layout = self._source.layout
        return layout.is_queue and not (self.options.acknowledge and layout.whole)

    def _starts_anywhere(self, start: Offset) -> bool:
        return start == self._first and may_begin_later(self.options.start)

    def _holds_still(self, start: Offset, going: ReadableRange, state: StreamSnapshot) -> bool:
        """Whether no batch is needed. Keeps what was looked up for the planning of the batch."""
        self._known = (state, None)
        if going.loss is not None and Offset.at(state, going.after) != start:
            return False  # the checkpoint must learn the new place
        if going.upto <= going.after:
            return True
        if self._source.layout.whole:
            return False
        newest = self._source.newest(state)
        self._known = (state, newest)
        if self._target is not None or max(newest.values(), default=0) > going.after:
            return False
        now = time.monotonic()
        if self._quiet is None or self._quiet[0] != start:
            self._quiet = (start, now)
        return now - self._quiet[1] < QUIET_S

    def _written_down(self, offset: Offset) -> Offset:
        query = self.options.query_name
        assert query is not None
        found = ask(
            self.options.address,
            lambda connection: durable_start(
                connection, query, offset.to_wire(), replicas=self._source.replicas, queue=self._source.queue
            ),
            f"write down where query {query!r} starts",
        )
        return self._offset(found)

    def _durable(self, offset: Offset) -> None:
        """Spark's checkpoint holds this offset, unless it is the one that we named as the first."""
        query = self.options.query_name
        if offset == self._first or query is None:
            return
        if not self._start_forgotten:
            self._forget_start(query)
        if self._acknowledging is not None:
            self._link().call(self._acknowledging.mirror(offset.sequence, offset.created))

    def _forget_start(self, query: str) -> None:
        doing = f"forget where query {query!r} started"
        try:
            ask(self.options.address, lambda connection: forget_start(connection, query), doing)
        except KeylaneError as trouble:
            _log.warning("%s; it is tried again with the next batch", trouble)
        else:
            self._start_forgotten = True

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _link(self) -> SyncConnection:
        return shared_connection(self.options.address)
