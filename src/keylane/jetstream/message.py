"""A message as a consumer delivers it, and the ways to settle it.

Everything but the payload is decoded when first asked for: at full speed most of it never is.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from nats.errors import Error as NatsError

from keylane.errors import AckFailed, AlreadySettled, Disconnected, NotADelivery
from keylane.jetstream.headers import header_items, parse_headers
from keylane.jetstream.settings import check_seconds

if TYPE_CHECKING:
    from keylane.jetstream.client import Client

ACK_PREFIX = b"$JS.ACK."
_MOST_DIGITS = 20
_ACK = b" 4\r\n+ACK\r\n"
_NAK = b" 4\r\n-NAK\r\n"
_PROGRESS = b" 4\r\n+WPI\r\n"
_TERM = b" 5\r\n+TERM\r\n"


class Delivery(NamedTuple):
    """What the server says about a delivery, from the ack subject."""

    stream: str
    consumer: str
    delivered_count: int
    sequence: int
    consumer_sequence: int
    timestamp_ns: int
    pending: int
    domain: str = ""


def parse_ack_subject(reply: bytes) -> Delivery:
    """Both forms: `$JS.ACK.<stream>…` and, with a domain, `$JS.ACK.<domain>.<account>.<stream>…`.

    Anything else raises `NotADelivery`.
    """
    words = reply.split(b".") if reply.startswith(ACK_PREFIX) else []
    domain = b""
    if len(words) >= 11:
        domain = b"" if words[2] == b"_" else words[2]
        words = words[2:]
    try:
        _, _, stream, consumer, delivered, sequence, consumer_sequence, timestamp, pending, *_ = words
        return Delivery(
            stream.decode(),
            consumer.decode(),
            _number(delivered),
            _number(sequence),
            _number(consumer_sequence),
            _number(timestamp),
            _number(pending),
            domain.decode(),
        )
    except ValueError:
        raise _not_a_delivery(reply) from None


def _number(word: bytes) -> int:
    # `int` by itself also takes "-15", "+5" and "1_0".
    if not word.isdigit() or len(word) > _MOST_DIGITS:
        raise ValueError
    return int(word)


def _not_a_delivery(reply: bytes) -> NotADelivery:
    return NotADelivery(
        f"a message with the reply subject {reply[:200]!r} is no delivery of a consumer: somebody else sent it to this "
        "reader's inbox; give the program an inbox_prefix that only it may use"
    )


class Message:
    """One delivered message. Settle it once: `ack`, `ack_confirmed`, `nak` or `term`."""

    __slots__ = ("_client", "_delivery", "_sequence", "data", "raw_headers", "raw_subject", "reply")
    _delivery: Delivery

    def __init__(self, client: Client, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self._client: Client | None = client  # None once settled: nothing is left to say to the server
        self.raw_subject = subject
        self.reply = reply
        self.raw_headers = headers
        self.data = data
        self._sequence = 0

    def __repr__(self) -> str:
        tries = self.delivered_count
        return f"<Message {self.subject} sequence={self.sequence} tries={tries} {len(self.data)} B>"

    @property
    def subject(self) -> str:
        """Bytes that are not UTF-8 are kept as surrogates, so that they hash as on the server."""
        return self.raw_subject.decode("utf-8", "surrogateescape")

    @property
    def headers(self) -> dict[str, str]:
        """Names to values; of a repeated name the first. `header_items` has all."""
        return parse_headers(self.raw_headers)

    @property
    def header_items(self) -> list[tuple[str, str]]:
        return list(header_items(self.raw_headers))

    @property
    def delivery(self) -> Delivery:
        try:
            return self._delivery
        except AttributeError:  # the slot is filled when first asked for
            self._delivery = parse_ack_subject(self.reply)
            return self._delivery

    @property
    def consumer_sequence(self) -> int:
        """The consumer's own count of its deliveries; a reset starts it again at 1."""
        words = self.reply.split(b".")
        at = 6 if len(words) < 11 else 8
        try:
            self._sequence = _number(words[at - 1])  # at hand, and asked for next
            return _number(words[at])
        except (ValueError, IndexError):
            raise _not_a_delivery(self.reply) from None

    @property
    def sequence(self) -> int:
        """The message's sequence in the stream."""
        if not self._sequence:
            words = self.reply.split(b".")  # all of `delivery` takes five times as long
            try:
                self._sequence = _number(words[5 if len(words) < 11 else 7])
            except (ValueError, IndexError):
                raise _not_a_delivery(self.reply) from None
        return self._sequence

    @property
    def delivered_count(self) -> int:
        """1 at the first delivery, more at each redelivery."""
        return self.delivery.delivered_count

    @property
    def timestamp(self) -> datetime:
        """When the stream stored the message. `delivery.timestamp_ns` is exact."""
        return datetime.fromtimestamp(self.delivery.timestamp_ns / 1e9, tz=UTC)

    @property
    def settled(self) -> bool:
        return self._client is None

    @property
    def size(self) -> int:
        """Bytes as the server counts them against a pull's byte limit."""
        return len(self.raw_subject) + len(self.reply) + len(self.raw_headers) + len(self.data)

    def ack(self) -> None:
        """Done with it. Sent with the other acks of this event-loop turn; not confirmed by the server."""
        client = self._client
        if client is None:
            raise self._already_settled()
        self._client = None
        # `_settle` and `Client.post` written out: this line runs once for every message.
        client.outbox.append(b"PUB " + self.reply + _ACK)
        if client.push_handle is None:
            client.schedule_push()

    def nak(self, delay_s: float = 0) -> None:
        """Deliver it again, at once or after a delay."""
        if delay_s == 0:
            self._settle(_NAK)
            return
        body = b'-NAK {"delay": %d}' % round(check_seconds(delay_s, "delay_s") * 1e9)
        self._settle(b" %d\r\n%b\r\n" % (len(body), body))

    def term(self, reason: str = "") -> None:
        """Never deliver it again."""
        if reason:
            body = b"+TERM " + " ".join(reason.splitlines()).encode(errors="replace")
            self._settle(b" %d\r\n%b\r\n" % (len(body), body))
        else:
            self._settle(_TERM)

    def in_progress(self) -> None:
        """Still at work: start the consumer's ack wait anew. May be sent any number of times."""
        if self._client is None:
            raise self._already_settled()
        self._client.post(b"PUB " + self.reply + _PROGRESS)

    async def ack_confirmed(self, timeout_s: float = 5.0) -> None:
        """Ack and wait until the server says that it has the ack (a double ack)."""
        check_seconds(timeout_s, "timeout_s")
        client, self._client = self._client, None
        if client is None:
            raise self._already_settled()
        client.push()
        try:
            await client.ask(self.reply.decode(), b"+ACK", timeout_s)
        except BaseException as error:
            self._client = client
            if not isinstance(error, NatsError | Disconnected):
                raise
            raise AckFailed(
                f"no confirmation for the ack of sequence {self.sequence} within {timeout_s} s ({error}): "
                "the server may or may not have it; ack again or treat the message as not done"
            ) from error

    def _settle(self, command: bytes) -> None:
        client = self._client
        if client is None:
            raise self._already_settled()
        self._client = None
        client.post(b"PUB " + self.reply + command)

    def _already_settled(self) -> AlreadySettled:
        return AlreadySettled(f"sequence {self.sequence} was already acked, naked or terminated: settle it once")
