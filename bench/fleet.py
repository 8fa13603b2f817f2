"""Row `fleet`: fleets that keep the order of every key, beside the Go reference and the unordered Go client.

Every contestant but Go's `Consume` checks the order on every message. Streams are filled, and the queues of elastic
groups are full, before a run begins; the clock runs from its first message to its last ack. "1000 in flight" is for
each member of a group and each worker of a fleet.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

from bench import strict
from bench.contest import Say
from bench.group_ground import PARTITIONS, Load, Storage
from bench.strict import GO_1, GO_1000, Aim, Entrant, Setting
from keylane import fleet

GO_CONSUME = "Go Consume, unordered"
ELASTIC = "keylane elastic, three processes"
MESSAGE = "keylane fleet"
PREFIX = "keylane fleet, acks=prefix"
LAYOUT_WORKER = "keylane fleet, layout=worker"
WORKERS = 3
KEYS = 1000
IN_FLIGHT = 1000
CURVE_PARTITIONS = (10, 30, 100, 300, 1000, 2000)
CURVE_KEYS = (10, 1_000, 100_000)
_CURVE_COUNT = 30_000


def _has(option: str) -> bool:
    return option in inspect.signature(fleet.join).parameters


def settings(scale: float) -> list[Setting]:
    return [_contest("file", scale), _contest("memory", scale)]


def _contest(storage: Storage, scale: float) -> Setting:
    many = max(2000, int(200_000 * scale))
    few = max(1000, int((20_000 if storage == "file" else 100_000) * scale))
    one_by_one = max(400, int(10_000 * scale))

    def elastic(count: int) -> Load:
        return Load("elastic", storage, keys=KEYS, count=count, members=WORKERS)

    numbered = Load("fleet", storage, keys=KEYS, count=many, members=WORKERS)
    entrants = [
        Entrant(GO_1, "go", elastic(one_by_one), max_ack_pending=1),
        Entrant(GO_1000, "go", elastic(few)),
        Entrant(ELASTIC, "keylane processes", elastic(few)),
        Entrant(GO_CONSUME, "go consume", numbered),
        Entrant(MESSAGE, "fleet", numbered, max_ack_pending=IN_FLIGHT),
    ]
    if _has("acks"):
        entrants.append(Entrant(PREFIX, "fleet", numbered, max_ack_pending=IN_FLIGHT, join=(("acks", "prefix"),)))
    if _has("layout"):
        entrants.append(
            Entrant(LAYOUT_WORKER, "fleet", numbered, max_ack_pending=IN_FLIGHT, join=(("layout", "worker"),))
        )
    times = {GO_1000: 5.0, GO_1: 10.0} if storage == "file" else {GO_1000: 1.0, GO_1: 5.0}
    aims = [Aim(MESSAGE, theirs, wanted) for theirs, wanted in times.items()]
    aims.append(Aim(PREFIX, GO_CONSUME, 0.85 if storage == "file" else 1.2))
    return Setting(
        f"fleet, {storage}",
        f"three workers, no-op handler, {KEYS:,} keys in {PARTITIONS} partitions, {storage} storage",
        tuple(entrants),
        tuple(aims),
    )


def run(rounds: int, scale: float, say: Say) -> tuple[dict[str, object], str]:
    """The figures as JSON and as Markdown."""
    rows, text = strict.run_settings(settings(scale), rounds, say)
    return {"row": "fleet", "rounds": rounds, "settings": rows}, text


# ---- the curves of the layouts --------------------------------------------------------------------------


def run_curve(
    scale: float,
    say: Say,
    *,
    storages: Iterable[Storage] = ("file", "memory"),
    partitions: Sequence[int] = CURVE_PARTITIONS,
    keys: Sequence[int] = CURVE_KEYS,
) -> tuple[dict[str, object], str]:
    """Messages a second of each layout, by partitions and distinct subjects, after all are assigned; one run each."""
    layouts = ("partition", "worker") if _has("layout") else ("partition",)
    rows: list[dict[str, object]] = []
    text: list[str] = []
    for storage in storages:
        lines = [
            f"### layouts, three workers, {storage} storage, messages/s",
            "",
            "| partitions | " + " | ".join(f"{layout}, {count:,} keys" for count in keys for layout in layouts) + " |",
            "| ---: |" + " ---: |" * (len(keys) * len(layouts)),
        ]
        for number in partitions:
            cells = []
            for count in keys:
                setting = _cell(storage, number, count, layouts, scale)
                found, _ = strict.run_settings([setting], 1, say)
                rows += [{"storage": storage, "partitions": number, "keys": count, **one} for one in found]
                reached = found[0]["contestants"]
                assert isinstance(reached, dict)
                cells += [f"{reached[layout]['rate']:,.0f}" for layout in layouts]
            lines.append(f"| {number:,} | " + " | ".join(cells) + " |")
        text.append("\n".join(lines))
    return {"row": "fleet-curve", "cells": rows}, "\n\n".join(text)


def _cell(storage: Storage, partitions: int, keys: int, layouts: Sequence[str], scale: float) -> Setting:
    load = Load(
        "fleet", storage, keys=keys, count=max(1000, int(_CURVE_COUNT * scale)), members=WORKERS, partitions=partitions
    )

    def entrant(layout: str) -> Entrant:
        chosen = (("layout", layout),) if len(layouts) > 1 else ()
        return Entrant(layout, "fleet", load, max_ack_pending=IN_FLIGHT, join=chosen, assigned_first=True)

    return Setting(
        f"curve, {storage}",
        f"{partitions:,} partitions, {keys:,} keys, {storage} storage",
        tuple(entrant(layout) for layout in layouts),
    )
