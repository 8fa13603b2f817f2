"""A message as a group's handler sees it: without the partition number, with its partition and key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

from keylane.core.partitions import Partitioning, strip_partition
from keylane.core.subjects import matches
from keylane.errors import InvalidInput
from keylane.jetstream import Message
from keylane.processing.origin import MessageOrigin

if TYPE_CHECKING:
    from keylane.jetstream import Client


class Place(NamedTuple):
    """Where a subject belongs."""

    partition: int
    subject: str
    key: str
    lane: str
    """Partition and key in one: messages with the same lane are handled in order."""

    @classmethod
    def of(cls, partition: int, subject: str, key: str) -> Place:
        return cls(partition, subject, key, f"{partition}.{key}")


class MessageContext(NamedTuple):
    """What is known about a message beside its content, for logs and metrics of a handler."""

    stream: str
    group: str
    """The group or fleet."""
    worker: str
    """The member of the group, or the worker of the fleet."""
    subject: str
    partition: int
    key: str
    sequence: int
    received: datetime
    """When this process got it from the server."""


class Outcome(Enum):
    """How a handler settled a message."""

    DONE = auto()
    TERMINATED = auto()
    AGAIN = auto()


class GroupMessage:
    """One message of a group. Settled by the group when the handler returns, or by the handler in manual mode."""

    __slots__ = ("delivery", "home", "origin", "outcome", "place", "received_at")

    def __init__(self, delivery: Message, place: Place, origin: MessageOrigin, received_at: float = 0.0) -> None:
        self.delivery = delivery
        self.place = place
        self.origin = origin
        """The instance that has it: member, pin, fencing token."""
        self.received_at = received_at
        """When this process got it, in seconds of `time.time`."""
        self.outcome: Outcome | None = None
        self.home: asyncio.AbstractEventLoop | None = None
        """Set while a thread has the message: what it says is carried to the event loop."""

    def __repr__(self) -> str:
        return f"<GroupMessage {self.subject} partition={self.partition} sequence={self.sequence}>"

    def __reduce__(self) -> tuple[object, ...]:
        """For another process: a `MessageCopy`."""
        one, origin = self.original, self.origin
        names = (origin.stream, origin.group, origin.member, origin.instance)
        facts = OriginFacts(*names, origin.revision, origin.pin_id, origin.from_queue)
        return MessageCopy.of, (
            one.raw_subject, one.reply, one.raw_headers, one.data, self.place, facts, self.received_at,
        )  # fmt: skip

    @property
    def context(self) -> MessageContext:
        """Who handles it, where it belongs and when it came, as one value.

        >>> log.info("paid", extra={"context": message.context})  # doctest: +SKIP
        """
        origin, place = self.origin, self.place
        received = datetime.fromtimestamp(self.received_at, tz=UTC)
        names = (origin.stream, origin.group, origin.member)
        return MessageContext(*names, place.subject, place.partition, place.key, self.sequence, received)

    @property
    def original(self) -> Message:
        """The message as its stream has it: what is delivered, unless that is a delayed retry."""
        return self.delivery

    @property
    def earlier_tries(self) -> int:
        """How often it failed before it was delivered as a delayed retry."""
        return 0

    @property
    def subject(self) -> str:
        """The subject that the message was published on."""
        return self.place.subject

    @property
    def partition(self) -> int:
        return self.place.partition

    @property
    def key(self) -> str:
        return self.place.key

    @property
    def data(self) -> bytes:
        return self.delivery.data

    @property
    def headers(self) -> dict[str, str]:
        return self.delivery.headers

    @property
    def delivery_sequence(self) -> int:
        """The sequence in the stream that is read: an elastic group's queue, a fleet's copy, or the stream itself."""
        return self.delivery.sequence

    @property
    def sequence(self) -> int:
        """The sequence that its publisher knows: in the stream that the group was made on."""
        source = self.delivery.headers.get("Nats-Stream-Source") if self.origin.from_queue else None
        # "<stream> <sequence> …": written by the server when it copies the message into the queue.
        return int(source.split(" ")[1]) if source else self.delivery.sequence

    @property
    def delivered_count(self) -> int:
        return self.delivery.delivered_count

    @property
    def timestamp(self) -> datetime:
        return self.delivery.timestamp

    def ack(self) -> None:
        self._say(Outcome.DONE, self.delivery.ack)

    async def ack_confirmed(self, timeout_s: float = 5.0) -> None:
        """Ack and wait until the server has the ack."""
        await self.delivery.ack_confirmed(timeout_s)
        self.outcome = Outcome.DONE

    def nak(self, delay_s: float = 0) -> None:
        """Deliver it again, at once or after a delay; later messages of its key do not wait for it."""
        self._say(Outcome.AGAIN, lambda: self.delivery.nak(delay_s))

    def term(self, reason: str = "") -> None:
        self._say(Outcome.TERMINATED, lambda: self.delivery.term(reason))

    def in_progress(self) -> None:
        self._say(self.outcome, self.delivery.in_progress)

    def _say(self, outcome: Outcome | None, send: Callable[[], None]) -> None:
        if self.home is None or self.outcome is not None:
            send()
        else:
            self.home.call_soon_threadsafe(send)
        self.outcome = outcome


class OriginFacts(NamedTuple):
    """The part of a message's origin that another process gets."""

    stream: str
    group: str
    member: str
    instance: str
    revision: int
    pin_id: str | None
    from_queue: bool


