"""The Go peer does what later tests ask of it: real groups of the reference library on a real server."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, SubjectTransform

from keylane.server import NatsServer
from tests.peers.pcgroups import Delivery, PcgroupsPeer
from tests.peers.presence import PeerBroken

pytestmark = [pytest.mark.go, pytest.mark.timeout(180)]

MESSAGES = 100
KEYS = 20
LIBRARY = "github.com/synadia-io/orbit.go/pcgroups"


@pytest.fixture
async def jetstream(nats_server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(nats_server.url)
    try:
        yield client.jetstream()
    finally:
        await client.close()


@pytest.fixture
async def elastic(
    jetstream: JetStreamContext, pcgroups: PcgroupsPeer, unique: Callable[..., str]
) -> AsyncIterator[str]:
    """A stream with an elastic group `g` of 8 partitions by key, removed after the test."""
    stream = unique("go")
    await jetstream.add_stream(StreamConfig(name=stream, subjects=[f"{stream}.*"]))
    try:
        options = {
            "stream": stream,
            "group": "g",
            "max_members": 8,
            "filter": f"{stream}.*",
            "wildcards": "1",
        }
        await asyncio.to_thread(pcgroups.ask, "elastic-create", **options)
        yield stream
        await asyncio.to_thread(pcgroups.ask, "delete", stream=stream, group="g")
    finally:
        await jetstream.delete_stream(stream)


async def publish(jetstream: JetStreamContext, stream: str) -> None:
    for number in range(MESSAGES):
        await jetstream.publish(f"{stream}.key{number % KEYS}", str(number).encode())


def numbers_by_key(deliveries: list[Delivery]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for delivery in deliveries:
        found[delivery.subject].append(int(delivery.data))
    return found


async def test_elastic_group_consumes_what_python_published(
    jetstream: JetStreamContext, pcgroups: PcgroupsPeer, elastic: str
) -> None:
    assert await asyncio.to_thread(pcgroups.ask, "add-members", stream=elastic, group="g", members="a") == ["a"]
    with pcgroups.member("a", stream=elastic, group="g", max_ack_pending=1) as member:
        await publish(jetstream, elastic)
        deliveries = await asyncio.to_thread(member.take, MESSAGES, timeout_s=60)

    expected = {f"{elastic}.key{key}": list(range(key, MESSAGES, KEYS)) for key in range(KEYS)}
    assert numbers_by_key(deliveries) == expected
    assert {delivery.delivered for delivery in deliveries} == {1}
    assert len({delivery.pin for delivery in deliveries} - {""}) == 1
    assert [delivery.sequence for delivery in deliveries] == list(range(1, MESSAGES + 1))


async def test_membership_and_mapping_are_stored_as_go_reads_them(pcgroups: PcgroupsPeer, elastic: str) -> None:
    def walk() -> None:
        group = {"stream": elastic, "group": "g"}
        pcgroups.ask("add-members", **group, members="a,b,c")
        assert sorted(pcgroups.ask("drop-members", **group, members="c")) == ["a", "b"]
        stored = pcgroups.ask("config", **group)
        assert stored["max_members"] == 8
        assert sorted(stored["members"]) == ["a", "b"]

        mapping = [{"member": "a", "partitions": [0, 1, 2]}, {"member": "b", "partitions": [3, 4, 5, 6, 7]}]
        assert pcgroups.ask("set-mapping", **group, mapping="a:0,1,2;b:3,4,5,6,7") == mapping
        stored = pcgroups.ask("config", **group)
        assert stored["member_mappings"] == mapping
        assert "members" not in stored

    await asyncio.to_thread(walk)


async def test_step_down_moves_the_pin(jetstream: JetStreamContext, pcgroups: PcgroupsPeer, elastic: str) -> None:
    group = {"stream": elastic, "group": "g"}
    await asyncio.to_thread(pcgroups.ask, "add-members", **group, members="a")
    with pcgroups.member("a", **group) as member:
        await jetstream.publish(f"{elastic}.k", b"1")
        first = await asyncio.to_thread(member.take, 1, timeout_s=30)
        assert await asyncio.to_thread(pcgroups.ask, "step-down", **group, member="a") == "a"
        await jetstream.publish(f"{elastic}.k", b"2")
        second = await asyncio.to_thread(member.take, 1, timeout_s=30)
    assert first[0].pin != second[0].pin


async def test_static_group_consumes_its_partitions(
    jetstream: JetStreamContext, pcgroups: PcgroupsPeer, unique: Callable[..., str]
) -> None:
    stream = unique("go")
    transform = SubjectTransform(src=f"{stream}.*", dest=f"{{{{partition(4,1)}}}}.{stream}.{{{{wildcard(1)}}}}")
    config = StreamConfig(name=stream, subjects=[f"{stream}.*"], subject_transform=transform)
    await jetstream.add_stream(config)
    try:
        group = {"stream": stream, "group": "g", "kind": "static"}
        await asyncio.to_thread(
            pcgroups.ask, "static-create", **group, max_members=4, filter=f"{stream}.*", members="a,b"
        )
        await publish(jetstream, stream)
        with pcgroups.member("a", **group) as a, pcgroups.member("b", **group) as b:
            mine, theirs = await asyncio.gather(
                asyncio.to_thread(a.take, await matching(jetstream, stream, (0, 1)), timeout_s=60),
                asyncio.to_thread(b.take, await matching(jetstream, stream, (2, 3)), timeout_s=60),
            )
        seen = sorted(int(delivery.data) for delivery in (*mine, *theirs))
        assert seen == list(range(MESSAGES))
        await asyncio.to_thread(pcgroups.ask, "delete", **group)
        with pytest.raises(PeerBroken, match="not found"):
            await asyncio.to_thread(pcgroups.ask, "config", **group)
    finally:
        await jetstream.delete_stream(stream)


async def matching(jetstream: JetStreamContext, stream: str, partitions: tuple[int, ...]) -> int:
    """How many messages the server stored under these partitions."""
    info = await jetstream.stream_info(stream, subjects_filter=">")
    assert info.state.subjects is not None
    return sum(count for subject, count in info.state.subjects.items() if int(subject.split(".")[0]) in partitions)


def test_filters_follow_members_and_mapping(pcgroups: PcgroupsPeer) -> None:
    assert pcgroups.ask("filters", max_members=5, members="b,a", member="a") == ["0.>", "1.>", "4.>"]
    assert pcgroups.ask("filters", max_members=3, mapping="a:2;b:0,1", member="b") == ["0.>", "1.>"]
    assert pcgroups.ask("filters", max_members=3, members="a", member="z") == []


def test_peer_tells_which_library_it_was_built_with(pcgroups: PcgroupsPeer) -> None:
    """What Go does is evidence for this version alone: CONTRIBUTING.md says how later ones differ."""
    assert pcgroups.ask("version")[LIBRARY] == "v0.1.0"
