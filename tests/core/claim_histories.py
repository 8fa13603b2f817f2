"""Random coordination logs for the replay on Spark, with all that goes wrong; and a claim as a row of its world."""

from __future__ import annotations

import random
from typing import Any

from keylane.core.claim_facts import Claim, Key, LogRecord
from keylane.core.claim_records import (
    CLAIMING_PARTITION,
    RELEASE_GROUP,
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    ReleaseGroup,
    ReleasingPartition,
    coordinating_partition,
    encode,
    subject_for,
)

INTERVAL_S = 10
_STEPS_MS = [0, 0, 1, 500, 4000, 9999, 10_000, 19_999, 20_000, 20_001, 25_000, -3000]
_KINDS = ["claim"] * 4 + ["beat"] * 8 + ["release"] * 2 + ["take"] * 2 + ["pause", "noise"]


def history(dice: random.Random, count: int, partitions: int, *, first: int, strays: bool) -> list[LogRecord]:
    """Each partition of the log in its order, one after the other. `strays`: some records are in a wrong one."""
    logs: list[list[LogRecord]] = [[] for _ in range(partitions)]
    time_ms = 1_700_000_000_000
    writers = [(client, instance) for client in ("anna", "bert", "carl") for instance in ("1", "2")]
    writers = dice.sample(writers, dice.randint(1, 4))
    for _ in range(count):
        time_ms += dice.choice(_STEPS_MS)
        kind, (client, instance) = dice.choice(_KINDS), dice.choice(writers)
        group, topic, partition = dice.choice(["g", "h"]), dice.choice(["t", "u"]), dice.choice([0, 0, 1])
        home = coordinating_partition(topic, partition, partitions)
        if strays and dice.random() < 0.2:
            home = dice.randrange(partitions)
        value = _value(dice, kind, (instance, client), Key(group, topic, partition), time_ms)
        for number in range(partitions) if kind == "pause" else [home]:
            log = logs[number]
            offset = first + len(log) if not log else log[-1].offset + dice.choice([1, 1, 1, 3])
            log.append(LogRecord(number, offset, time_ms, value, _subject(dice, kind, Key(group, topic, partition))))
    return [record for log in logs for record in log]


def _value(dice: random.Random, kind: str, writer: tuple[str, str], key: Key, time_ms: int) -> bytes:
    number = dice.randrange(40)
    (instance, client), (group, topic, partition) = writer, key
    messages: dict[str, Message] = {
        "claim": ClaimingPartition(instance, client, group, topic, partition, 1),
        "beat": Heartbeat(instance, client, group, topic, partition, number, 1),
        "release": ReleasingPartition(instance, client, group, topic, partition, number, 1),
        "take": ClaimingMessages(instance, client, group, topic, partition, number, 1),
        "pause": ReleaseGroup(instance, client, group, dice.choice([0, time_ms // 1000 + 30, 2**63 - 1]), 1),
    }
    return encode(messages[kind]) if kind in messages else dice.choice([b"", b"noise", b"Heartbeat/1/x", b"\xff/1"])


def _subject(dice: random.Random, kind: str, key: Key) -> str | None:
    """Its own; none, as in Kafka; or that of another key."""
    own = subject_for(RELEASE_GROUP if kind == "pause" else CLAIMING_PARTITION, *key)
    return dice.choice([own] * 6 + [None] * 3 + ["claims.g.t.0"])


def told_claim(claim: Claim, now_ms: int) -> dict[str, Any]:
    """What one reader says of a claim, in the columns of the pipeline."""
    freshness, taken, released = claim.freshness(now_ms), claim.messages, claim.released
    return {
        "group": claim.key.group,
        "topic": claim.key.topic,
        "partition": claim.key.partition,
        "log_partition": claim.log_partition,
        "client": claim.owner and claim.owner.client,
        "instance": claim.owner and claim.owner.instance,
        "token": claim.token,
        "from_ms": claim.since_ms,
        "heartbeat_ms": claim.heartbeat_ms,
        "heartbeat_offset": claim.heartbeat_at,
        "fresh_until_ms": claim.fresh_until_ms,
        "holds_until_ms": claim.holds_until_ms,
        "next_offset": claim.offset,
        "freshness": freshness and freshness.value,
        "now_ms": now_ms,
        "taken_offset": taken and taken.at,
        "taken_to": taken and taken.proposed,
        "taken_token": taken and taken.token,
        "released_client": released and released.owner.client,
        "released_instance": released and released.owner.instance,
        "released_offset": released and released.at,
        "released_ms": released and released.time_ms,
        "released_next": released and released.offset,
    }
