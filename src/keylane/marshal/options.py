"""The options of a Marshal consumer, validated, and its hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from keylane.core.claim_choice import Appetite, TopicPartition
from keylane.core.run_state import RunState
from keylane.dispatch import Executor
from keylane.dispatch.handler_call import check_executor
from keylane.errors import InvalidInput, KeylaneError
from keylane.hooks import Hooks
from keylane.marshal.log import DEFAULT_INTERVAL_S, CoordinationLog
from keylane.marshal.message import Failure, GiveUp

Mode: TypeAlias = Literal["at_least_once", "at_most_once"]
Order: TypeAlias = Literal["key", "partition"]

SHORTEST_INTERVAL_S = 0.1
LONGEST_INTERVAL_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHooks(Hooks):
    """Called when something happens to a consumer. Plain functions; they must return at once."""

    on_state: Callable[[RunState, str | None], None] | None = None
    """The state changed, or what the consumer waits for: `consumer.state` and `consumer.waiting_for`."""
    on_partitions: Callable[[tuple[TopicPartition, ...], tuple[TopicPartition, ...]], None] | None = None
    """The partitions that are handled here, before and after."""
    on_claimed: Callable[[TopicPartition, int], None] | None = None
    """The consumer owns a partition now: which, and its token."""
    on_released: Callable[[TopicPartition, str], None] | None = None
    """The consumer no longer owns a partition: which, and why."""
    on_failure: Failure | None = None
    """The handler raised: message, error, and how often it failed by now. Such failures are logged at DEBUG then."""
    on_trouble: Callable[[KeylaneError], None] | None = None
    """The log or the source failed; the call is retried."""
    on_delivered: Callable[[int], None] | None = None
    """Called for every batch that the source gave, with the number of its messages. It must be quick, and not raise."""
    on_returned: Callable[[float], object] | None = None
    """Called for every handler that returned, with its seconds. As `on_delivered`."""
    on_outcome: Callable[[str], None] | None = None
    """Called for every other try of a message: failed, dead, cancelled. As `on_delivered`."""
    on_ended: Callable[[str], None] | None = None
    """It has ended, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """The options of a consumer. `Consumer` describes them."""

    mode: Mode
    appetite: Appetite
    heartbeat_interval_s: float
    batch_size: int
    max_in_flight: int
    concurrency: int
    executor: Executor
    order: Order
    release_when_behind: bool
    rebalance: bool
    max_tries: int | None
    give_up: GiveUp | None
    grace_s: float
    patience_s: float

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise InvalidInput(f"mode is {self.mode!r}: use one of {', '.join(get_args(Mode))}")
        if self.order not in get_args(Order):
            raise InvalidInput(f"order is {self.order!r}: use one of {', '.join(get_args(Order))}")
        check_executor(self.executor)
        if not isinstance(self.appetite, Appetite):
            raise InvalidInput(f"pick is {self.appetite!r}: give an Appetite, or one of random, round_robin")
        for name in ("batch_size", "max_in_flight", "concurrency", "max_tries"):
            value = getattr(self, name)
            if name == "max_tries" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInput(f"{name} is {value!r}: give a whole number, at least 1")
        _check_range(self.heartbeat_interval_s, "heartbeat_interval_s", SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S)
        _check_range(self.grace_s, "grace_s", 0.0, math.inf)
        _check_range(self.patience_s, "patience_s", 0.0, math.inf)
        if self.mode == "at_most_once" and (self.max_tries is not None or self.give_up is not None):
            raise InvalidInput("max_tries and give_up are for at_least_once: at most once tries nothing again")
        if self.give_up is not None and self.max_tries is None:
            raise InvalidInput("give_up needs max_tries: without it a message is tried for ever")


def interval_of(log: CoordinationLog, given_s: float | None) -> float:
    """The heartbeat interval: that of the log, or the given one if the log does not know its own."""
    known_s = log.interval_s
    if known_s is None or given_s is None:
        return next((one for one in (known_s, given_s) if one is not None), DEFAULT_INTERVAL_S)
    if given_s != known_s:
        raise InvalidInput(
            f"heartbeat_interval_s is {given_s!r}, and the coordination log was opened with interval_s {known_s:g}: "
            "everybody on a log has the same; leave heartbeat_interval_s out"
        )
    return known_s


def _check_range(value: float, name: str, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidInput(
            f"{name} is {value!r}: give seconds, at least {least:g}"
            + (f", at most {most:g}" if most < math.inf else "")
        )
