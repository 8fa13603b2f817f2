"""`python -m bench ROW [--json] [--rounds N] [--scale F]`; `python -m bench spark-read --rows 1 2 4 10`;
`python -m bench claims --on kafka --interval 10`; `python -m bench fleet --curve --partitions 10 100 --storage file`;
`python -m bench fleet-cost --partitions 10000 --workers 25 --cluster`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from bench import (
    app,
    audit,
    claims,
    exporter,
    failover,
    feed,
    fleet,
    fleet_cost,
    fleet_load,
    rebalance,
    spark_pushdown,
    spark_read,
    spark_write,
    start,
    strict,
    world,
)
from chaos.marshal_stage import On

ROWS: dict[str, Callable[..., tuple[dict[str, Any], str]]] = {
    "app": app.run,
    "audit": audit.run,
    "claims": claims.run,
    "exporter": exporter.run,
    "failover": failover.run,
    "feed": feed.run,
    "fleet": fleet.run,
    "fleet-cost": fleet_cost.run,
    "rebalance": rebalance.run,
    "spark-pushdown": spark_pushdown.run,
    "spark-read": spark_read.run,
    "spark-write": spark_write.run,
    "start": start.run,
    "strict": strict.run,
    "world": world.run,
}


def _jars(text: str) -> tuple[Path, ...]:
    paths = tuple(Path(one).resolve() for one in text.split(","))
    for path in paths:
        if not path.is_file():
            raise argparse.ArgumentTypeError(
                f"{path} is not a file; give the jar of nats-spark-connector and those of jnats, separated by commas"
            )
    return paths


def _fleet(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    if options.load:
        return fleet_load.run(options.scale, say, storage=options.storage or "file", join=options.join)
    return fleet.run_curve(
        options.scale,
        say,
        storages=[options.storage] if options.storage else ("file", "memory"),
        partitions=options.partitions or fleet.CURVE_PARTITIONS,
        keys=options.keys or fleet.CURVE_KEYS,
    )


def _fleet_cost(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    partitions = options.partitions[0] if options.partitions else fleet_cost.PARTITIONS
    return fleet_cost.run(
        options.rounds, options.scale, say, partitions=partitions, workers=options.workers, cluster=options.cluster
    )


def main() -> None:  # noqa: C901 - a case for each row with options of its own
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("row", choices=sorted(ROWS))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--rounds", type=int, default=3, help="runs per contestant; the median counts")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the messages, for a quick look")
    parser.add_argument(
        "--rows", type=float, nargs="+", metavar="MILLIONS", help="spark-read: only these sizes, growing"
    )
    parser.add_argument(
        "--connector", type=_jars, metavar="JAR[,JAR...]", help="spark-read: the JVM's connector too, and its jnats"
    )
    parser.add_argument("--on", choices=get_args(On), help="claims: only there")
    parser.add_argument("--interval", type=float, default=claims.INTERVAL_S, help="claims: heartbeat interval, seconds")
    parser.add_argument("--curve", action="store_true", help="fleet: the layouts by partitions and subjects")
    parser.add_argument("--partitions", type=int, nargs="+", help="fleet --curve: only these; fleet-cost: so many")
    parser.add_argument("--workers", type=int, default=fleet_cost.WORKERS, help="fleet-cost: so many")
    parser.add_argument("--cluster", action="store_true", help="fleet-cost: on three servers")
    parser.add_argument("--keys", type=int, nargs="+", help="fleet --curve: only these")
    parser.add_argument("--storage", choices=("file", "memory"), help="fleet --curve and --load: only this")
    parser.add_argument("--metrics", action="store_true", help="strict: only what metrics cost")
    parser.add_argument("--load", action="store_true", help="fleet: 25 workers with 80 subjects each, until the knee")
    parser.add_argument("--join", type=json.loads, default={}, help="fleet --load: more for fleet.join, as JSON")
    options = parser.parse_args()
    if options.rounds < 1 or options.scale <= 0:
        parser.error("--rounds and --scale must be positive")
    if options.connector and (options.row != "spark-read" or options.rows):
        parser.error("--connector belongs to spark-read without --rows")
    if not 0.5 <= options.interval <= 3600:
        parser.error("--interval must be 0.5 to 3600 seconds")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if (options.curve or options.load) and options.row != "fleet":
        parser.error("--curve and --load belong to fleet")
    if options.metrics and options.row != "strict":
        parser.error("--metrics belongs to strict")
    if options.metrics:
        figures, text = strict.run_metrics(options.rounds, options.scale, say)
    elif options.load or options.curve:
        figures, text = _fleet(options, say)
    elif options.rows and options.row == "spark-read":
        figures, text = spark_read.run_linear(options.rows, say)
    elif options.row == "spark-read":
        figures, text = spark_read.run(options.rounds, options.scale, say, options.connector or ())
    elif options.row == "fleet-cost":
        figures, text = _fleet_cost(options, say)
    elif options.row == "claims":
        on: tuple[On, ...] = (options.on,) if options.on else get_args(On)
        figures, text = claims.run(options.rounds, options.scale, say, on=on, interval_s=options.interval)
    else:
        figures, text = ROWS[options.row](options.rounds, options.scale, say)
    print(json.dumps(figures) if options.json else text)


if __name__ == "__main__":
    main()
