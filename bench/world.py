"""Row `world`: the state of the world from a million records of a coordination log, on one core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from keylane.core.claim_facts import LogRecord
from keylane.core.claim_records import ClaimingPartition, Heartbeat, ReleasingPartition, encode
from keylane.core.world import World

RECORDS = 1_000_000
_PARTITIONS = 256
_CLIENTS = 32
_INTERVAL_S = 10.0
_LIMIT_S = 5.0


def run(rounds: int, scale: float, say: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    """Read the same log again and again; the median counts."""
    count = max(int(RECORDS * scale), 1000)
    say(f"making {count:,} records")
    records = _records(count)
    times = {"world": list[float](), "with history": list[float]()}
    for number in range(rounds):
        for name, keep_history in (("world", False), ("with history", True)):
            world = World(_INTERVAL_S, keep_history=keep_history)
            apply, began = world.apply, time.process_time()
            for record in records:
                apply(record)
            times[name].append(time.process_time() - began)
            assert len(list(world.claims())) == _PARTITIONS
            say(f"round {number + 1}: {name} {times[name][-1]:.2f} s")
    seconds = {name: statistics.median(one) for name, one in times.items()}
    figures = {
        "row": "world",
        "records": count,
        "seconds": seconds["world"],
        "seconds_with_history": seconds["with history"],
        "records_per_second": count / seconds["world"],
        "limit_s": _LIMIT_S * count / RECORDS,
        "met": seconds["world"] < _LIMIT_S * count / RECORDS,
    }
    text = (
        f"world of {_PARTITIONS} partitions from {count:,} records: {seconds['world']:.2f} s of one core "
        f"({count / seconds['world']:,.0f} records/s), with history {seconds['with history']:.2f} s; "
        f"limit {figures['limit_s']:g} s: {'met' if figures['met'] else 'MISSED'}"
    )
    return figures, text


def _records(count: int) -> list[LogRecord]:
    """Owners that beat, and every now and then one that releases while another claims."""
    found: list[LogRecord] = []
    owners = {number: f"client-{number % _CLIENTS}" for number in range(_PARTITIONS)}
    progress = dict.fromkeys(owners, 0)
    time_ms, step = 1_700_000_000_000, 0

    def put(value: bytes) -> None:
        found.append(LogRecord(0, len(found), time_ms, value))

    for number, owner in owners.items():
        put(encode(ClaimingPartition("i1", owner, "billing", "orders", number, 1_700_000_000)))
    while len(found) < count:
        number = step % _PARTITIONS
        step += 1
        if number == 0:
            time_ms += int(750 * _INTERVAL_S)
        seconds = time_ms // 1000
        progress[number] += 1000
        if step % 997 == 0:
            put(
                encode(ReleasingPartition("i1", owners[number], "billing", "orders", number, progress[number], seconds))
            )
            owners[number] = f"client-{(step * 7) % _CLIENTS}"
            put(encode(ClaimingPartition("i1", owners[number], "billing", "orders", number, seconds)))
        put(encode(Heartbeat("i1", owners[number], "billing", "orders", number, progress[number], seconds)))
    return found[:count]
