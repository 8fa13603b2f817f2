"""Whoever writes into a coordination log: makes its messages.

Owns: that all messages of one consumer carry the same client, instance and group. The seconds in them are this
machine's clock, for people who look; nothing is decided by them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import Key, Owner
from keylane.core.claim_records import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    ReleaseGroup,
    ReleasingPartition,
    check_id,
)


def new_instance() -> str:
    """An instance id that no other process has."""
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class Author:
    """One consumer, or one admin. `wall_s` gives Unix seconds."""

    client: str
    group: str
    instance: str = field(default_factory=new_instance)
    wall_s: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        check_id(self.client, "client id")
        check_id(self.group, "group id")
        check_id(self.instance, "instance id")

    @property
    def owner(self) -> Owner:
        return Owner(self.client, self.instance)

    def key(self, where: TopicPartition) -> Key:
        return Key(self.group, where.topic, where.partition)

    def claiming(self, where: TopicPartition) -> ClaimingPartition:
        return ClaimingPartition(self.instance, self.client, self.group, *where, self._seconds)

    def heartbeat(self, where: TopicPartition, offset: int) -> Heartbeat:
        return Heartbeat(self.instance, self.client, self.group, *where, offset, self._seconds)

    def releasing(self, where: TopicPartition, offset: int) -> ReleasingPartition:
        return ReleasingPartition(self.instance, self.client, self.group, *where, offset, self._seconds)

    def claiming_messages(self, where: TopicPartition, proposed: int) -> ClaimingMessages:
        return ClaimingMessages(self.instance, self.client, self.group, *where, proposed, self._seconds)

    def release_group(self, expiry_s: int) -> ReleaseGroup:
        return ReleaseGroup(self.instance, self.client, self.group, expiry_s, self._seconds)

    @property
    def _seconds(self) -> int:
        return max(int(self.wall_s()), 0)
