"""An instance's ownership of partitions: its fencing tokens, and the claims that it has written to the database.

Owns the tokens and decides when to request them again. Never talks to the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from keylane.errors import Fenced, InvalidInput, LedgerMismatch
from keylane.groups import GroupMessage, GroupSource, Origin

_PIN_HEADER = "Nats-Pin-Id"
_ASK_AGAIN_S = 1.0


class FenceClaim(NamedTuple):
    """Who claims a partition, and since when."""

    revision: int
    """Of the group's record, counted across all epochs."""
    pinned_ns: int
    member: str


class Epoch(NamedTuple):
    """The lifetime of one bucket, as the database knows it. Revisions of its records count from `base`."""

    number: int
    base: int
    bucket: str
    stream_created: str


class View(NamedTuple):
    """The server's answer about a group, and the epoch that the database had before the server was asked.

    So the answer is fresh in this epoch: an instance that was suspended since then meets another epoch.
    """

    epoch: Epoch
    source: GroupSource
    version: tuple[int, str]
    """Of the group's record that the instance followed then."""
    asked_at: float
    """By the event loop's clock."""

    @property
    def revision(self) -> int:
        """Counted across all epochs."""
        return self.epoch.base + self.source.revision


class LedgerEntry(NamedTuple):
    """The identity of a message in the tables."""

    stream: str
    group_name: str
    partition: int
    lane: str
    sequence: int


def origin_of(message: GroupMessage) -> Origin:
    origin: Origin | None = getattr(message, "origin", None)
    if origin is None:
        raise InvalidInput(f"{message!r} has no origin: exactly once works only for messages of a joined member")
    return origin


def entry_of(message: GroupMessage, origin: Origin) -> LedgerEntry:
    return LedgerEntry(origin.stream, origin.group, message.partition, storable(message.key), message.sequence)


def storable(key: str) -> str:
    """A key as text that every database accepts: bytes that are not UTF-8, NUL and backslashes are escaped."""
    return key.replace("\\", "\\\\").replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def check_pin(message: GroupMessage, origin: Origin) -> None:
    """Raise `Fenced` if the message was delivered under an earlier pin."""
    delivered_to = message.headers.get(_PIN_HEADER)
    if delivered_to is not None and delivered_to != origin.pin_id:
        raise Fenced(
            f"{message!r} was delivered to pin {delivered_to}, but member {origin.member} ({origin.instance}) now has "
            f"{origin.pin_id or 'none'}: the server redelivers it to the pinned instance"
        )


class InstanceClaims:
    """The claims of one instance under one pin. A new pin starts without claims."""

    def __init__(self) -> None:
        self._pin_id: str | None = None
        self._claims: dict[int, FenceClaim] = {}
        self._claiming: dict[int, asyncio.Lock] = {}
        self._mismatches: dict[int, tuple[float, LedgerMismatch]] = {}
        self.view: View | None = None
        self.viewing = asyncio.Lock()
        """Held while a view is created: one is enough for all partitions."""

    def claiming(self, partition: int) -> asyncio.Lock:
        """Held while a partition is claimed: the first message does it for all concurrent ones."""
        return self._claiming.setdefault(partition, asyncio.Lock())

    def claim_on(self, partition: int, pin_id: str | None) -> FenceClaim | None:
        """The earlier claim under this pin, if any."""
        return self._claims.get(partition) if pin_id is not None and pin_id == self._pin_id else None

    def claimed(self, partition: int, pin_id: str | None, claim: FenceClaim) -> None:
        if pin_id != self._pin_id:
            self._pin_id = pin_id
            self._claims = {}
        self._claims[partition] = claim

    @contextmanager
    def telling_mismatch(self, partition: int, origin: Origin) -> Iterator[None]:
        """Make the member report a mismatch that the block raises, and do not check again for a moment."""
        loop = asyncio.get_running_loop()
        try:
            yield
        except LedgerMismatch as error:
            self._mismatches[partition] = (loop.time() + _ASK_AGAIN_S, error)
            origin.wait(str(error))
            raise
        if self._mismatches.pop(partition, None) is not None and not self._mismatches:
            origin.wait(None)

    def check_mismatch(self, partition: int) -> None:
        """Raise the recent mismatch, if any: every message would find the same, and only an operator can resolve it."""
        until, error = self._mismatches.get(partition, (0.0, None))
        if error is not None and asyncio.get_running_loop().time() < until:
            raise type(error)(*error.args)
