"""Groups on a server without the consumer reset: below 2.14. The server is a real one, and keylane takes it for old."""

from __future__ import annotations

import pytest

from keylane import groups
from keylane.groups import GroupMessage
from keylane.jetstream import features
from tests.integration.groups.rig import Ground, active, flawless
from tests.waiter import until


@pytest.fixture(autouse=True)
def old_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(features.SINCE, "consumer_reset", (99, 0, 0))


async def max_ack_pending(ground: Ground, member: str) -> int | None:
    info = await groups.member_info(ground.connection, ground.stream, "g", member)
    assert info is not None
    return info.config.max_ack_pending


@pytest.mark.parametrize("order", ["key", "partition", "none"])
async def test_it_falls_back_to_one_message_at_a_time_and_says_why(
    ground: Ground, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    await ground.elastic(members=["a"])
    tries: list[int] = []

    async def handler(message: GroupMessage) -> None:
        tries.append(message.sequence)
        if tries.count(3) == 1 and tries[-1] == 3:
            raise ValueError("once")
        await ground.evidence.note("a", message)

    await ground.join("a", handler, order=order)
    sent = await ground.publish(f"k{number % 3}" for number in range(10))
    await ground.evidence.all_of(sent)
    assert await max_ack_pending(ground, "a") == 1
    assert [line.sequence for line in ground.evidence.lines] == sent, "everything waits for the one that failed"
    assert "has no consumer reset" in caplog.text
    assert "falls back to one message at a time (order 'strict')" in caplog.text


async def test_who_asked_for_it_is_not_warned(ground: Ground, caplog: pytest.LogCaptureFixture) -> None:
    await ground.elastic(members=["a"])
    await ground.join("a", order="strict")
    await ground.evidence.all_of(await ground.publish(["k"]))
    assert "has no consumer reset" not in caplog.text


async def test_a_clean_stop_hands_over_and_members_split_the_group(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    first = await ground.join("a")
    sent = await ground.publish(f"k{number % 8}" for number in range(40))
    await ground.evidence.all_of(sent)
    second = await ground.join("a", ground.evidence.handler("second"))
    await first.stop()
    sent += await ground.publish(f"k{number % 8}" for number in range(40))
    await ground.evidence.all_of(sent)
    assert active(second)
    added = await ground.join("b")
    await groups.add_members(ground.connection, ground.stream, "g", ["b"])
    await until(lambda: len(added.partitions) == 2)
    sent += await ground.publish(f"k{number % 8}" for number in range(40))
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    assert {line.by for line in ground.evidence.lines} == {"a", "second", "b"}
