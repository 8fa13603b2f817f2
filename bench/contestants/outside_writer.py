"""Publishers outside Spark: as many processes as asked, each with its share of the messages, pipelined, with ids."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time

import keylane
from keylane.jetstream import Outgoing, publish_many

_CHUNK = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--subject", required=True, help="prefix of the subjects")
    parser.add_argument("--keys", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    options = parser.parse_args()
    share = options.count // options.processes
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(options.processes + 1)
    queue = context.Queue()
    workers = [
        context.Process(target=_publish, args=(options, number, share, ready, queue))
        for number in range(options.processes)
    ]
    for worker in workers:
        worker.start()
    ready.wait()
    begun = time.perf_counter()
    cpu = sum(queue.get() for _ in workers)
    seconds = time.perf_counter() - begun
    for worker in workers:
        worker.join()
    print(json.dumps({"count": share * options.processes, "seconds": seconds, "cpu_seconds": cpu}))


def _publish(options: argparse.Namespace, number: int, share: int, ready: object, queue: object) -> None:
    async def run() -> None:
        async with await keylane.connect(options.url) as connection:
            ready.wait()  # type: ignore[attr-defined]  # a barrier of the spawn context
            for at in range(0, share, _CHUNK):
                messages = (
                    Outgoing(
                        f"{options.subject}.{index % options.keys}",
                        b"x" * 128,
                        {"Nats-Msg-Id": f"outside:{number}:{index}"},
                    )
                    for index in range(at, min(at + _CHUNK, share))
                )
                failed = [one for one in await publish_many(connection, messages) if isinstance(one, Exception)]
                if failed:
                    raise SystemExit(f"{len(failed)} publishes failed, first: {failed[0]}")

    cpu = time.process_time()
    keylane.run(run())
    queue.put(time.process_time() - cpu)  # type: ignore[attr-defined]  # a queue of the spawn context


if __name__ == "__main__":
    main()
