"""Consumers: their configuration, their state, and every call on them that nats-py lacks.

`ConsumerConfig` is our own because nats-py's has no priority fields and sends zeros for what was not set,
while groups must be able to ask for exactly the configuration that members in other languages ask for.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

from keylane.core.names import check_consumer_name, check_stream_name
from keylane.core.subjects import check_filter, nested_filters
from keylane.errors import InvalidInput, RequestTimeout

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection

AckPolicy = Literal["explicit", "all", "none"]
DeliverPolicy = Literal["all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject"]
PriorityPolicy = Literal["none", "overflow", "pinned_client", "prioritized"]
ReplayPolicy = Literal["instant", "original"]
Action = Literal["create", "update"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "ack_policy": get_args(AckPolicy),
    "deliver_policy": get_args(DeliverPolicy),
    "priority_policy": get_args(PriorityPolicy),
    "replay_policy": get_args(ReplayPolicy),
}
_NANOSECONDS = 1_000_000_000
_NEVER = datetime(1, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    """A consumer's configuration in the server's words; durations are seconds, with the unit in the name.

    What is None is not sent, and the server's default holds.

    >>> ConsumerConfig(durable_name="billing", filter_subjects=("orders.>",), ack_wait_s=10)
    """

    name: str | None = None
    durable_name: str | None = None
    description: str | None = None
    deliver_policy: DeliverPolicy = "all"
    opt_start_seq: int | None = None
    opt_start_time: datetime | None = None
    ack_policy: AckPolicy = "explicit"
    ack_wait_s: float | None = None
    max_deliver: int | None = None
    backoff_s: tuple[float, ...] | None = None
    filter_subject: str | None = None
    filter_subjects: tuple[str, ...] | None = None
    replay_policy: ReplayPolicy = "instant"
    max_waiting: int | None = None
    max_ack_pending: int | None = None
    headers_only: bool | None = None
    max_batch: int | None = None
    max_expires_s: float | None = None
    max_bytes: int | None = None
    inactive_threshold_s: float | None = None
    num_replicas: int | None = None
    mem_storage: bool | None = None
    metadata: Mapping[str, str] | None = None
    deliver_subject: str | None = None
    priority_groups: tuple[str, ...] | None = None
    priority_policy: PriorityPolicy | None = None
    priority_timeout_s: float | None = None

    def check(self) -> ConsumerConfig:
        """Refuse what the server would refuse, or misread. Not done for what the server itself reports."""
        for name in (self.name, self.durable_name):
            if name is not None:
                check_consumer_name(name)
        if self.name and self.durable_name and self.name != self.durable_name:
            raise InvalidInput(
                f"a durable consumer has one name: got name {self.name!r} and durable_name {self.durable_name!r}"
            )
        if self.filter_subject is not None and self.filter_subjects is not None:
            raise InvalidInput("give filter_subject or filter_subjects, not both")
        for one in self.filter_subjects or ():
            check_filter(one)
        nested = nested_filters(self.filter_subjects or ())
        if nested is not None:
            raise InvalidInput(f"every subject of filter {nested[0]!r} also matches {nested[1]!r}: drop one of the two")
        if self.filter_subject is not None:
            check_filter(self.filter_subject)
        self._check_start()
        for spec in fields(self):
            self._check_value(spec.name, getattr(self, spec.name))
        return self

    def _check_start(self) -> None:
        by_sequence, by_time = self.opt_start_seq is not None, self.opt_start_time is not None
        if by_sequence != (self.deliver_policy == "by_start_sequence"):
            raise InvalidInput(
                f"deliver_policy is {self.deliver_policy!r} and opt_start_seq {self.opt_start_seq!r}: "
                "'by_start_sequence' and opt_start_seq go together"
            )
        if by_time != (self.deliver_policy == "by_start_time"):
            raise InvalidInput(
                f"deliver_policy is {self.deliver_policy!r} and opt_start_time {self.opt_start_time!r}: "
                "'by_start_time' and opt_start_time go together"
            )
        if self.opt_start_time is not None and self.opt_start_time.tzinfo is None:
            raise InvalidInput(f"opt_start_time is {self.opt_start_time}: give a time with a time zone")

    @staticmethod
    def _check_value(name: str, value: Any) -> None:
        if value is None:
            return
        if name in _CHOICES and value not in _CHOICES[name]:
            raise InvalidInput(f"{name} is {value!r}: use one of {', '.join(_CHOICES[name])}")
        if name.endswith("_s"):
            for one in value if isinstance(value, tuple) else (value,):
                if not isinstance(one, (int, float)) or not 0 <= one < math.inf:
                    raise InvalidInput(f"{name} is {one!r}: give seconds, 0 or more")
        elif isinstance(value, int) and value < -1:
            raise InvalidInput(f"{name} is {value}: give 0 or more, or -1 for no limit")

    @property
    def effective_name(self) -> str | None:
        return self.name or self.durable_name

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is None:
                continue
            key = spec.name.removesuffix("_s")
            if isinstance(value, datetime):
                wire[key] = value.astimezone(UTC).isoformat().replace("+00:00", "Z")
            elif spec.name == "backoff_s":
                wire[key] = [_to_nanoseconds(one) for one in value]
            elif spec.name.endswith("_s"):
                wire[key] = _to_nanoseconds(value)
            elif isinstance(value, tuple):
                wire[key] = list(value)
            elif isinstance(value, Mapping):
                wire[key] = dict(value)
            else:
                wire[key] = value
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ConsumerConfig:
        values: dict[str, Any] = {}
        for spec in fields(cls):
            value = wire.get(spec.name.removesuffix("_s"))
            if value is None:
                continue
            if spec.name == "backoff_s":
                value = tuple(one / _NANOSECONDS for one in value)
            elif spec.name.endswith("_s"):
                value = value / _NANOSECONDS
            elif spec.name == "opt_start_time":
                value = parse_time(value)
            elif isinstance(value, list):
                value = tuple(value)
            values[spec.name] = value
        return cls(**values)


@dataclass(frozen=True, slots=True)
class PriorityGroupState:
    """Who is pinned in a priority group, as the server sees it."""

    group: str
    pinned_client_id: str | None
    pinned_since: datetime | None


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """A consumer's configuration and where it stands."""

    stream: str
    name: str
    created: datetime
    config: ConsumerConfig
    delivered_sequence: int
    """In the stream. The server goes on to its end where nothing matches the filters."""
    delivered_count: int
    """Since the consumer was made, or reset."""
    ack_floor: int
    num_pending: int
    num_ack_pending: int
    num_redelivered: int
    num_waiting: int
    leader: str | None
    paused: bool
    priority_groups: tuple[PriorityGroupState, ...]
    quorum_age_s: float = 0.0
    """How long ago its leader last heard from enough other servers to be the leader; 0 if it needs none."""

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ConsumerInfo:
        return cls(
            stream=wire["stream_name"],
            name=wire["name"],
            created=parse_time(wire["created"]),
            config=ConsumerConfig.from_wire(wire["config"]),
            delivered_sequence=wire["delivered"]["stream_seq"],
            delivered_count=wire["delivered"]["consumer_seq"],
            ack_floor=wire["ack_floor"]["stream_seq"],
            num_pending=wire.get("num_pending", 0),
            num_ack_pending=wire.get("num_ack_pending", 0),
            num_redelivered=wire.get("num_redelivered", 0),
            num_waiting=wire.get("num_waiting", 0),
            leader=wire.get("cluster", {}).get("leader"),
            paused=wire.get("paused", False),
            priority_groups=tuple(_group_state(one) for one in wire.get("priority_groups") or ()),
            quorum_age_s=_quorum_age_s(wire.get("cluster", {}).get("replicas") or ()),
        )


