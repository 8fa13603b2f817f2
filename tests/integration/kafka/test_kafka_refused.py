"""A broker with logins and ACLs, of which this user lacks some; brokers that are not there; and a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # documented to be imported from here
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from keylane.core.world import World
from keylane.errors import (
    AuthenticationFailed,
    InvalidInput,
    KeylaneError,
    OutcomeUnknown,
    PermissionDenied,
    ServerUnreachable,
)
from keylane.kafka import KafkaAddress, KafkaLink, KafkaLog, open_kafka, open_kafka_log
from keylane.marshal import Appetite, Consumer, MemorySource, Position, Verdict, catch_up
from keylane.retrying import Backoff
from tests.integration.kafka.log_rig import Unique, beat, claim, create, delete, start_again
from tests.integration.kafka.topic_rig import make_rule
from tests.integration.marshal.rig import GROUP, TOPIC, Seen, fill
from tests.peers.kafka import Kafka
from tests.waiter import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]

INTERVAL_S = 2.0
ALL_OPERATIONS = ("DESCRIBE", "DESCRIBE_CONFIGS", "READ", "WRITE")


@pytest.fixture(scope="module")
def guarded() -> Iterator[Kafka]:
    with Kafka.start(logins={"boss": "boss-secret", "worker": "worker-secret"}) as running:
        yield running


def login(kafka: Kafka, user: str, password: str | None = None) -> KafkaAddress:
    options = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": user,
        "sasl.password": password or f"{user}-secret",
    }
    return KafkaAddress(kafka.bootstrap, options)


@pytest.fixture
async def boss(guarded: Kafka) -> AsyncIterator[KafkaLink]:
    async with open_kafka(login(guarded, "boss")) as link:
        yield link


@pytest.fixture
async def worker(guarded: Kafka) -> AsyncIterator[KafkaLink]:
    async with open_kafka(login(guarded, "worker")) as link:
        yield link


@pytest.fixture
async def name(boss: KafkaLink, unique: Unique) -> AsyncIterator[str]:
    chosen = unique("claims")
    try:
        yield chosen
    finally:
        await delete(boss, chosen)


async def allow(boss: KafkaLink, name: str, *operations: str) -> None:
    for operation in operations:
        rule = AclBinding(
            ResourceType.TOPIC,
            name,
            ResourcePatternType.LITERAL,
            "User:worker",
            "*",
            AclOperation[operation],
            AclPermissionType.ALLOW,
        )
        await make_rule(boss, rule)


# ---- unauthorised -----------------------------------------------------------------------------------


async def test_a_user_who_may_nothing(worker: KafkaLink, name: str) -> None:
    with pytest.raises(PermissionDenied, match=f"looking for topic '{name}': .*lacks a permission"):
        async with open_kafka_log(worker, name, interval_s=INTERVAL_S):
            pass


async def test_a_user_who_may_not_create(boss: KafkaLink, worker: KafkaLink, name: str) -> None:
    await allow(boss, name, *ALL_OPERATIONS)
    with pytest.raises(PermissionDenied, match=f"making topic '{name}': .*or create it yourself"):
        async with open_kafka_log(worker, name, interval_s=INTERVAL_S):
            pass


async def test_a_user_who_may_not_see_the_settings(boss: KafkaLink, worker: KafkaLink, name: str) -> None:
    await create(boss, name)
    await allow(boss, name, "DESCRIBE", "READ", "WRITE")
    with pytest.raises(PermissionDenied, match=f"reading the settings of topic '{name}': .*DescribeConfigs"):
        async with open_kafka_log(worker, name, interval_s=INTERVAL_S):
            pass


async def test_a_user_who_may_not_read(boss: KafkaLink, worker: KafkaLink, name: str) -> None:
    await create(boss, name)
    await allow(boss, name, "DESCRIBE", "DESCRIBE_CONFIGS", "WRITE")
    async with open_kafka_log(worker, name, interval_s=INTERVAL_S) as log:
        await log.append(claim("anna"), 0)
        with pytest.raises(PermissionDenied, match=f"reading {name}/0: .*lacks a permission"):
            await catch_up(log, World(INTERVAL_S))


async def test_a_user_who_may_not_write(boss: KafkaLink, worker: KafkaLink, name: str) -> None:
    await create(boss, name)
    await allow(boss, name, "DESCRIBE", "DESCRIBE_CONFIGS", "READ")
    async with open_kafka_log(worker, name, interval_s=INTERVAL_S) as log:
        await catch_up(log, World(INTERVAL_S))
        with pytest.raises(PermissionDenied, match=f"writing to {name}/0: .*lacks a permission"):
            await log.append(claim("anna"), 0)
        consumer = await Consumer(log, MemorySource({TOPIC: 1}), GROUP, "anna", [TOPIC], Seen()).start()
        with pytest.raises(PermissionDenied):
            async with asyncio.timeout(30):
                await consumer.wait()


async def test_a_user_who_may_all_that_is_needed(boss: KafkaLink, worker: KafkaLink, name: str) -> None:
    await create(boss, name)
    await allow(boss, name, *ALL_OPERATIONS)
    async with open_kafka_log(worker, name, interval_s=INTERVAL_S) as log:
        world = World(INTERVAL_S)
        position = await log.append(claim("anna"), 0)
        await catch_up(log, world)
        assert world.verdict_of(*position) is Verdict.WON


# ---- links ------------------------------------------------------------------------------------------


async def test_a_wrong_password(guarded: Kafka) -> None:
    began = time.monotonic()
    with pytest.raises(AuthenticationFailed, match="check the sasl") as refused:
        async with open_kafka(login(guarded, "worker", "wrong"), timeout_s=60):
            pass
    assert time.monotonic() - began < 30, "it is told at once, not at the deadline"
    assert "wrong" not in str(refused.value)
    assert "wrong" not in repr(login(guarded, "worker", "wrong"))


async def test_no_login_where_one_is_needed(guarded: Kafka) -> None:
    began = time.monotonic()
    with pytest.raises(ServerUnreachable, match=r"security\.protocol"):
        async with open_kafka(guarded.bootstrap, timeout_s=1):
            pass
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
async def test_a_broker_that_is_not_there(host: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # taken, and nobody listens
        began = time.monotonic()
        with pytest.raises(ServerUnreachable, match="check that a broker listens at"):
            async with open_kafka(f"{host}:{held.getsockname()[1]}", timeout_s=1):
                pass
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("bootstrap", ["", "a b:9092", "host:port", "broker:9092,", "broker:9092;other:9092"])
async def test_addresses_that_cannot_be(bootstrap: str) -> None:
    with pytest.raises(InvalidInput, match="give brokers as host:port"):
        KafkaAddress(bootstrap)


async def test_options_that_are_not_the_callers() -> None:
    with pytest.raises(InvalidInput, match="option 'acks' is given: keylane sets it itself"):
        KafkaAddress("broker:9092", {"acks": "1"})
    with pytest.raises(InvalidInput, match=r"Kafka options \['no.such.option'\] do not fit"):
        async with open_kafka(KafkaAddress("broker:9092", {"no.such.option": "1"})):
            pass


# ---- a broker that goes and comes -------------------------------------------------------------------


async def test_a_broker_that_restarts(guarded: Kafka, boss: KafkaLink, name: str) -> None:
    """Claims outlive it, and the owner goes on."""
    source, seen = MemorySource({TOPIC: 3}), Seen()
    fill(source, 3, 10)
    async with open_kafka_log(boss, name, interval_s=INTERVAL_S, partitions=4) as log:
        options = {"heartbeat_interval_s": INTERVAL_S, "pick": Appetite(greedy=True)}
        async with Consumer(log, source, GROUP, "anna", [TOPIC], seen, **options) as anna:  # type: ignore[arg-type]
            await seen.until(lambda one: len(one.messages) == 30)
            await until(lambda: len(anna.partitions) == 3)
            [broker] = guarded.brokers
            await asyncio.to_thread(broker.kill)
            await start_again(broker)
            fill(source, 3, 10, first=10)
            await seen.until(lambda one: len(one.times) == 60, 60)
            await until(lambda: len(anna.partitions) == 3)
        assert {place: count for place, count in seen.times.items() if count > 1} == {}, "it never lost a partition"


async def test_an_append_in_doubt_is_harmless(guarded: Kafka, boss: KafkaLink, name: str) -> None:
    """The broker stands still until the writer gives up, and goes on. Then the writer says the same again, and more."""
    async with (
        open_kafka(login(guarded, "boss"), timeout_s=6) as link,
        open_kafka_log(link, name, interval_s=INTERVAL_S, partitions=1) as log,
    ):
        await log.append(claim("anna"), 0)
        [broker] = guarded.brokers
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            with pytest.raises(OutcomeUnknown) as unknown:
                await log.append(beat("anna", 1), 0)
            assert unknown.value.is_transient
            with pytest.raises(KeylaneError) as silent:
                await log.bounds(0)
            assert silent.value.is_transient, silent.value
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        last = await _patiently(log, 1)
        await _patiently(log, 2)
        world = World(INTERVAL_S)
        patience = Backoff("the log", 60)
        while world.next_offset(0) == 0:
            try:
                await catch_up(log, world)
            except KeylaneError as error:
                await patience.after(error)
        owned = world.claim_of("billing", "orders", 0)
        assert owned is not None
        assert owned.owner is not None
        assert (owned.owner.client, owned.offset, owned.token) == ("anna", 2, 0)
        assert last.offset in (1, 2), "what was in doubt is there once, before it, or not at all"


async def _patiently(log: KafkaLog, offset: int) -> Position:
    patience = Backoff("the log", 60)
    while True:
        try:
            return await log.append(beat("anna", offset), 0)
        except KeylaneError as error:
            await patience.after(error)
