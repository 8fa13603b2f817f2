"""How golden traces of the coordination log are written and played.

A trace is a table. Every line is a record: the broker's time in seconds, who wrote it (`anna`, or `anna.2` for her
second instance), what it says, and behind the arrow what the log makes of it: the verdict, then the owner with the
fencing token, then how fresh the owner is and the next offset to read. The interval is 10 s. Records have the offsets
0, 1, 2 …, or begin at the offset that the test names.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from keylane.core.claim_facts import (
    Key,
    LogRecord,
    Owner,
    overlaps,
)
from keylane.core.claim_records import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    ReleaseGroup,
    ReleasingPartition,
    encode,
)
from keylane.core.world import World

INTERVAL_S = 10
GROUP, TOPIC = "billing", "orders"
KEY = Key(GROUP, TOPIC, 0)
LINE = re.compile(
    r"(?P<time>[\d.]+)\s+(?P<who>\S+)\s+(?P<what>\w+)\s*(?P<number>\d*)\s*(?:skew (?P<skew>-?\d+))?\s*"
    r"->\s+(?P<verdict>\w+)\s+(?P<after>.*)"
)


def owner_named(who: str) -> Owner:
    client, _, instance = who.partition(".")
    return Owner(client, f"i{instance or 1}")


def message(who: str, what: str, number: int, seconds: int) -> bytes:
    client, instance = owner_named(who)
    makers: dict[str, Callable[[], Message]] = {
        "claims": lambda: ClaimingPartition(instance, client, GROUP, TOPIC, 0, seconds),
        "beats": lambda: Heartbeat(instance, client, GROUP, TOPIC, 0, number, seconds),
        "releases": lambda: ReleasingPartition(instance, client, GROUP, TOPIC, 0, number, seconds),
        "takes": lambda: ClaimingMessages(instance, client, GROUP, TOPIC, 0, number, seconds),
        "pauses": lambda: ReleaseGroup(instance, client, GROUP, number, seconds),
    }
    return encode(makers[what]()) if what in makers else b"what is this?"


def told(world: World) -> str:
    """The owner with its token, its freshness and the next offset, as a trace writes it."""
    claim = world.claim_of(GROUP, TOPIC, 0)
    if claim is None or claim.owner is None:
        who = "nobody"
    else:
        now_ms = world.now_ms(claim.log_partition)
        assert now_ms is not None
        freshness = claim.freshness(now_ms)
        assert freshness is not None
        instance = claim.owner.instance.removeprefix("i")
        who = claim.owner.client + ("" if instance == "1" else f".{instance}") + f"@{claim.token} {freshness.value}"
    return f"{who}, next {None if claim is None else claim.offset}"


def play(trace: str, *, first: int = 0, begins: tuple[int, int] | None = None) -> World:
    """Apply a trace line by line and compare what it says with what the world says."""
    world = World(INTERVAL_S, keep_history=True)
    if begins is not None:
        world.begins(0, *begins)
    lines = [line.strip() for line in trace.strip().splitlines()]
    seen = []
    for offset, line in enumerate(lines, start=first):
        found = LINE.fullmatch(line)
        assert found, f"not a line of a trace: {line!r}"
        seconds = float(found["time"])
        value = message(
            found["who"], found["what"], int(found["number"] or 0), max(0, int(seconds) + int(found["skew"] or 0))
        )
        verdict = world.apply(LogRecord(0, offset, round(seconds * 1000), value))
        seen.append(line[: line.index("->")] + f"-> {verdict.value} {told(world)}")
    assert seen == [re.sub(r"->\s+(\w+)\s+", r"-> \1 ", line) for line in lines]
    assert list(overlaps(world.tenures())) == []
    return world
