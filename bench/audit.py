"""Row `audit`: journals of more and more records, audited by Spark. Time must grow with the rows, memory must not.

Each size has a stream with as many messages, a static group, and the journal that its members would have written: one
record for each message, in the order of every key. The audit must find nothing, or the run is broken. Spark runs with
two tasks at once and a heap of 1 GB for all of it; the most memory of the JVM and of a Python worker is watched.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nats.js.api import SubjectTransform

import keylane
from bench.contest import Say
from keylane import groups
from keylane.core.journal_record import BatchHead, Columns, pack, seal
from keylane.core.partitions import Partitioning
from keylane.jetstream import open_publisher, streams
from keylane.journal.stream import journal_subject, prepare
from keylane.server import NatsServer
from tests.peers.spark import find_spark, spark_environment

SIZES = (1_000_000, 2_500_000, 5_000_000, 10_000_000)
PARTITIONS, KEYS, GROUP = 10, 10_000, "g"
CHART = Path(__file__).with_name("audit.png")
HEAP = "1g"
_BATCH = 1000
_START_NS = 1_790_000_000_000_000_000
_LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Figure:
    """One size."""

    records: int
    seconds: float
    """Of the audit, in a session that is already there."""
    jvm_mb: float
    worker_mb: float
    """Of the largest Python worker."""
    workers: int

    @property
    def rate(self) -> float:
        return self.records / self.seconds


def run(rounds: int, scale: float, say: Say, *, chart: Path | None = CHART) -> tuple[dict[str, object], str]:
    """The figures as JSON and as Markdown. One round for each size: they are compared with each other."""
    del rounds
    figures = []
    for size in SIZES:
        records = max(1_000, int(size * scale) // _BATCH * _BATCH)
        with NatsServer.start() as server:
            say(f"filling a stream and its journal: {records:,} records")
            asyncio.run(_fill(server.url, records))
            figures.append(_audit(server.url, records))
        say(f"  {records:>12,} records  {figures[-1].seconds:8.1f} s  {figures[-1].rate:>10,.0f} records/s")
    if chart is not None:
        _draw(figures, chart, say)
    return {"row": "audit", "heap": HEAP, "sizes": [asdict(one) for one in figures]}, _table(figures)


# ---- the ground -----------------------------------------------------------------------------------------


async def _fill(url: str, records: int) -> None:
    transform = Partitioning("orders.*", (1,), PARTITIONS)
    async with await keylane.connect(url) as connection:
        await streams.create(
            connection,
            streams.StreamConfig(
                name="ORDERS",
                subjects=["orders.*"],
                allow_direct=True,
                subject_transform=SubjectTransform(src="orders.*", dest=transform.destination),
            ),
        )
        await groups.create_static(connection, "ORDERS", GROUP, partitions=PARTITIONS, members=["a", "b"])
        await prepare(connection, "ORDERS")
        async with open_publisher(connection) as publisher:
            for number in range(records):
                await publisher.send(f"orders.k{number % KEYS}", b"")
            for subject, data in _batches(records, transform):
                await publisher.send(subject, data)
            await publisher.flush()


def _batches(records: int, transform: Partitioning) -> Iterator[tuple[str, bytes]]:
    """Two members, each with one instance; keys take turns, and a key belongs to one of them."""
    partitions = [transform.partition(f"orders.k{key}") for key in range(KEYS)]
    waiting: dict[str, list[int]] = {"a": [], "b": []}
    numbers = {"a": 0, "b": 0}
    for sequence in range(1, records + 1):
        member = "a" if partitions[(sequence - 1) % KEYS] < PARTITIONS // 2 else "b"
        waiting[member].append(sequence)
        if len(waiting[member]) == _BATCH:
            numbers[member] += 1
            yield _batch(member, numbers[member], waiting[member], partitions)
            waiting[member] = []
    for member, sequences in waiting.items():
        if sequences:
            yield _batch(member, numbers[member] + 1, sequences, partitions)


def _batch(member: str, number: int, sequences: list[int], partitions: list[int]) -> tuple[str, bytes]:
    keys = [(sequence - 1) % KEYS for sequence in sequences]
    columns = Columns(
        sequences=sequences,
        source_sequences=sequences,
        started_ns=[_START_NS + 100_000 * sequence for sequence in sequences],
        ended_ns=[_START_NS + 100_000 * sequence + 50_000 for sequence in sequences],
        keys=[f"k{key}" for key in keys],
        partitions=[partitions[key] for key in keys],
        delivered=[1] * len(sequences),
        tenures=[(f"pin-{member}", 1)] * len(sequences),
        outcomes=[0] * len(sequences),
    )
    head = BatchHead(
        writer="0123456789abcdef", batch=number, stream="ORDERS", group=GROUP, member=member, instance=f"{member}1",
        sample=1.0, dropped=0,
    )  # fmt: skip
    return journal_subject("ORDERS", GROUP, member), seal(head, pack(columns))


# ---- one audit ------------------------------------------------------------------------------------------


def _audit(url: str, records: int) -> Figure:
    command = [sys.executable, "-m", "bench.contestants.spark_audit", "--url", url, "--heap", HEAP, "--group", GROUP]
    environment = {**os.environ, **spark_environment(find_spark())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        jvm = worker = 0.0
        workers = 0
        while process.poll() is None:
            seen = list(_memory_below(process.pid))
            jvm = max([jvm, *(size for name, size in seen if name == "java")])
            python = [size for name, size in seen if name.startswith("python")]
            worker, workers = max([worker, *python]), max(workers, len(python))
            time.sleep(_LOOK_EVERY_S)
        assert process.stdout is not None
        told = process.stdout.read()
    if process.returncode != 0:
        raise RuntimeError(f"the audit of {records:,} records ended with {process.returncode}: {told[-1000:]}")
    result = json.loads(told.splitlines()[-1])
    assert result["facts"]["handled"] == records, result["facts"]
    assert not any({**result["violations"], **result["unproven"]}.values()), result
    return Figure(records, result["seconds"], jvm, worker, workers)


def _memory_below(pid: int) -> Iterator[tuple[str, float]]:
    """Name and resident megabytes of every process below this one."""
    children: dict[int, list[int]] = {}
    facts: dict[int, tuple[str, float]] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
        except OSError:
            continue  # it has ended meanwhile
        number = int(place.name)
        children.setdefault(int(status["PPid"]), []).append(number)
        facts[number] = status["Name"].strip(), int(status.get("VmRSS", "0 kB").split()[0]) / 1024
    below = list(children.get(pid, ()))
    while below:
        one = below.pop()
        below += children.get(one, ())
        yield facts[one]


# ---- shown ----------------------------------------------------------------------------------------------


def _table(figures: Sequence[Figure]) -> str:
    lines = [
        f"Audit of a static group, {KEYS:,} keys, local[2], heap {HEAP}, nothing to find",
        "",
        "| records | seconds | records/s | JVM, peak MB | largest Python worker, peak MB |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {one.records:,} | {one.seconds:.1f} | {one.rate:,.0f} | {one.jvm_mb:,.0f} | {one.worker_mb:,.0f} |"
        for one in figures
    ]
    return "\n".join(lines)


def _draw(figures: Sequence[Figure], path: Path, say: Say) -> None:
    try:
        from matplotlib.figure import Figure as Drawing  # noqa: PLC0415 - optional: keylane[charts]
    except ModuleNotFoundError:
        say("no chart: matplotlib is not installed (keylane[charts])")
        return
    drawing = Drawing(figsize=(10, 3.6), layout="constrained")
    left, right = drawing.subplots(1, 2)
    millions = [one.records / 1e6 for one in figures]
    left.plot(millions, [one.seconds for one in figures], marker="o", color="#2f6f9f")
    left.plot([0, millions[-1]], [0, figures[-1].seconds], linestyle=":", color="#8a8f98", label="in proportion")
    left.set(title="Time", xlabel="million records", ylabel="s", ylim=(0, None), xlim=(0, None))
    left.legend(frameon=False)
    right.plot(millions, [one.jvm_mb for one in figures], marker="o", color="#2f6f9f", label="JVM (two tasks)")
    right.plot(millions, [one.worker_mb for one in figures], marker="o", color="#e08a2e", label="largest worker")
    right.set(title="Most memory", xlabel="million records", ylabel="MB", ylim=(0, None), xlim=(0, None))
    right.legend(frameon=False)
    drawing.savefig(path, dpi=120)
