"""`python -m chaos rebalance --seconds 60 --seed 1 [--rate R] [--storage memory|file] [--peer keylane|go] [--json]`.

Exit code 0: nothing lost, nothing twice, nothing out of order. 1: something was. 2: the run itself broke.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from chaos import rebalance
from chaos.members import RunBroken
from tests.peers.presence import PeerBroken, PeerMissing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    scenarios = parser.add_subparsers(dest="scenario", required=True)
    one = scenarios.add_parser("rebalance", help="planned changes of membership under load")
    one.add_argument("--seconds", type=float, default=60.0, help="how long to publish")
    one.add_argument("--seed", type=int, default=1, help="decides who is added and dropped")
    one.add_argument("--rate", type=float, help="messages a second (default: 5000 on memory, 1500 on file)")
    one.add_argument("--storage", choices=("memory", "file"), default="memory")
    one.add_argument("--peer", choices=("keylane", "go"), default="keylane", help="whose members")
    one.add_argument("--plan", choices=("balanced", "sticky"), default="balanced")
    one.add_argument("--every", type=float, default=3.0, help="seconds between two changes")
    one.add_argument("--work", type=float, default=0.0, help="seconds that each message takes to handle")
    one.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(arguments)
    rate = options.rate if options.rate is not None else rebalance.RATES[options.storage]
    if rate <= 0 or options.every <= 0 or options.work < 0 or options.seconds < 2 * options.every:
        parser.error("--rate and --every must be positive, --work not negative, --seconds at least twice --every")
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
    try:
        outcome = asyncio.run(rebalance.run(settings, _say))
    except (RunBroken, PeerMissing, PeerBroken) as broken:
        _say(f"the run broke: {broken}")
        return 2
    print(json.dumps(outcome.as_json()) if options.json else rebalance.as_text(outcome))
    return 0 if outcome.spotless else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
