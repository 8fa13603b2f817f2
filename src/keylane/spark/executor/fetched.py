"""Reads a range by batch direct get: for streams that allow no consumer without acks, such as work queues.

Owns the requests and the answers to them, all on the link's loop. One request is out at a time, as only its end tells
where the next one begins. Stops at the first trouble and says why.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from nats.aio.subscription import Subscription

from keylane.errors import (
    ApiError,
    ApiUnavailable,
    Disconnected,
    InvalidInput,
    KeylaneError,
    PermissionDenied,
    ReadIncomplete,
)
from keylane.jetstream import streams
from keylane.jetstream.direct import MOST_BYTES
from keylane.jetstream.headers import number_in, parse_headers, status_of
from keylane.spark.executor.arrivals import Arrivals, End
from keylane.spark.executor.cutting import Cutter, Run
from keylane.spark.executor.split import Split

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection

_BATCH = 10_000
OPENING = b"NATS/1.0\r\n"


class FetchedRange:
    """The messages behind `after`, put into `arrivals` as they come."""

    def __init__(self, connection: Connection, split: Split, after: int, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self._connection = connection
        self._client = connection.nats
        self._split = split
        self._goal = min(split.last, split.upto)
        self._limit = split.last if split.last <= split.upto else split.upto + 1
        self._seen = after
        self._in_batch = 0
        self._asked = False
        self._request = connection.api.subject(f"DIRECT.GET.{split.reading.stream}")
        self._inbox = self._client.new_inbox()
        self._subscription: Subscription | None = None
        self._cutter: Cutter | None = None
        self._arrived: list[Run] = []

    async def open(self) -> None:
        self._connection.require("direct_get_batch")
        self._client.listen(self._link_changed)
        self._client.listen_for_denials(self._denied)
        self._subscription = await self._client.route_bulk(self._inbox, self)
        self._cutter = Cutter(b"HMSG %b %d " % (self._inbox.encode(), self._subscription._id), OPENING)
        self.refill()

    async def close(self) -> None:
        self._client.unlisten(self._link_changed)
        self._client.unlisten_for_denials(self._denied)
        if self._subscription is not None:
            await self._client.unroute(self._subscription)

    # ---- asking -------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Ask for the next batch if there is room for it."""
        if self.arrivals.ended or self._asked or not self._client.is_connected:
            return
        rows, size = self.arrivals.held
        if rows >= 2 * _BATCH or size >= MOST_BYTES:
            return
        request: dict[str, object] = {
            "seq": self._seen + 1,
            "batch": min(_BATCH, self._limit - self._seen),
            "max_bytes": MOST_BYTES,
        }
        if self._split.subject_filter is not None:
            request["next_by_subj"] = self._split.subject_filter
        payload = json.dumps(request, separators=(",", ":")).encode()
        self._client.post(
            b"PUB %b %b %d\r\n%b\r\n" % (self._request.encode(), self._inbox.encode(), len(payload), payload)
        )
        self.arrivals.heard = time.monotonic()  # until now there was nothing to hear
        self._asked = True
        self._in_batch = 0

    # ---- answers ------------------------------------------------------------------------------------

    def take(self, data: bytes, position: int) -> int:
        assert self._cutter is not None
        run = self._cutter.cut(data, position)
        if run is None:
            return position
        self._arrived.append(run)
        return int(run.ends[-1]) + 2

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self._book()
        self._asked = False
        code, text = status_of(headers)
        fields = parse_headers(headers)
        if code == 204:
            self._end_of_batch(
                number_in(fields.get("Nats-Num-Pending", "0")), number_in(fields.get("Nats-Last-Sequence", "0"))
            )
        elif code == 404:
            self.arrivals.end(End.DRY)
        elif code == 503:
            self._fail(ApiUnavailable(f"nobody answers direct gets on stream {self._split.reading.stream!r}"))
        else:
            self._fail(ApiError(code, 0, text, doing="direct get"))

    def received(self) -> None:
        self.arrivals.heard = time.monotonic()
        self._book()
        self.refill()

    def _end_of_batch(self, pending: int | None, last: int | None) -> None:
        if last != self._in_batch or pending is None:
            self._fail(ReadIncomplete(f"messages after sequence {self._seen} up to {last} did not arrive"))
        elif pending == 0:
            self.arrivals.end(End.DRY)
        else:
            self.arrivals.hand_over()

    def _book(self) -> None:
        """Count what arrived, and see whether it is all."""
        arrived, self._arrived = self._arrived, []
        for run in arrived:
            if self.arrivals.ended:
                return
            self.arrivals.put(run)
            self._seen = self._in_batch = _last_sequence(run)
            if self._seen >= self._goal:
                self.arrivals.end(End.REACHED)

    def _link_changed(self, up: bool) -> None:
        self._fail(Disconnected("the connection was lost"))

    def _denied(self, denied: PermissionDenied) -> None:
        if denied.subject in (self._request, self._inbox):
            self._fail(denied)

    def _fail(self, why: KeylaneError) -> None:
        self.arrivals.end(why)


async def check_direct(connection: Connection, stream: str) -> None:
    """Raises where nobody can ever answer: `NotFound`, or `InvalidInput` if the stream forbids direct gets."""
    if not (await streams.info(connection, stream)).config.allow_direct:
        raise InvalidInput(
            f"stream {stream!r} takes no direct gets, and can be read in no other way here: set its allow_direct"
        )


def _last_sequence(run: Run) -> int:
    headers = run.data[int(run.bodies[-1]) : int(run.payloads[-1])]
    return int(headers[headers.rindex(b"\r\nNats-Sequence: ") + 17 :].split(b"\r\n", 1)[0])