class MessageCopy(GroupMessage):
    """A message in another process, to read. It is settled where it came from, when the handler returns or raises."""

    __slots__ = ()

    @classmethod
    def of(  # noqa: PLR0917 - in the order in which `__reduce__` gives them
        cls,
        subject: bytes,
        reply: bytes,
        headers: bytes,
        data: bytes,
        place: Place,
        origin: OriginFacts,
        received_at: float,
    ) -> MessageCopy:
        delivery = Message(cast("Client", None), subject, reply, headers, data)
        return cls(delivery, place, cast("MessageOrigin", origin), received_at)

    async def ack_confirmed(self, timeout_s: float = 5.0) -> None:
        self._refuse()

    def _say(self, outcome: Outcome | None, send: Callable[[], None]) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InvalidInput("a handler in another process cannot settle its message: return, or raise")


class PrefixMessage(GroupMessage):
    """A message whose consumer acks all up to a message: it is committed with what is before it, never by itself."""

    __slots__ = ()

    async def ack_confirmed(self, timeout_s: float = 5.0) -> None:
        raise InvalidInput("acks='prefix' commits messages together: return, and join with acks='message' to confirm")

    def nak(self, delay_s: float = 0) -> None:
        raise InvalidInput("acks='prefix' commits messages in order: raise an error to have this one tried again")

    def _say(self, outcome: Outcome | None, send: Callable[[], None]) -> None:
        if outcome is None:
            super()._say(outcome, send)  # in progress, which settles nothing
        self.outcome = outcome


Placing = Callable[[bytes], Place]


_REMEMBERED = 65_536

KeyOf = Callable[[str], str]
"""The key of a subject, in the words of whoever knows better."""


def placing_by(partitioning: Sequence[Partitioning], *, whole_subject: bool, key_of: KeyOf | None = None) -> Placing:
    """A function that gives the partition, subject and key of a stored subject. It caches its answers.

    Where the key is not known (no partitioning given, and subjects are not hashed whole), the partition is the key.
    """

    @lru_cache(maxsize=_REMEMBERED)
    def place(raw_subject: bytes) -> Place:
        partition, subject = strip_partition(raw_subject.decode("utf-8", "surrogateescape"))
        if key_of is not None:
            return Place.of(partition, subject, key_of(subject))
        for one in partitioning:
            if matches(one.filter, subject):
                return Place.of(partition, subject, one.key(subject))
        return Place.of(partition, subject, subject if whole_subject else str(partition))

    return place