def _quorum_age_s(replicas: Sequence[Mapping[str, Any]]) -> float:
    """The servers beside the leader, each with the time since the leader last heard from it."""
    needed = (len(replicas) + 1) // 2
    heard = sorted(one.get("active", 0) for one in replicas)
    return float(heard[needed - 1]) / _NANOSECONDS if needed else 0.0


async def create(
    connection: Connection, stream: str, config: ConsumerConfig, *, action: Action | None = None
) -> ConsumerInfo:
    """Create a consumer, or update it.

    `action="create"` succeeds only if it is new or its configuration is identical (else error 10148),
    `action="update"` only if it exists (else 10149); without an action the server does either.
    """
    check_stream_name(stream)
    config.check()
    if config.effective_name is None:
        config = replace(config, name=secrets.token_hex(8))
    request: dict[str, Any] = {"stream_name": stream, "config": config.to_wire()}
    if action is not None:
        request["action"] = action
    answer = await connection.api.request(f"CONSUMER.CREATE.{stream}.{config.effective_name}", request)
    return ConsumerInfo.from_wire(answer)


async def update(connection: Connection, stream: str, config: ConsumerConfig) -> ConsumerInfo:
    return await create(connection, stream, config, action="update")


async def info(connection: Connection, stream: str, consumer: str, *, timeout_s: float | None = None) -> ConsumerInfo:
    return ConsumerInfo.from_wire(await _call(connection, "INFO", stream, consumer, timeout_s=timeout_s))


