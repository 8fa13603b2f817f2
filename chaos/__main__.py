"""`python -m chaos rebalance|rolling|groups|memory|spark|marshal|fleet [options] [--json]`: docs/chaos.md has the runs.

Exit code 0: the verdict is clean. 1: it is not. 2: the run itself broke, or the arguments are wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import get_args

from chaos import fleet, groups, marshal, memory, rebalance, rolling, spark
from chaos.faults import KINDS
from chaos.fleet_faults import SCENARIOS
from chaos.marshal_stage import On
from chaos.members import RunBroken
from chaos.spark_driver import Into
from tests.peers.presence import PeerBroken, PeerMissing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    scenarios = parser.add_subparsers(dest="run", required=True)
    _add_rebalance(scenarios.add_parser("rebalance", help="planned changes of membership under load"))
    _add_rolling(scenarios.add_parser("rolling", help="a rolling restart of README's program under load"))
    _add_groups(scenarios.add_parser("groups", help="kills, freezes, stops, restarts and changes under load"))
    _add_memory(scenarios.add_parser("memory", help="does a member's memory stay flat?"))
    _add_spark(scenarios.add_parser("spark", help="a Spark query whose driver is killed again and again"))
    _add_marshal(scenarios.add_parser("marshal", help="Marshal consumers that are killed or frozen"))
    _add_fleet(scenarios.add_parser("fleet", help="a fleet whose workers come, go, die and are cut off"))
    options = parser.parse_args(arguments)
    chosen = {
        "rebalance": _rebalance,
        "rolling": _rolling,
        "groups": _groups,
        "memory": _memory,
        "spark": _spark,
        "marshal": _marshal,
        "fleet": _fleet,
    }[options.run]
    try:
        code, told = chosen(options, parser)
    except (RunBroken, PeerMissing, PeerBroken) as broken:
        _say(f"the run broke: {broken}")
        return 2
    print(told)
    return code


def _common(one: argparse.ArgumentParser, *, seconds: float, every_s: float) -> None:
    one.add_argument("--seconds", type=float, default=seconds, help="how long to publish")
    one.add_argument("--seed", type=int, default=1, help="decides what happens when")
    one.add_argument("--every", type=float, default=every_s, help="seconds from one event to the next")
    one.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _check(options: argparse.Namespace, rate: float, parser: argparse.ArgumentParser) -> None:
    if rate <= 0 or options.every <= 0 or options.work < 0 or options.seconds < 2 * options.every:
        parser.error("--rate and --every must be positive, --work not negative, --seconds at least twice --every")


# ---- rebalance ------------------------------------------------------------------------------------------


def _add_rebalance(one: argparse.ArgumentParser) -> None:
    _common(one, seconds=60.0, every_s=3.0)
    one.add_argument("--rate", type=float, help="messages a second (default: 5000 on memory, 1500 on file)")
    one.add_argument("--storage", choices=("memory", "file"), default="memory")
    one.add_argument("--peer", choices=("keylane", "go"), default="keylane", help="whose members")
    one.add_argument("--plan", choices=("balanced", "sticky"), default="balanced")
    one.add_argument("--work", type=float, default=0.0, help="seconds that each message takes to handle")


def _rebalance(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[int, str]:
    rate = options.rate if options.rate is not None else rebalance.RATES[options.storage]
    _check(options, rate, parser)
    settings = rebalance.Settings(
        seconds=options.seconds,
        seed=options.seed,
        rate=rate,
        storage=options.storage,
        peer=options.peer,
        plan=options.plan,
        every_s=options.every,
        work_s=options.work,
    )
    outcome = asyncio.run(rebalance.run(settings, _say))
    told = json.dumps(outcome.as_json()) if options.json else rebalance.as_text(outcome)
    return 0 if outcome.spotless else 1, told


# ---- rolling --------------------------------------------------------------------------------------------


def _add_rolling(one: argparse.ArgumentParser) -> None:
    default = rolling.Settings()
    _common(one, seconds=default.seconds, every_s=default.every_s)
    one.add_argument("--rate", type=float, default=default.rate, help="messages a second")
    one.add_argument("--kind", choices=("app", "elastic", "static"), default=default.kind, help="app, or of a group")
    one.add_argument("--cluster", action="store_true", help="three servers, three replicas")


def _rolling(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[int, str]:
    if options.rate <= 0 or options.every < 1 or options.seconds < 2 * options.every:
        parser.error("--rate must be positive, --every at least 1, --seconds at least twice --every")
    if options.cluster and options.kind == "app":
        parser.error("README's app creates its stream with one replica: use --kind elastic or static with --cluster")
    settings = rolling.Settings(
        seconds=options.seconds,
        seed=options.seed,
        rate=options.rate,
        every_s=options.every,
        kind=options.kind,
        cluster=options.cluster,
    )
    outcome = asyncio.run(rolling.run(settings, _say))
    told = json.dumps(outcome.as_json()) if options.json else rolling.as_text(outcome)
    return 0 if outcome.spotless and outcome.quick else 1, told


# ---- groups ---------------------------------------------------------------------------------------------


def _add_groups(one: argparse.ArgumentParser) -> None:
    default = groups.Settings()
    _common(one, seconds=default.seconds, every_s=default.every_s)
    one.add_argument("--rate", type=float, help="messages a second (default: 2000, with a sink 200)")
    one.add_argument("--storage", choices=("memory", "file"), default=default.storage)
    one.add_argument("--sink", choices=("none", "postgres"), default=default.sink, help="where effects go")
    one.add_argument("--faults", default=",".join(KINDS), help=f"which of {','.join(KINDS)}, or none")
    one.add_argument("--work", type=float, default=default.work_s, help="seconds that each message takes to handle")
    one.add_argument("--failing", type=float, default=default.failing, help="share of tries that fail")
    one.add_argument("--odd", type=float, default=default.odd, help="share of failures that end the member")
    one.add_argument("--poison", type=int, default=default.poison, help="one in so many fails always; 0: none")
    one.add_argument("--keep", help="a directory in which evidence and logs stay")
    one.add_argument("--audit", action="store_true", help="write a journal and compare its audit with the verdict")


def _groups(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[int, str]:
    rate = options.rate if options.rate is not None else groups.RATES[options.sink]
    _check(options, rate, parser)
    chosen = [one for one in options.faults.split(",") if one and one != "none"]
    if unknown := sorted(set(chosen) - set(KINDS)):
        parser.error(f"--faults has {', '.join(unknown)}: choose from {', '.join(KINDS)}, or none")
    if options.storage == "memory" and "server" in chosen:
        parser.error("--storage memory loses everything when the server restarts: leave server out of --faults")
    if not 0 <= options.failing < 1 or not 0 <= options.odd < 1 or options.poison < 0:
        parser.error("--failing and --odd must be at least 0 and below 1, --poison not negative")
    settings = groups.Settings(
        seconds=options.seconds,
        seed=options.seed,
        rate=rate,
        storage=options.storage,
        sink=options.sink,
        faults=tuple(kind for kind in KINDS if kind in chosen),
        every_s=options.every,
        work_s=options.work,
        failing=options.failing,
        odd=options.odd,
        poison=options.poison,
        keep=options.keep,
        audit=options.audit,
    )
    outcome = asyncio.run(groups.run(settings, _say))
    return 0 if outcome.clean else 1, json.dumps(outcome.as_json()) if options.json else groups.as_text(outcome)


# ---- memory ---------------------------------------------------------------------------------------------


def _add_memory(one: argparse.ArgumentParser) -> None:
    one.add_argument("--messages", type=int, default=2_000_000, help="how many messages the member handles")
    one.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _memory(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[int, str]:
    if options.messages < 1000:
        parser.error("--messages must be at least 1000")
    outcome = asyncio.run(memory.run(options.messages, _say))
    return 0 if outcome.clean else 1, json.dumps(outcome.as_json()) if options.json else memory.as_text(outcome)


# ---- spark ----------------------------------------------------------------------------------------------


def _add_spark(one: argparse.ArgumentParser) -> None:
    default = spark.Settings()
    one.add_argument("--messages", type=int, default=default.messages, help="how many messages are read")
    one.add_argument("--kills", type=int, default=default.kills, help="how many drivers are killed")
    one.add_argument("--seed", type=int, default=default.seed, help="decides the batch sizes and the moments")
    one.add_argument("--into", choices=get_args(Into), default=default.into, help="where the rows go")
    one.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _spark(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[int, str]:
    if options.into == "batch" and options.kills:
        parser.error("--into batch is one read without streaming, and it has no second try: give --kills 0")
    if options.kills < 0 or options.messages < 10 * (options.kills + 1):
        parser.error("--kills must not be negative, and each driver needs at least 10 messages")
    settings = spark.Settings(messages=options.messages, kills=options.kills, seed=options.seed, into=options.into)
    outcome = asyncio.run(spark.run(settings, _say))
    return 0 if outcome.clean else 1, json.dumps(outcome.as_json()) if options.json else spark.as_text(outcome)


# ---- marshal --------------------------------------------------------------------------------------------


def _add_marshal(one: argparse.ArgumentParser) -> None:
    default = marshal.Settings()
    _common(one, seconds=default.seconds, every_s=default.every_s)
    one.add_argument("--consumers", type=int, default=default.consumers, help="how many processes")
    one.add_argument("--partitions", type=int, default=default.partitions)
    one.add_argument("--interval", type=float, default=default.interval_s, help="heartbeat interval in seconds")
    one.add_argument("--rate", type=float, default=default.rate, help="messages a second")
    one.add_argument("--mode", choices=("at_least_once", "at_most_once"), default=default.mode)
    one.add_argument("--batch", type=int, default=default.batch, help="messages that are read, or taken, at once")
    one.add_argument("--work", type=float, default=default.work_s, help="seconds that each message takes to handle")
    one.add_argument("--faults", default="kill", help=f"which of {','.join(marshal.KINDS)}, or none")
    one.add_argument("--on", choices=get_args(On), default=default.on, help="where the log and the messages are")


def _marshal(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[int, str]:
    _check(options, options.rate, parser)
    chosen = [one for one in options.faults.split(",") if one and one != "none"]
    if unknown := sorted(set(chosen) - set(marshal.KINDS)):
        parser.error(f"--faults has {', '.join(unknown)}: choose from {', '.join(marshal.KINDS)}, or none")
    if min(options.consumers, options.partitions, options.batch) < 1 or options.interval < 0.5:
        parser.error("--consumers, --partitions and --batch must be at least 1, --interval at least 0.5")
    settings = marshal.Settings(
        seconds=options.seconds,
        seed=options.seed,
        consumers=options.consumers,
        partitions=options.partitions,
        interval_s=options.interval,
        every_s=options.every,
        rate=options.rate,
        mode=options.mode,
        batch=options.batch,
        work_s=options.work,
        faults=tuple(chosen),
        on=options.on,
    )
    outcome = asyncio.run(marshal.run(settings, _say))
    return 0 if outcome.clean else 1, json.dumps(outcome.as_json()) if options.json else marshal.as_text(outcome)


# ---- fleet ----------------------------------------------------------------------------------------------


def _add_fleet(one: argparse.ArgumentParser) -> None:
    default = fleet.Settings()
    _common(one, seconds=default.seconds, every_s=default.every_s)
    one.add_argument("--scenario", choices=SCENARIOS, default=default.scenario, help="what happens; docs/chaos.md")
    one.add_argument("--rate", type=float, default=default.rate, help="messages a second")
    one.add_argument("--storage", choices=("memory", "file"), default=default.storage)
    one.add_argument("--retention", choices=("limits", "workqueue"), default=default.retention)
    one.add_argument("--cluster", action="store_true", help="three servers, three replicas")
    one.add_argument("--workers", type=int, default=default.workers, help="more than eight share processes")
    one.add_argument("--partitions", type=int, default=default.partitions)
    one.add_argument("--keys", type=int, default=default.keys)
    one.add_argument("--work", type=float, default=default.work_s, help="seconds that a handler takes on average")
    one.add_argument("--lease", type=float, default=default.lease_s, help="of a worker, in seconds")
    one.add_argument("--moves", type=int, default=default.moves, help="end when so many partitions have moved")
    one.add_argument("--layout", help="of fleet.join")
    one.add_argument("--acks", help="of fleet.join")
    one.add_argument("--state", help="of fleet.join")
    one.add_argument("--keep", help="a directory in which evidence and logs stay")


def _fleet(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[int, str]:
    _check(options, options.rate, parser)
    if min(options.workers, options.partitions, options.keys) < 1 or options.lease < 0.5 or options.moves < 0:
        parser.error(
            "--workers, --partitions and --keys must be at least 1, --lease at least 0.5, --moves not negative"
        )
    if options.storage == "memory" and options.scenario in ("server", "node") and not options.cluster:
        parser.error("--storage memory loses everything when the server restarts: choose another --scenario")
    if options.cluster != (options.scenario == "node") and options.scenario in ("node", "server", "partition"):
        parser.error(
            "--scenario node needs --cluster; server and partition need a single server, because clients of a cluster "
            "go to another node"
        )
    settings = fleet.Settings(
        seconds=options.seconds,
        seed=options.seed,
        scenario=options.scenario,
        rate=options.rate,
        every_s=options.every,
        storage=options.storage,
        retention=options.retention,
        cluster=options.cluster,
        workers=options.workers,
        partitions=options.partitions,
        keys=options.keys,
        work_s=options.work,
        lease_s=options.lease,
        moves=options.moves,
        layout=options.layout,
        acks=options.acks,
        state=options.state,
        keep=options.keep,
    )
    outcome = asyncio.run(fleet.run(settings, _say))
    return 0 if outcome.clean else 1, json.dumps(outcome.as_json()) if options.json else fleet.as_text(outcome)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
