"""The topic of a coordination log: its creation, the settings that it needs, and whether it is still the same topic.

Owns: which settings are safe, and why; and the periodic check that the topic was not deleted, recreated or given
partitions. Never changes an existing topic.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

from confluent_kafka import KafkaError, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its own documentation imports them from here  # type: ignore[attr-defined]  # documented to be imported from here
    ConfigResource,
    ListOffsetsResultInfo,
    NewTopic,
    OffsetSpec,
    ResourceType,
    TopicDescription,
)

from keylane.errors import (
    BrokerUnavailable,
    Disconnected,
    InvalidInput,
    KafkaRefused,
    KeylaneError,
    LogReplaced,
    NoSuchTopic,
    PermissionDenied,
    RequestTimeout,
    UnsafeLog,
)
from keylane.kafka.client import KafkaLink

OffsetKind: TypeAlias = Literal["begins", "ends"]
_SPECS = {"begins": OffsetSpec.earliest(), "ends": OffsetSpec.latest()}  # type: ignore[no-untyped-call]


_TRY_S = 1.5
"""A leader that died does not answer: look up the new leader soon."""
_LEADER_PAUSE_S = 0.1


def checked_offset(found: ListOffsetsResultInfo, doing: str) -> int:
    """The offset in a leader's answer. A leader that dies meanwhile gives neither an offset nor an error."""
    if found.offset < 0:
        raise BrokerUnavailable(f"{doing}: the leader went away before it answered")
    return int(found.offset)


class PartitionOffsets:
    """Asks for the first offset of a partition of one topic, or for the offset after its last record.

    Simultaneous calls share one request. Every answer is newer than its call, so the latest offset covers every record
    that was confirmed before the call.
    """

    def __init__(self, link: KafkaLink, topic: str) -> None:
        self._link = link
        self._topic = topic
        self._try_s = min(_TRY_S, link.timeout_s)
        self._next: dict[OffsetKind, asyncio.Task[dict[int, Future[ListOffsetsResultInfo]]] | None] = {}
        self._wanted: dict[OffsetKind, set[int]] = {"begins": set(), "ends": set()}

    async def ask(self, which: OffsetKind, partition: int) -> int:
        """Retries while leaders change, until the link's deadline."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._link.timeout_s
        while True:
            try:
                return await self._ask(which, partition)
            except (BrokerUnavailable, Disconnected, RequestTimeout):
                if loop.time() + _LEADER_PAUSE_S > deadline:
                    raise
            await asyncio.sleep(_LEADER_PAUSE_S)
            await self._refresh_leaders()

    async def _refresh_leaders(self) -> None:
        """Refresh the metadata: the library keeps asking the old leaders, even after they denied being leaders."""
        doing = f"asking who leads {self._topic}"
        with suppress(BrokerUnavailable, Disconnected, RequestTimeout):  # the next request raises the error
            await self._link.call(self._list, doing=doing, timeout_s=self._try_s)

    def _list(self) -> None:
        self._link.admin.list_topics(self._topic, timeout=self._try_s)

    async def _ask(self, which: OffsetKind, partition: int) -> int:
        sending = self._next.get(which)
        if sending is None:
            sending = self._next[which] = asyncio.create_task(self._send(which))
        self._wanted[which].add(partition)
        # Its own task, not in a group: the first caller may be cancelled while others still wait for the answer.
        answers = await asyncio.shield(sending)
        doing = f"asking where {self._topic}/{partition} {which}"
        try:
            found = await self._link.answer(answers[partition], doing=doing, timeout_s=self._try_s)
        except KafkaRefused as refused:
            if refused.code != KafkaError._NOENT:
                raise
            raise BrokerUnavailable(str(refused)) from refused  # no leader is known at the moment
        return checked_offset(found, doing)

    async def _send(self, which: OffsetKind) -> dict[int, Future[ListOffsetsResultInfo]]:
        self._next[which], wanted, self._wanted[which] = None, self._wanted[which], set()
        spec: OffsetSpec = _SPECS[which]
        asked = self._link.admin.list_offsets(
            {TopicPartition(self._topic, partition): spec for partition in wanted}, request_timeout=self._try_s
        )
        return {place.partition: answer for place, answer in asked.items()}


_log = logging.getLogger("keylane.kafka")

DEFAULT_TOPIC = "__marshal"
DEFAULT_PARTITIONS = 8
DEFAULT_RETENTION_S = 7 * 24 * 3600.0
LEAST_INTERVALS = 10
"""The shortest retention. A claim holds for two; the rest is for slow readers and for brokers' clocks."""

_SAFE_COPIES = 3
_SEGMENTS = 7
_LONGEST_SEGMENT_S = 24 * 3600.0
_SEGMENT_BYTES = 64 << 20
_PAUSE_S = 0.05
_BELIEVED_GONE_S = 3.0
"""How long the topic must be unknown before it counts as deleted: a starting broker may not know it yet."""
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True)
class LogTopic:
    """A topic as it was found. `topic_id` changes when a topic is recreated under the same name."""

    name: str
    topic_id: str
    partitions: int
    copies: int


