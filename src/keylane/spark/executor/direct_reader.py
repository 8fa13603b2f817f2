"""Reads a range by batch direct get: for streams that allow no consumer without acks, such as work queues.

Owns the requests and the answers to them, all on the connection's loop. One request is out at a time, as only its end
tells where the next one begins. Stops at the first trouble and says why. Everything but the payload of an answer is in
headers, which the server puts last.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.errors import ApiError, ApiUnavailable, InvalidInput, ReadIncomplete
from keylane.jetstream import MOST_BYTES, OWN_HEADERS, number_in, parse_headers, status_of, streams
from keylane.spark.executor.framing import MessageFramer, MessageRun, Octets, Positions
from keylane.spark.executor.message_columns import Messages, as_numpy, cut_numbers, cut_out, laid_out
from keylane.spark.executor.range_reader import EndOfRead, RangeReader, ReceiveBuffer
from keylane.spark.tasks import Split

if TYPE_CHECKING:
    from keylane.jetstream import Connection

_BATCH = 10_000
OPENING = b"NATS/1.0\r\n"


class DirectReader(RangeReader):
    """Reads by batch direct get."""

    def __init__(self, connection: Connection, split: Split, after: int, buffer: ReceiveBuffer) -> None:
        super().__init__(connection, split, after, buffer, streams.direct_subject(connection, split.reading.stream))
        self._in_batch = 0
        self._asked = False

    async def open(self) -> None:
        self._connection.require("direct_get_batch")
        self._listen()
        self._subscription = await self._client.route_bulk(self._inbox, self)
        self._framer = MessageFramer(b"HMSG %b %d " % (self._inbox.encode(), self._subscription._id), OPENING)
        self.refill()

    # ---- asking -------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Ask for the next batch if there is room for it."""
        if self.buffer.ended or self._asked or not self._client.is_connected:
            return
        rows, size = self.buffer.held
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
        self.buffer.heard = time.monotonic()  # until now there was nothing to hear
        self._asked = True
        self._in_batch = 0

    # ---- answers ------------------------------------------------------------------------------------

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
            self.buffer.end(EndOfRead.DRY)
        elif code == 503:
            self.buffer.end(ApiUnavailable(f"nobody answers direct gets on stream {self._stream!r}"))
        else:
            self.buffer.end(ApiError(code, 0, text, doing="direct get"))

    def _end_of_batch(self, pending: int | None, last: int | None) -> None:
        if last != self._in_batch or pending is None:
            self.buffer.end(ReadIncomplete(f"messages after sequence {self._seen} up to {last} did not arrive"))
        elif pending == 0:
            self.buffer.end(EndOfRead.DRY)
        else:
            self.buffer.hand_over()

    def _book(self) -> None:
        arrived, self._arrived = self._arrived, []
        for run in arrived:
            if self.buffer.ended:
                return
            self.buffer.put(run)
            self._seen = self._in_batch = _last_sequence(run)
            if self._seen >= self._goal:
                self.buffer.end(EndOfRead.REACHED)


async def check_direct(connection: Connection, stream: str) -> None:
    """Raises where nobody can ever answer: `NotFound`, or `InvalidInput` if the stream forbids direct gets."""
    if not (await streams.info(connection, stream)).config.allow_direct:
        raise InvalidInput(
            f"stream {stream!r} takes no direct gets, and can be read in no other way here: set its allow_direct"
        )


def _last_sequence(run: MessageRun) -> int:
    headers = run.data[int(run.bodies[-1]) : int(run.payloads[-1])]
    return int(headers[headers.rindex(b"\r\nNats-Sequence: ") + 17 :].split(b"\r\n", 1)[0])


# ---- columns -------------------------------------------------------------------------------------------------


_BARE = len(b"NATS/1.0\r\n")


def stored_messages(run: MessageRun, before: int) -> Messages:
    """All messages of a run, in one step. `before` is the last sequence that was read before it."""
    whole = pa.py_buffer(run.data)
    blocks = cut_out(whole, run.bodies, run.payloads, pa.binary())
    buffer, octets, rows = laid_out(blocks)
    breaks = _own_lines(octets, rows)

    def field(name: str) -> tuple[Positions, Positions]:
        # The lengths of their names differ, so the place of the colon tells them apart.
        at = OWN_HEADERS.index(name)
        begins = breaks[at] + 2 + len(name)
        if not (octets[begins] == 58).all():
            raise ReadIncomplete(f"an answer without the header {name} where it was expected")
        return begins + 2, breaks[at + 1]

    sequences = cut_numbers(buffer, *field("Nats-Sequence"))
    _check_unbroken(as_numpy(sequences), as_numpy(cut_numbers(buffer, *field("Nats-Last-Sequence"))), before)
    times = cut_out(buffer, *field("Nats-Time-Stamp"), pa.string()).cast(pa.timestamp("ns", tz="UTC"))
    stored_ends = breaks[0] + 2
    has_headers = bool((stored_ends - rows[:-1] > _BARE).any())
    return Messages(
        subjects=cut_out(buffer, *field("Nats-Subject"), pa.binary()),
        data=cut_out(whole, run.payloads, run.ends, pa.binary()),
        sequences=sequences,
        timestamps=times.cast(pa.timestamp("us", tz="UTC"), safe=False),
        headers=cut_out(buffer, rows[:-1], stored_ends, pa.binary()) if has_headers else None,
    )


def _own_lines(octets: Octets, rows: Positions) -> list[Positions]:
    """The line ends before, between and behind the server's own fields."""
    breaks = np.flatnonzero(octets[:-1] == 13)
    breaks = breaks[octets[breaks + 1] == 10]
    behind = np.searchsorted(breaks, rows[1:])
    own = len(OWN_HEADERS) + 2
    if int(np.diff(behind, prepend=0).min()) < own:
        raise ReadIncomplete("an answer with fewer headers than a stored message has")
    return [breaks[behind - own + at] for at in range(own)]


def _check_unbroken(sequences: Positions, named: Positions, before: int) -> None:
    """Each answer names the one before it in its batch, or 0 where it is the first."""
    previous = np.empty_like(sequences)
    previous[0] = before
    previous[1:] = sequences[:-1]
    missing = (named != 0) & (named != previous)
    if missing.any():
        at = int(np.argmax(missing))
        raise ReadIncomplete(f"messages between {previous[at]} and {sequences[at]} did not arrive")
