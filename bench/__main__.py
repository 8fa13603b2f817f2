"""`python -m bench ROW [--json] [--rounds N] [--scale F]`; `python -m bench spark-read --rows 1 2 4 10`."""

from __future__ import annotations

import argparse
import json
import sys

from bench import audit, claims, failover, feed, rebalance, spark_read, spark_write, strict, world

ROWS = {
    "audit": audit.run,
    "claims": claims.run,
    "failover": failover.run,
    "feed": feed.run,
    "rebalance": rebalance.run,
    "spark-read": spark_read.run,
    "spark-write": spark_write.run,
    "strict": strict.run,
    "world": world.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("row", choices=sorted(ROWS))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--rounds", type=int, default=3, help="runs per contestant; the median counts")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the messages, for a quick look")
    parser.add_argument(
        "--rows", type=float, nargs="+", metavar="MILLIONS", help="spark-read: only these sizes, growing"
    )
    options = parser.parse_args()
    if options.rounds < 1 or options.scale <= 0:
        parser.error("--rounds and --scale must be positive")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if options.rows and options.row == "spark-read":
        figures, text = spark_read.run_linear(options.rows, say)
    else:
        figures, text = ROWS[options.row](options.rounds, options.scale, say)
    print(json.dumps(figures) if options.json else text)


if __name__ == "__main__":
    main()
