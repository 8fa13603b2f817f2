"""IoT with hot keys: three of 60 sensors send half of all readings, and their readings still come in order.

Two workers of a fleet share 16 partitions by the hash of the sensor. Starts its own server, runs for a few seconds:

    python examples/iot_hot_keys.py
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

from nats.js.api import StreamConfig, SubjectTransform

import keylane
from keylane import fleet
from keylane.jetstream import Outgoing, publish_many, streams
from keylane.server import NatsServer

SENSORS, HOT, READINGS, PARTITIONS = 60, 3, 3000, 16

by_worker: Counter[str] = Counter()
by_partition: Counter[str] = Counter()
by_sensor: defaultdict[str, list[int]] = defaultdict(list)
handled = asyncio.Event()


def readings() -> list[Outgoing]:
    chance = random.Random(7)  # noqa: S311 - the same readings every time
    sent = []
    for number in range(READINGS):
        sensor = chance.randrange(HOT) if chance.random() < 0.5 else chance.randrange(SENSORS)
        sent.append(Outgoing(f"sensors.s{sensor}", str(number).encode()))
    return sent


def store(worker: str) -> Callable[[keylane.Message], Awaitable[None]]:
    async def handle(message: keylane.Message) -> None:
        await asyncio.sleep(0.001)
        by_worker[worker] += 1
        by_partition[str(message.partition)] += 1
        by_sensor[message.key].append(int(message.data))
        if sum(by_worker.values()) >= READINGS:
            handled.set()

    return handle


async def main() -> None:
    with NatsServer.start() as server:
        async with keylane.connect(server.url) as connection, keylane.connect(server.url) as other:
            numbers = SubjectTransform(
                src="sensors.*", dest=f"{{{{Partition({PARTITIONS},1)}}}}.sensors.{{{{Wildcard(1)}}}}"
            )
            await streams.create(
                connection, StreamConfig(name="SENSORS", subjects=["sensors.*"], subject_transform=numbers)
            )
            partitions = fleet.hashed(PARTITIONS, "sensors.*")
            async with (
                fleet.join(connection, "SENSORS", "store", store("a"), name="a", partitions=partitions) as a,
                fleet.join(other, "SENSORS", "store", store("b"), name="b", partitions=partitions) as b,
                asyncio.timeout(60),
            ):
                while not (a.partitions and b.partitions):  # noqa: ASYNC110 - a moment, until both have their share
                    await asyncio.sleep(0.05)
                print(f"two workers share {PARTITIONS} partitions: a {len(a.partitions)}, b {len(b.partitions)}")
                print(f"{READINGS} readings are published")
                await publish_many(connection, readings())
                await handled.wait()
    hot = sorted(by_sensor, key=lambda one: -len(by_sensor[one]))[:HOT]
    share = sum(len(by_sensor[one]) for one in hot) / READINGS
    print(f"{READINGS} readings of {len(by_sensor)} sensors; the hottest, {', '.join(sorted(hot))}, sent {share:.0%}")
    busiest, most = by_partition.most_common(1)[0]
    print(f"the busiest partition, {busiest}, had {most * PARTITIONS / READINGS:.1f} times its even share")
    print(f"workers: {', '.join(f'{name} {count}' for name, count in sorted(by_worker.items()))}")
    ordered = all(numbers == sorted(numbers) for numbers in by_sensor.values())
    print(f"each sensor in order: {'yes' if ordered else 'no'}")


if __name__ == "__main__":
    keylane.run(main())
