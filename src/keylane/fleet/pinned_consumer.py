"""The consumers of a fleet, and how they are pulled: pinned, so that one worker at a time reads, and tried for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from keylane.jetstream import ConsumerConfig, ConsumerInfo, FeedOptions, Message, PinOptions

PIN_GROUP = "fleet"


class PinnedTerms(Protocol):
    """What all consumers of a fleet have in common."""

    @property
    def ack_wait_s(self) -> float: ...
    @property
    def max_ack_pending(self) -> int: ...
    @property
    def pin_timeout_s(self) -> float: ...


def pinned_consumer(
    terms: PinnedTerms, filters: str | Iterable[str], start: int | None, **others: Any
) -> ConsumerConfig:
    """The configuration of a consumer. `start`: the first sequence; None: all that there is. `others`: its name, …"""
    one, several = (filters, None) if isinstance(filters, str) else (None, tuple(sorted(filters)))
    chosen = {"ack_policy": "explicit", "max_ack_pending": terms.max_ack_pending, "max_waiting": 256, **others}
    return ConsumerConfig(
        filter_subject=one,
        filter_subjects=several,
        deliver_policy="all" if start is None else "by_start_sequence",
        opt_start_seq=start,
        ack_wait_s=terms.ack_wait_s,
        max_deliver=-1,
        priority_groups=(PIN_GROUP,),
        priority_policy="pinned_client",
        priority_timeout_s=terms.pin_timeout_s,
        **chosen,
    )


def pinned_pulls(terms: PinnedTerms, take: Callable[[list[Message]], None], **pin: Any) -> FeedOptions:
    """How a consumer that a worker's partitions share is pulled. `pin`: who is told of its pin."""
    return FeedOptions(
        max_messages=terms.max_ack_pending,
        expires_s=terms.pin_timeout_s / 2,
        heartbeat_s=terms.pin_timeout_s / 4,
        pull_fields={"group": PIN_GROUP},
        pin=PinOptions(group=PIN_GROUP, timeout_s=terms.pin_timeout_s, reset_on_takeover=True, **pin),
        on_messages=take,
    )


def pin_in(info: ConsumerInfo) -> str | None:
    """Who is pinned; None: nobody."""
    return next((one.pinned_client_id for one in info.priority_groups if one.group == PIN_GROUP), None)