async def delete(connection: Connection, stream: str, consumer: str) -> None:
    await _call(connection, "DELETE", stream, consumer)


def post_delete(connection: Connection, stream: str, consumer: str) -> None:
    """Delete a consumer without waiting for the answer."""
    target = connection.api.subject(f"CONSUMER.DELETE.{stream}.{consumer}")
    connection.nats.post(b"PUB %b 0\r\n\r\n" % target.encode())
    connection.nats.push()


def next_subject(connection: Connection, stream: str, consumer: str) -> str:
    """Where pulls go."""
    return connection.api.subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}")


async def list_all(connection: Connection, stream: str) -> AsyncIterator[ConsumerInfo]:
    """Every consumer of the stream, page by page."""
    check_stream_name(stream)
    async for wire in connection.api.paged(f"CONSUMER.LIST.{stream}", "consumers"):
        yield ConsumerInfo.from_wire(wire)


async def names(connection: Connection, stream: str) -> list[str]:
    check_stream_name(stream)
    return [name async for name in connection.api.paged(f"CONSUMER.NAMES.{stream}", "consumers")]


async def reset(connection: Connection, stream: str, consumer: str, *, sequence: int | None = None) -> int:
    """Deliver again from `sequence`, or from just above the ack floor; returns the sequence it starts at.

    Deliveries in flight are forgotten: only acks of new deliveries count. Needs server 2.14.
    """
    connection.require("consumer_reset")
    if sequence is not None and sequence < 1:
        raise InvalidInput(f"reset to sequence {sequence}: sequences start at 1")
    payload = {"seq": sequence} if sequence is not None else None
    try:
        answer = await _call(connection, "RESET", stream, consumer, payload)
    except RequestTimeout:
        # The server does not answer at all when there is no such consumer; this says it.
        await info(connection, stream, consumer)
        raise
    return int(answer["reset_seq"])


async def unpin(connection: Connection, stream: str, consumer: str, group: str) -> None:
    """Clear the pin of a priority group: the server pins another client with the next delivery."""
    connection.require("priority_groups")
    await _call(connection, "UNPIN", stream, consumer, {"group": group})


async def pause(connection: Connection, stream: str, consumer: str, until: datetime) -> timedelta:
    """Deliver nothing until then; returns how long that is by the server's clock."""
    if until.tzinfo is None:
        raise InvalidInput(f"pause until {until}: give a time with a time zone")
    wire_time = until.astimezone(UTC).isoformat().replace("+00:00", "Z")
    answer = await _call(connection, "PAUSE", stream, consumer, {"pause_until": wire_time})
    return timedelta(seconds=answer.get("pause_remaining", 0) / _NANOSECONDS)


async def resume(connection: Connection, stream: str, consumer: str) -> None:
    await _call(connection, "PAUSE", stream, consumer, {})


async def step_down(connection: Connection, stream: str, consumer: str) -> None:
    """Let the consumer's leader hand over to another server of the cluster."""
    check_stream_name(stream)
    check_consumer_name(consumer)
    await connection.api.request(f"CONSUMER.LEADER.STEPDOWN.{stream}.{consumer}")


async def _call(
    connection: Connection,
    verb: str,
    stream: str,
    consumer: str,
    payload: dict[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    check_stream_name(stream)
    check_consumer_name(consumer)
    return await connection.api.request(f"CONSUMER.{verb}.{stream}.{consumer}", payload, timeout_s)


def parse_time(text: str) -> datetime:
    """The server's timestamps, which carry nanoseconds; Python keeps microseconds."""
    return datetime.fromisoformat(text).astimezone(UTC)


def _to_nanoseconds(seconds: float) -> int:
    return round(seconds * _NANOSECONDS)


def _group_state(wire: Mapping[str, Any]) -> PriorityGroupState:
    since = parse_time(wire["pinned_ts"]) if wire.get("pinned_ts") else _NEVER
    return PriorityGroupState(
        group=wire["group"],
        pinned_client_id=wire.get("pinned_client_id") or None,
        pinned_since=None if since == _NEVER else since,
    )
