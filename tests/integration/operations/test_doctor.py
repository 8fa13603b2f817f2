"""`keylane doctor` on a real server: every finding is brought about, and a healthy account has none."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import keylane
from keylane import Connection, fleet, groups
from keylane.cli.doctor.render import as_wire, needs_action
from keylane.core import diagnosis_rules
from keylane.core.diagnosis_facts import Finding
from keylane.core.fleet_partitions import hashed
from keylane.core.fleet_records import (
    FleetClaim,
    FleetSpec,
    HistoryEntry,
    LeaseState,
    WorkerLease,
    claim_key,
    history_key,
    to_json,
    worker_key,
)
from keylane.core.partitions import Partitioning
from keylane.errors import NoSuchGroup, NotFound
from keylane.fleet.store import FLEET_BUCKET
from keylane.groups.config import ElasticConfig, StaticConfig
from keylane.jetstream import Bucket, ConsumerConfig, Outgoing, consumers, parse_time, publish_many, streams
from keylane.operations import diagnosis, server_status
from keylane.operations.diagnosis import findings
from keylane.server import NatsCluster, NatsServer
from keylane.spark import compatibility
from tests.waiter import until

RULES = set(re.findall(r'rule="([a-z-]+)"', Path(diagnosis_rules.__file__).read_text(encoding="utf-8")))


@dataclass
class Lab:
    """A stream of 4 partitions, and ways to make something wrong with it."""

    connection: Connection
    stream: str

    async def make(self, **wanted: Any) -> None:
        by = Partitioning(f"{self.stream}.*", (1,), 4)
        config = {
            "name": self.stream,
            "subjects": [by.filter],
            "storage": "file",
            "retention": "limits",
            "subject_transform": {"src": by.filter, "dest": by.destination},
            "allow_direct": True,
        }
        await streams.create_json(self.connection, {**config, **wanted})

    async def change(self, **wanted: Any) -> None:
        config = (await streams.info_json(self.connection, self.stream))["config"]
        await streams.update_json(self.connection, {**config, **wanted})

    async def static(self, *members: str, group: str = "g") -> None:
        await groups.create_static(self.connection, self.stream, group, partitions=4, members=members or ("a", "b"))

    async def elastic(self, *members: str) -> None:
        await groups.create_elastic(
            self.connection, self.stream, "e", partitions=4, partition_by=f"{self.stream}.*", members=members
        )

    async def record(self, bucket: str, key: str, value: bytes) -> None:
        """Write a record past all checks."""
        there = Bucket(self.connection, bucket)
        await there.ensure(replicas=1)
        await there.put(f"{self.stream}.{key}", value, revision=0)

    async def fleet(self, partitions: int = 4, **wanted: Any) -> None:
        source = hashed(partitions, f"{self.stream}.*")
        await self.record(FLEET_BUCKET, "f.spec", to_json(FleetSpec(source=source.to_wire(), prefix="f", **wanted)))

    async def pinned(self, name: str, group: str = "PCG", **wanted: Any) -> None:
        config = ConsumerConfig(
            durable_name=name,
            priority_groups=(group,),
            priority_policy="pinned_client",
            priority_timeout_s=wanted.pop("timeout_s", 5.0),
            **wanted,
        )
        await consumers.create(self.connection, self.stream, config)

    async def publish(self, keys: int) -> None:
        await publish_many(self.connection, [Outgoing(f"{self.stream}.k{number}", b"x") for number in range(keys)])

    async def found(self, **options: Any) -> tuple[Finding, ...]:
        return (await findings(self.connection, self.stream, **options))[1]


@pytest.fixture
async def lab(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[Lab]:
    made = Lab(connection, unique("D"))
    yield made
    for bucket in ("static-consumer-groups", "elastic-consumer-groups", FLEET_BUCKET):
        for entry in await Bucket(connection, bucket).entries(made.stream):
            if entry.value is not None:
                await Bucket(connection, bucket).delete(entry.key, revision=entry.revision)
    for name in await streams.names(connection):
        if name.startswith(made.stream):
            await streams.delete(connection, name)


# ---- what is brought about, by the rule that must find it ----------------------------------------------------

BROUGHT: dict[str, Callable[[Lab], Awaitable[None]]] = {}


def brings(rule: str) -> Callable[[Callable[[Lab], Awaitable[None]]], Callable[[Lab], Awaitable[None]]]:
    def keep(scenario: Callable[[Lab], Awaitable[None]]) -> Callable[[Lab], Awaitable[None]]:
        BROUGHT[rule] = scenario
        return scenario

    return keep


@brings("interest-retention")
async def _interest(lab: Lab) -> None:
    await lab.make(retention="interest")
    await lab.static()


@brings("shared-work-queue")
async def _two_on_a_queue(lab: Lab) -> None:
    await lab.make(retention="workqueue")
    await lab.static()
    await lab.static(group="h")


@brings("per-subject-limit")
async def _per_subject(lab: Lab) -> None:
    await lab.make(max_msgs_per_subject=2)
    await lab.static()


@brings("discard-old")
async def _discard(lab: Lab) -> None:
    await lab.make(retention="workqueue", max_msgs=100)
    await lab.static()


@brings("duplicate-window")
async def _window(lab: Lab) -> None:
    await lab.make(duplicate_window=5_000_000_000)
    await lab.static()


@brings("async-persistence")
async def _asynchronous(lab: Lab) -> None:
    await lab.make(persist_mode="async")
    await lab.static()


@brings("transform-missing")
async def _no_transform(lab: Lab) -> None:
    await lab.make()
    await lab.static()
    await lab.change(subject_transform=None)


@brings("transform-differs")
async def _other_transform(lab: Lab) -> None:
    await lab.make()
    await lab.static()
    by = Partitioning(f"{lab.stream}.*", (1,), 8)
    await lab.change(subject_transform={"src": by.filter, "dest": by.destination})


@brings("transform-unusable")
async def _unusable_transform(lab: Lab) -> None:
    await lab.make()
    await lab.static()
    await lab.change(subject_transform={"src": f"{lab.stream}.*", "dest": "x.{{Partition(4,1)}}.{{Wildcard(1)}}"})


@brings("unnumbered-subjects")
async def _more_subjects(lab: Lab) -> None:
    await lab.make()
    await lab.static()
    await lab.change(subjects=[f"{lab.stream}.*", f"{lab.stream}.*.more"])


@brings("max-consumers")
async def _little_room(lab: Lab) -> None:
    await lab.make(max_consumers=1)
    await lab.static()


@brings("slow-filters")
async def _slow(lab: Lab) -> None:
    await lab.make()
    await lab.static()
    await lab.pinned("g-a", filter_subjects=("0.>", "1.>"))
    await lab.publish(150)


@brings("many-filters")
async def _many(lab: Lab) -> None:
    await lab.make()
    await lab.static()
    await lab.pinned("g-a", filter_subjects=tuple(f"{number}.>" for number in range(501)))


@brings("broken-record")
async def _broken(lab: Lab) -> None:
    await lab.make()
    await lab.record("static-consumer-groups", "g", b"{nonsense")


@brings("queue-missing")
async def _no_queue(lab: Lab) -> None:
    await lab.make()
    await lab.elastic("a")
    await streams.delete(lab.connection, f"{lab.stream}-e")


@brings("idle-members")
async def _idle(lab: Lab) -> None:
    await lab.make()
    await lab.static("a", "b", "c", "d", "e")


@brings("uneven-shares")
async def _uneven(lab: Lab) -> None:
    await lab.make()
    await lab.static("a", "b", "c")


@brings("unowned-partitions")
async def _unowned(lab: Lab) -> None:
    await lab.make()
    await lab.elastic()


@brings("absent-members")
async def _absent(lab: Lab) -> None:
    await lab.make()
    await lab.static()


@brings("orphaned-consumer")
async def _orphan(lab: Lab) -> None:
    await lab.make()
    await lab.static()
    await lab.pinned("gone-a", filter_subjects=("0.>",))


@brings("orphaned-stream")
async def _orphaned_queue(lab: Lab) -> None:
    await lab.make()
    await lab.elastic("a")
    bucket = Bucket(lab.connection, "elastic-consumer-groups")
    entry = await bucket.get(f"{lab.stream}.e")
    assert entry is not None
    await bucket.delete(entry.key, revision=entry.revision)


@brings("name-collision")
async def _collision(lab: Lab) -> None:
    await lab.make()
    for group, member in (("x", "y-z"), ("x-y", "z")):
        record = StaticConfig(partitions=4, members=(member,)).to_json()
        await lab.record("static-consumer-groups", group, record)


@brings("flapping-lease")
async def _lost_workers(lab: Lab) -> None:
    await lab.make()
    await lab.fleet()
    for version in range(1, 4):
        entry = HistoryEntry(epoch=1, version=version, at_ms=int(time.time() * 1000), cause="emergency")
        await lab.record(FLEET_BUCKET, f"f.{history_key(version)}", to_json(entry))


@brings("redeliveries")
async def _late(lab: Lab) -> None:
    await lab.make()
    await lab.static()
    await lab.pinned("g-a", filter_subjects=("0.>", "1.>", "2.>", "3.>"), ack_wait_s=0.1)
    await lab.publish(4)
    pull = json.dumps({"batch": 8, "expires": 20_000_000_000, "group": "PCG"}).encode()
    inbox = lab.connection.nats.new_inbox()
    await lab.connection.nats.subscribe(inbox)
    await lab.connection.nats.publish(consumers.next_subject(lab.connection, lab.stream, "g-a"), pull, reply=inbox)

    async def redelivered() -> int:
        return (await consumers.info(lab.connection, lab.stream, "g-a")).num_redelivered

    await until(redelivered)


@pytest.mark.parametrize("rule", sorted(BROUGHT))
async def test_it_finds(lab: Lab, rule: str) -> None:
    await BROUGHT[rule](lab)
    found = await lab.found()
    assert rule in {one.rule for one in found}, found
    for one in found:
        assert one.where
        assert one.what
        assert one.why
        assert one.fix


async def test_a_record_without_its_stream(lab: Lab) -> None:
    await lab.make()
    await lab.static()
    await streams.delete(lab.connection, lab.stream)
    with pytest.raises(NotFound, match="there is no stream"):
        await lab.found()
    _, found = await findings(lab.connection)
    assert "stream-missing" in {one.rule for one in found if one.where == f"{lab.stream}/g"}


async def test_a_pin_that_times_out_again_and_again(lab: Lab) -> None:
    await lab.make()
    await lab.static()
    await lab.pinned("g-a", filter_subjects=("0.>", "1.>", "2.>", "3.>"), timeout_s=0.2, ack_wait_s=0.2)
    await lab.publish(4)
    subject = consumers.next_subject(lab.connection, lab.stream, "g-a")
    inbox = lab.connection.nats.new_inbox()
    await lab.connection.nats.subscribe(inbox)

    async def careless() -> None:
        """A reader that pulls once, and never again under the pin that it was given."""
        while True:
            pull = json.dumps({"batch": 1, "expires": 500_000_000, "group": "PCG"}).encode()
            await lab.connection.nats.publish(subject, pull, reply=inbox)
            await asyncio.sleep(0.05)

    reading = asyncio.create_task(careless())
    try:
        found = await lab.found(watch_s=3.0)
    finally:
        reading.cancel()
    [flaps] = [one for one in found if one.rule == "flapping-pin"]
    assert "g-a timed out" in flaps.what


async def test_who_does_not_watch_does_not_say_that_pins_are_fine(lab: Lab) -> None:
    await lab.make()
    await lab.static()
    await lab.pinned("g-a", filter_subjects=("0.>", "1.>"))
    facts, _ = await findings(lab.connection, lab.stream)
    assert ["`--watch 15` does" in one.why for one in facts.unchecked if one.what == "whether pins flap"] == [True]


async def test_a_fleet_without_workers_and_what_a_dead_worker_left(lab: Lab) -> None:
    await lab.make()
    await lab.fleet(layout="worker")
    await lab.pinned("f-3", "fleet", filter_subjects=("0.>", "1.>"))
    await lab.pinned("f-4", "fleet", filter_subjects=("2.>", "3.>"))
    alive = WorkerLease(worker=4, instance="i", taken=1)
    await lab.record(FLEET_BUCKET, f"f.{worker_key(4)}", to_json(alive))
    dead = WorkerLease(worker=3, instance="j", taken=1, state=LeaseState.EXPIRED)
    await lab.record(FLEET_BUCKET, f"f.{worker_key(3)}", to_json(dead))
    found = {one.rule: one for one in await lab.found()}
    assert "4 of 4 partitions have no owner; 1 worker runs" in found["unowned-partitions"].what
    assert "consumer f-3 belongs to a worker of fleet f" in found["orphaned-consumer"].what
    assert "f-4" not in str([one for one in await lab.found() if one.rule == "orphaned-consumer"])


async def test_what_dead_workers_hold_is_owned_by_nobody(lab: Lab) -> None:
    """All were killed at once: their leases and claims still say that they live."""
    await lab.make()
    await lab.fleet(lease_s=0.2)
    await lab.record(FLEET_BUCKET, f"f.{worker_key(1)}", to_json(WorkerLease(worker=1, instance="i", taken=1)))
    for partition in range(4):
        claim = FleetClaim(partition=str(partition), worker=1, instance="i", token=1, held=True)
        await lab.record(FLEET_BUCKET, f"f.{claim_key(str(partition))}", to_json(claim))

    async def said() -> list[str]:
        return [one.what for one in await lab.found() if one.rule == "unowned-partitions"]

    assert (await until(said)) == ["4 of 4 partitions have no owner; 0 workers run"]


async def test_a_fleets_broken_record(lab: Lab) -> None:
    await lab.make()
    await lab.record(FLEET_BUCKET, "f.spec", b"[]")
    [found] = await lab.found()
    assert (found.rule, found.severity, found.where) == ("broken-record", "error", f"{lab.stream}/f")


async def test_an_elastic_group_whose_queue_counts_otherwise(lab: Lab) -> None:
    await lab.make()
    await lab.elastic("a")
    bucket = Bucket(lab.connection, "elastic-consumer-groups")
    entry = await bucket.get(f"{lab.stream}.e")
    assert entry is not None
    assert entry.value is not None
    config = ElasticConfig.from_json(entry.value, "here")
    by = tuple(replace(one, partitions=8) for one in config.partitioning)
    changed = replace(config, partitions=8, partitioning=by, stored=None)
    await bucket.put(entry.key, changed.to_json(), revision=entry.revision)
    assert "transform-differs" in {one.rule for one in await lab.found()}


async def test_a_healthy_fleet_has_nothing_to_do(lab: Lab) -> None:
    await lab.make()
    handled = 0

    async def handler(_: Any) -> None:
        nonlocal handled
        handled += 1

    partitions = hashed(4, f"{lab.stream}.*")
    async with fleet.join(lab.connection, lab.stream, "f", handler, partitions=partitions) as worker:
        await until(lambda: len(worker.partitions) == 4)
        await lab.publish(10)
        await until(lambda: handled == 10)
        facts, found = await findings(lab.connection, lab.stream, "f")
        assert found == ()
        assert not needs_action(found)
        assert len(facts.consumers[lab.stream]) == 4
        wire = as_wire("here", facts, found)
        assert json.loads(json.dumps(wire))["looked_at"] == {"streams": 1, "groups": 0, "fleets": 1, "consumers": 4}
    with pytest.raises(NoSuchGroup, match="has no group and no fleet 'g'; there is: f"):
        await findings(lab.connection, lab.stream, "g")


# ---- the server --------------------------------------------------------------------------------------------


async def test_an_old_server_and_its_faults(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    await lab.make()
    await lab.static()
    monkeypatch.setattr(Connection, "server_version", (2, 12, 3))
    found = await lab.found()
    assert "no consumer reset" in next(one.what for one in found if one.rule == "old-server")
    faults = {one.what[one.what.index("#") :].split(")")[0]: one for one in found if one.rule == "server-fault"}
    assert {"#7819", "#7984", "#7852", "#8491"} == faults.keys()
    assert faults["#7819"].fix == "update nats-server to 2.12.5 or newer"
    assert faults["#7819"].issue == "https://github.com/nats-io/nats-server/issues/7819"


async def test_a_clock_that_is_wrong(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def later(text: str) -> datetime:
        return parse_time(text) + timedelta(minutes=1)

    monkeypatch.setattr(server_status, "parse_time", later)
    await lab.make()
    [found] = [one for one in await lab.found() if one.rule == "clock"]
    assert "60.0 s ahead of this machine's" in found.what


async def test_how_often_the_server_syncs_where_the_system_account_exports_it() -> None:
    accounts = """
    system_account: SYS
    accounts {
      SYS { users: [{user: sys, password: sys}], exports: [{service: "$SYS.REQ.SERVER.PING.VARZ"}] }
      A { jetstream: enabled, users: [{user: a, password: a}],
          imports: [{service: {account: SYS, subject: "$SYS.REQ.SERVER.PING.VARZ"}}] }
    }
    """
    with NatsServer.start(extra_config=accounts, sync="2m") as server:
        async with keylane.connect(server.url, user="a", password="a") as connection:  # noqa: S106
            facts, found = await findings(connection)
    assert facts.server.sync_s == {"keylane": 120.0}
    assert [(one.rule, one.severity) for one in found] == [("sync-interval", "warning")]


async def test_an_account_that_may_not_see_it_says_unknown(connection: Connection) -> None:
    facts, found = await findings(connection)
    assert facts.server.sync_s is None
    assert "sync-interval" not in {one.rule for one in found}
    assert "how often the server syncs to disk" in {one.what for one in facts.unchecked}


async def test_a_spark_that_does_not_fit(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "version", lambda _: "3.5.0")
    monkeypatch.setattr(diagnosis, "find_spec", lambda _: object())
    _, found = await findings(connection)
    [misfit] = [one for one in found if one.rule == "spark-fit"]
    assert "this is Spark 3.5.0" in misfit.what or "Java" in misfit.what
    monkeypatch.setattr(diagnosis, "find_spec", lambda _: None)
    assert "spark-fit" not in {one.rule for one in (await findings(connection))[1]}


DENIED = ["$JS.API.STREAM.LIST", "$JS.API.STREAM.INFO.KV_keylane-fleets", "$JS.API.CONSUMER.LIST.>", "$SYS.>"]


@pytest.fixture
def restricted() -> Iterator[NatsServer]:
    users = f"""authorization {{ users: [
        {{ user: admin, password: admin }}
        {{ user: alice, password: alice, permissions: {{ publish: {{ deny: {json.dumps(DENIED)} }} }} }}
    ] }}"""
    with NatsServer.start(extra_config=users) as server:
        yield server


async def test_what_a_user_may_not_see_is_named_and_never_fine(restricted: NatsServer) -> None:
    async with (
        keylane.connect(restricted.url, user="admin", password="admin") as admin,  # noqa: S106
        keylane.connect(restricted.url, user="alice", password="alice") as alice,  # noqa: S106
    ):
        lab = Lab(admin, "ORDERS")
        await lab.make()
        await lab.static()
        facts, found = await findings(alice, "ORDERS")
        denied = {one.subject for one in facts.unread}
        assert {"$JS.API.STREAM.LIST", "$JS.API.CONSUMER.LIST.ORDERS", "$SYS.REQ.USER.INFO"} <= denied
        shown = [one for one in found if one.rule == "permission"]
        assert {one.fix.split('"')[1] for one in shown} == denied
        assert {"streams", "consumers of stream ORDERS"} <= {one.what for one in facts.unchecked}
        assert "absent-members" not in {one.rule for one in found}, "nobody looked at its consumers"
        assert needs_action(found)


async def test_a_cluster() -> None:
    with NatsCluster.start(3) as cluster:
        async with keylane.connect(cluster.urls) as connection:
            one = Lab(connection, "ONE")
            await one.make()
            await one.static()
            assert "replicas" in {each.rule for each in await one.found()}
            three = Lab(connection, "THREE")
            await three.make(num_replicas=3)
            await three.static()
            await three.fleet(partitions=101)
            rules = {each.rule for each in await three.found()}
            assert {"bucket-replicas", "raft-groups"} <= rules
            assert "replicas" not in rules


def test_every_rule_is_brought_about() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert RULES - {rule for rule in RULES if f'"{rule}"' in here} == set()
