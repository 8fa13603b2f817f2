"""Pasts for the audit: one in which much happens and nothing is wrong, and one with every kind of fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds  # type: ignore[import-untyped]  # it has no types

from keylane.spark.pipelines.audit import Report
from tests.integration.spark.journal_rig import ALICE, BOB, MS, STANDBY, Ground, Past

BOBS_STANDBY = Ground("bob", "b2", "pin-b2", writer="00000000000000dd")


def keys_of(past: Past, ground: Ground) -> list[str]:
    return [key for key in dict.fromkeys(past.keys) if past.of(key)[0].ground == ground]


def eventful(messages: int) -> Past:
    """Much happens, and nothing of it is wrong."""
    past = Past.clean(messages, 100)
    of_alice, of_bob = keys_of(past, ALICE), keys_of(past, BOB)
    moved = past.of(of_alice[0])
    third = len(moved) // 3
    # The partition goes to bob with one revision and comes back with the next.
    past.move(of_alice[0], moved[third].sequence, moved[2 * third].sequence, replace(BOB, revision=2))
    past.move(of_alice[0], moved[2 * third + 1].sequence, moved[-1].sequence, replace(ALICE, revision=3))
    # alice's standby takes over another key, and later alice has it back, with a new pin.
    taken = past.of(of_alice[1])
    past.move(of_alice[1], taken[5].sequence, taken[9].sequence, STANDBY)
    past.move(of_alice[1], taken[10].sequence, taken[-1].sequence, replace(ALICE, pin="pin-a1-again"))
    for act in past.of(of_bob[0])[::7]:
        past.acts.append(replace(act, outcome="failed", started_ns=act.started_ns - 2, ended_ns=act.started_ns - 1))
    for act in past.of(of_bob[1])[::7]:
        past.change(act, outcome="dead")
    for act in past.of(of_bob[2])[::7]:
        past.change(act, outcome="terminated")
    for act in past.of(of_bob[3])[::7]:
        past.acts.append(replace(act, ground=BOBS_STANDBY, outcome="cancelled", ended_ns=act.ended_ns + 9_000 * MS))
    past.twice.add(("b1", 2))
    return past


def faulty() -> tuple[Past, dict[str, list[int]], tuple[int, int]]:
    """Every kind of fault, each on its own keys; the sequences that must be told; messages of keys with two owners."""
    past = Past.clean(6_000, 60)
    alices, bobs = keys_of(past, ALICE), keys_of(past, BOB)
    lost = [past.of(alices[0])[40].sequence, past.of(bobs[0])[0].sequence, past.of(bobs[0])[-1].sequence]
    for sequence in lost:
        past.lose(sequence)
    swapped = [past.of(bobs[1])[20].sequence, past.of(bobs[1])[21].sequence]
    past.swap(*swapped)
    again, copied = past.of(bobs[2])[30].sequence, past.of(bobs[3])[30].sequence
    past.repeat(again, delivered=2)
    past.repeat(copied, after_ns=400 * MS, queue_sequence=99_999)
    shared = past.of(alices[1])[50:60:2]
    past.share(alices[1], [act.sequence for act in shared])
    frozen = past.of(bobs[4])[70].sequence
    past.freeze(frozen, 700 * MS, BOBS_STANDBY)
    overtaken = past.of(bobs[5])[10]
    past.change(overtaken, ground=BOBS_STANDBY, ended_ns=past.of(bobs[5])[14].ended_ns)
    return (
        past,
        {
            "lost": sorted(lost),
            "duplicated": sorted([again, copied, frozen]),
            "out_of_order": sorted([swapped[0], overtaken.sequence]),
            "late_effect": [frozen],
        },
        (shared[0].sequence, overtaken.sequence),
    )


# ---- what an audit told ---------------------------------------------------------------------------------


def sequences(report: Report, kind: str) -> list[int]:
    return sorted(one["sequence"] for one in report.evidence.get(kind, ()))


def told(report: dict[str, Any]) -> dict[str, Any]:
    """A report as JSON, without what differs from run to run."""
    passing = ("seconds", "findings", "stopped")
    kept: dict[str, Any] = json.loads(json.dumps({name: one for name, one in report.items() if name not in passing}))
    return kept


def findings_in(work: Path) -> list[str]:
    """Every row that an audit left in its directory, in an order of its own."""
    assert (work / "findings" / "_SUCCESS").exists()
    rows = ds.dataset(work / "findings", format="parquet").to_table().to_pylist()
    return sorted(json.dumps(row, sort_keys=True) for row in rows)
