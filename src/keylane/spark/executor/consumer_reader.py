"""Reads a range through a consumer of its own: ordered, without acks, in memory, gone when the reader is.

Owns the consumer, its pulls and the answers to them, all on the connection's loop. Stops at the first trouble and says
why: the reader of the split then makes a new one behind the last message that it has.

Everything but headers and payload is in the protocol line,
`MSG <subject> <sid> $JS.ACK.<stream>.<consumer>.<tries>.<sequence>.<count>.<nanoseconds>.<pending> <size>`, or `HMSG`
with a second size; with a domain and an account in front of the stream where the server has them. Of each run only the
first and the last line are decoded here; all of them become columns at once.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.core.pulls import Meaning, Pull, PullWindow, Status
from keylane.errors import ConsumerGone, ReadIncomplete
from keylane.jetstream import consumers, number_in, parse_headers, status_of
from keylane.spark.executor.framing import MessageFramer, MessageRun, Octets, Positions
from keylane.spark.executor.message_columns import Messages, cut_numbers, cut_out, laid_out
from keylane.spark.executor.range_reader import EndOfRead, RangeReader, ReceiveBuffer
from keylane.spark.tasks import Split

if TYPE_CHECKING:
    from keylane.jetstream import Connection

_FIRST_PULL = 512
_MOST_HELD = 20_000
_MOST_BYTES = 8 * 1024 * 1024
_EXPIRES_S = 30.0
_HEARTBEAT_S = 1.0
_INACTIVE_S = 30.0


@dataclass(frozen=True, slots=True)
class DeliveryInfo:
    """The end of an ack subject."""

    sequence: int
    consumer_sequence: int
    pending: int


def delivery_info(run: MessageRun, row: int = -1) -> DeliveryInfo:
    """What the line of one message says about it."""
    line = run.data[int(run.lines[row]) : int(run.bodies[row])]
    words = line.split(b" ")[3].split(b".")
    at = 5 if len(words) < 11 else 7
    return DeliveryInfo(int(words[at]), int(words[at + 1]), int(words[at + 3]))


class ConsumerReader(RangeReader):
    """Reads through a consumer of its own."""

    def __init__(self, connection: Connection, split: Split, after: int, buffer: ReceiveBuffer) -> None:
        self._consumer = f"keylane-spark-{secrets.token_hex(8)}"
        super().__init__(
            connection, split, after, buffer, consumers.next_subject(connection, split.reading.stream, self._consumer)
        )
        self._after = after
        self._expected = 1
        self._window = PullWindow(_FIRST_PULL, _MOST_BYTES)

    async def open(self) -> None:
        self._listen()
        self._subscription = await self._client.route_bulk(f"{self._inbox}.>", self)
        self._framer = MessageFramer(b" %d $JS.ACK." % self._subscription._id)
        created = await consumers.create(self._connection, self._stream, self._config())
        if created.num_pending == 0:
            self.buffer.end(EndOfRead.DRY)
        self.refill()

    async def close(self) -> None:
        """Give the subscription and the consumer back. Without a link the server drops the consumer by itself."""
        await super().close()
        if self._client.is_connected:
            consumers.post_delete(self._connection, self._stream, self._consumer)

    def _config(self) -> consumers.ConsumerConfig:
        return consumers.ConsumerConfig(
            name=self._consumer,
            deliver_policy="by_start_sequence",
            opt_start_seq=self._after + 1,
            ack_policy="none",
            filter_subject=self._split.subject_filter,
            headers_only=None if self._split.reading.with_data else True,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold_s=_INACTIVE_S,
        )

    # ---- asking -------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Ask for more if there is room; never for more than the range can hold."""
        if self.buffer.ended or not self._client.is_connected:
            return
        rows, size = self.buffer.held
        asked = self._window.asked
        left = self._limit - self._seen - asked
        room = min(self._window.max_messages - rows - asked, left)
        if room <= 0 or size >= _MOST_BYTES or (room < left and room < self._window.max_messages // 2):
            if not asked:
                self.buffer.hand_over()
            return
        if not asked:
            self.buffer.heard = time.monotonic()  # until now there was nothing to hear
        pull = self._window.ask_for(room)
        request = {
            "batch": pull.batch,
            "max_bytes": self._window.max_bytes,
            "expires": round(_EXPIRES_S * 1e9),
            "idle_heartbeat": round(_HEARTBEAT_S * 1e9),
        }
        payload = json.dumps(request, separators=(",", ":")).encode()
        reply = f"{self._inbox}.{pull.token}"
        self._client.post(b"PUB %b %b %d\r\n%b\r\n" % (self._request.encode(), reply.encode(), len(payload), payload))

    # ---- answers ------------------------------------------------------------------------------------

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self._book()
        code, text = status_of(headers)
        pull = Pull.from_token(subject[len(self._inbox) + 1 :].decode(errors="replace"))
        if not code or pull is None:
            return  # in this inbox, and not from the consumer
        pending = number_in(parse_headers(headers).get("Nats-Pending-Messages"))
        match self._window.answered(pull, Status(code, text, pending)):
            case None | Meaning.ALIVE | Meaning.OUT_OF_BYTES | Meaning.ENDED:
                pass
            case Meaning.TOO_LARGE:
                self._window.max_bytes *= 4
            case Meaning.DELETED | Meaning.UNAVAILABLE:
                self.buffer.end(ConsumerGone(f"the reader's consumer is gone: {code} {text}"))
            case _:
                self.buffer.end(ReadIncomplete(f"the server ended the read: {code} {text}"))

    def _book(self) -> None:
        arrived, self._arrived = self._arrived, []
        for run in arrived:
            if self.buffer.ended:
                return
            first, last = delivery_info(run, 0), delivery_info(run)
            if first.consumer_sequence != self._expected or last.consumer_sequence - first.consumer_sequence != (
                run.rows - 1
            ):
                self.buffer.end(ReadIncomplete(f"messages after sequence {self._seen} did not arrive"))
                return
            self._expected = last.consumer_sequence + 1
            self._seen = last.sequence
            self._window.delivered(run.rows, -(-run.size // run.rows))
            self._window.max_messages = min(_MOST_HELD, self._window.max_messages + run.rows)
            self.buffer.put(run)
            if last.sequence >= self._goal:
                self.buffer.end(EndOfRead.REACHED)
            elif last.pending == 0:
                self.buffer.end(EndOfRead.DRY)


# ---- columns -------------------------------------------------------------------------------------------------


_SPACE, _DOT = 32, 46
_LONG_FORM = 10
"""Dots in an ack subject that names domain and account: this many or more."""


def delivered_messages(run: MessageRun) -> Messages:
    """All messages of a run, in one step."""
    whole = pa.py_buffer(run.data)
    lines = cut_out(whole, run.lines, run.bodies - 2, pa.binary())
    buffer, octets, rows = laid_out(lines)
    with_headers = run.payloads > run.bodies
    has_headers = bool(with_headers.any())

    spaces = np.flatnonzero(octets == _SPACE)
    counts = 4 + with_headers
    first = np.cumsum(counts) - counts
    if len(spaces) != counts.sum() or (spaces[first] < rows[:-1]).any():
        raise ReadIncomplete("the server's lines do not have the words that were expected")
    subject_end, reply_begin, reply_end = spaces[first + 1], spaces[first + 2], spaces[first + 3]
    _check_subscription(octets, subject_end, reply_begin)

    dots = np.flatnonzero(octets == _DOT)
    dot = np.searchsorted(dots, reply_begin)
    longer = np.searchsorted(dots, reply_end) - dot >= _LONG_FORM
    dot += 4 + 2 * longer
    times = cut_numbers(buffer, dots[dot + 2] + 1, dots[dot + 3]).view(pa.timestamp("ns", tz="UTC"))
    return Messages(
        subjects=cut_out(buffer, spaces[first] + 1, subject_end, pa.binary()),
        data=cut_out(whole, run.payloads, run.ends, pa.binary()),
        sequences=cut_numbers(buffer, dots[dot] + 1, dots[dot + 1]),
        timestamps=times.cast(pa.timestamp("us", tz="UTC"), safe=False),
        headers=cut_out(whole, run.bodies, run.payloads, pa.binary()) if has_headers else None,
    )


def _check_subscription(octets: Octets, before: Positions, behind: Positions) -> None:
    """All are of one subscription, the first message's."""
    width = int(behind[0] - before[0])
    alike = behind - before == width
    for at in range(1, width):
        alike &= octets[before + at] == octets[before[0] + at]
    if not alike.all():
        raise ReadIncomplete("messages of another subscription came between")