def check_topic_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise InvalidInput(
            f"topic {name!r}: a Kafka topic's name has 1 to 249 letters, digits, '.', '_' or '-'; correct it"
        )
    return name


async def provide(
    link: KafkaLink,
    name: str,
    *,
    interval_s: float,
    partitions: int | None,
    retention_s: float | None,
    copies: int | None,
) -> LogTopic:
    """The topic, created if it is missing. `UnsafeLog` if it cannot be a coordination log."""
    try:
        topic = await describe(link, name)
    except NoSuchTopic:
        topic = await _create(link, name, partitions or DEFAULT_PARTITIONS, retention_s or DEFAULT_RETENTION_S, copies)
    if partitions is not None and topic.partitions != partitions:
        raise UnsafeLog(
            f"topic {name!r} has {topic.partitions} partitions, and {partitions} are asked for: the number decides "
            "where claims are kept; leave it as it is for as long as anybody uses the log, or choose another topic"
        )
    if problem := problem_of(await _settings_once_known(link, name), topic.copies, interval_s):
        raise UnsafeLog(f"topic {name!r} cannot be a coordination log: {problem}")
    return topic


async def describe(link: KafkaLink, name: str) -> LogTopic:
    """`NoSuchTopic` if there is none, or if this user may not describe it."""
    asked = link.admin.describe_topics(TopicCollection([name]), request_timeout=link.timeout_s)[name]
    found: TopicDescription = await link.answer(asked, doing=f"looking for topic {name!r}")
    copies = min(len(partition.replicas) for partition in found.partitions)
    return LogTopic(name, str(found.topic_id), len(found.partitions), copies)


async def _settings_once_known(link: KafkaLink, name: str) -> dict[str, str]:
    """The settings of a topic that exists: another broker may not know it yet."""
    deadline = asyncio.get_running_loop().time() + _BELIEVED_GONE_S
    while True:
        try:
            return await settings(link, name)
        except NoSuchTopic:
            if asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(_PAUSE_S)


async def settings(link: KafkaLink, name: str) -> dict[str, str]:
    """All settings of a topic, including defaults."""
    resource = ConfigResource(ResourceType.TOPIC, name)
    asked = link.admin.describe_configs([resource], request_timeout=link.timeout_s)[resource]
    try:
        found = await link.answer(asked, doing=f"reading the settings of topic {name!r}")
    except PermissionDenied as denied:
        raise PermissionDenied(
            f"{denied}: DescribeConfigs on the topic, to see whether claims are safe there"
        ) from denied
    return {key: str(entry.value) for key, entry in found.items()}


def retention_of(config: Mapping[str, str]) -> float | None:
    """How many seconds a record is kept, at least; None: for ever."""
    retention_ms = int(config["retention.ms"])
    return None if retention_ms < 0 else retention_ms / 1000


def problem_of(config: Mapping[str, str], copies: int, interval_s: float) -> str:
    """Why a topic would lose or reorder claims; empty if it would not."""
    retention_s, in_sync = retention_of(config), int(config["min.insync.replicas"])
    most = copies // 2 + 1
    wrong = {
        f"cleanup.policy is {config['cleanup.policy']}, not delete: compaction drops the first claim": (
            config["cleanup.policy"] != "delete"
        ),
        f"message.timestamp.type is {config['message.timestamp.type']}, not LogAppendTime: "
        "every writer's own clock would decide who is alive": config["message.timestamp.type"] != "LogAppendTime",
        f"retention.ms is {config['retention.ms']}, less than {LEAST_INTERVALS} intervals of {interval_s:g} s": (
            retention_s is not None and retention_s < LEAST_INTERVALS * interval_s
        ),
        f"retention.bytes is {config['retention.bytes']}, which drops claims that hold": (
            int(config["retention.bytes"]) >= 0
        ),
        "unclean.leader.election.enable is true, which loses records that were confirmed": (
            config["unclean.leader.election.enable"] == "true"
        ),
        f"min.insync.replicas is {in_sync} of {copies} copies: a claim could be confirmed and lost; set it to {most}": (
            in_sync < most
        ),
        f"min.insync.replicas is {in_sync}, more than its {copies} copies: nothing can be written": in_sync > copies,
    }
    found = [text for text, is_so in wrong.items() if is_so]
    return f"{'; '.join(found)}; change it, or choose another topic to have it made" if found else ""


def safe_settings(retention_s: float, copies: int) -> dict[str, str]:
    """The settings of a new coordination log. Records expire by segment, so segments are short."""
    segment_s = min(retention_s / _SEGMENTS, _LONGEST_SEGMENT_S)
    return {
        "cleanup.policy": "delete",
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": str(int(retention_s * 1000)),
        "retention.bytes": "-1",
        "segment.ms": str(max(int(segment_s * 1000), 1)),
        "segment.jitter.ms": "0",
        "segment.bytes": str(_SEGMENT_BYTES),
        "min.insync.replicas": str(copies // 2 + 1),
        "unclean.leader.election.enable": "false",
        "compression.type": "producer",
    }


async def _create(link: KafkaLink, name: str, partitions: int, retention_s: float, copies: int | None) -> LogTopic:
    if copies is None:
        asked = link.admin.describe_cluster(request_timeout=link.timeout_s)
        nodes = (await link.answer(asked, doing="counting brokers")).nodes or []
        copies = max(1, min(_SAFE_COPIES, len(nodes)))
    wanted = NewTopic(name, partitions, copies, config=safe_settings(retention_s, copies))
    making = link.admin.create_topics([wanted], request_timeout=link.timeout_s)[name]
    try:
        await link.answer(making, doing=f"making topic {name!r}")
    except PermissionDenied as denied:
        raise PermissionDenied(f"{denied}; allow it to create the topic, or create it yourself") from denied
    except KafkaRefused as refused:
        if refused.code == KafkaError.INVALID_REPLICATION_FACTOR:
            raise InvalidInput(f"copies is {copies}: there are not so many brokers ({refused})") from refused
        if refused.code != KafkaError.TOPIC_ALREADY_EXISTS:  # another consumer created it at the same moment
            raise
    return await _wait_for_leaders(link, name)


async def _wait_for_leaders(link: KafkaLink, name: str) -> LogTopic:
    """Wait until all brokers know a new topic, and its partitions have leaders."""
    loop = asyncio.get_running_loop()
    deadline, offsets = loop.time() + link.timeout_s, PartitionOffsets(link, name)
    while True:
        try:
            topic = await describe(link, name)
            await asyncio.gather(*(offsets.ask("ends", number) for number in range(topic.partitions)))
        except (NoSuchTopic, BrokerUnavailable):
            if loop.time() > deadline:
                raise
            await asyncio.sleep(_PAUSE_S)
        else:
            return topic


class TopicWatch:
    """Checks, when the topic is used and at most every `between_s`, that it is still the topic that was opened."""

    def __init__(self, link: KafkaLink, topic: LogTopic, between_s: float) -> None:
        self._link = link
        self._topic = topic
        self._between_s = between_s
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._checking: asyncio.Task[None] | None = None
        self._unknown_since: float | None = None
        self._verdict: str | None = None

    def check(self) -> None:
        """`LogReplaced` if it is known to be another one. Starts a check if one is due, without waiting for it."""
        if self._verdict is not None:
            raise LogReplaced(self._verdict)
        if self._checking is None and self._loop.time() > self._began_at + self._between_s:
            self._begin()

    async def check_now(self) -> None:
        """Check now and wait for the result. `BrokerUnavailable` if the topic is unknown, which may be transient."""
        await asyncio.shield(self._checking or self._begin())

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait({self._checking})

    def _begin(self) -> asyncio.Task[None]:
        self._began_at = self._loop.time()
        # Not in a task group: callers do not wait for it, and `_verdict` keeps its result.
        checking = self._checking = asyncio.create_task(self._check())
        checking.add_done_callback(_log_error)
        return checking

    async def _check(self) -> None:
        try:
            self._compare(await describe(self._link, self._topic.name))
        except NoSuchTopic as error:
            self._is_unknown(error)
        finally:
            self._checking = None
        if self._verdict is not None:
            raise LogReplaced(self._verdict)

    def _compare(self, found: LogTopic) -> None:
        self._unknown_since = None
        if found.topic_id != self._topic.topic_id:
            self._verdict = (
                f"coordination log {found.name!r} was recreated: the claims in the old one are void; stop all its "
                "consumers and start them again"
            )
        elif found.partitions != self._topic.partitions:
            self._verdict = (
                f"coordination log {found.name!r} had {self._topic.partitions} partitions and has {found.partitions}: "
                "the number decides where claims are kept; stop all its consumers, and start them on a new topic"
            )

    def _is_unknown(self, error: NoSuchTopic) -> None:
        name, now = self._topic.name, self._loop.time()
        if self._unknown_since is None:
            self._unknown_since = now
        if now - self._unknown_since <= _BELIEVED_GONE_S:
            raise BrokerUnavailable(f"coordination log {name!r} is unknown at the moment: {error}") from error
        self._verdict = f"coordination log {name!r} was deleted; stop all its consumers"


def _log_error(check: asyncio.Task[None]) -> None:
    """The verdict is kept, and every other call raises errors of the brokers as well."""
    if not check.cancelled() and (error := check.exception()) is not None:
        if not isinstance(error, KeylaneError):
            raise error
        _log.info("checking the topic of the coordination log: %s", error)
