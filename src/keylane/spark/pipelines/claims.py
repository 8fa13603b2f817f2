"""Claims: a coordination log replayed on Spark: who owned what when, overlaps and gaps, pauses.

The rules are those of `core/claims.py`; `claims_replay` applies them in tasks, `claims_tables` asks what came out,
`claims_log` knows where the log is. The world is that of one reader who reads the log up to the same place.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane.core.claim_records import Placing, check_id, check_placing
from keylane.core.claims import World
from keylane.core.names import check_stream_name
from keylane.errors import InvalidInput
from keylane.spark.address import Address
from keylane.spark.pipelines.claims_log import open_log, place_of, stops_of
from keylane.spark.pipelines.places import building, check_work, put_in_place, working
from keylane.spark.pipelines.running import Say, check_evidence, plainly, progress, say_nothing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES = "claims"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which log, and what to tell of it."""

    log: str | None = None
    """Its name; None is `marshal`, on Kafka `__marshal`."""
    address: Address = field(default_factory=Address)
    kafka: str | None = None
    """The log is in Kafka, at these brokers: `host:port,host:port`."""
    kafka_config: str | None = None
    """A file of Kafka client properties, which every executor reads for itself: security, login, brokers."""
    interval_s: float = 10.0
    """The heartbeat interval: that of everybody on the log."""
    placing: Placing = "topic_partition"
    """As for everybody on the log."""
    group: str | None = None
    """Tell of this group only."""
    topic: str | None = None
    """Tell of this topic only."""
    start: str = "earliest"
    """Tell of what was owned from there on: an offset, a time, or how long ago. The log is replayed from its beginning
    all the same: who owned what then is told by what came before."""
    at: str | None = None
    """The world and its history as they were there, in the same words; None is all that the log has."""
    gap_s: float | None = None
    """Tell when a partition was nobody's for longer than this. None is one interval."""
    out: str | None = None
    """A directory that driver and executors see under one path. All tables stay in `<out>/claims`."""
    evidence: int = 20
    """Rows of each kind in the report; all are in `<out>/claims`."""

    def __post_init__(self) -> None:
        World(self.interval_s)
        check_placing(self.placing)
        if self.log is not None and not self.is_on_kafka:
            check_stream_name(self.log)
        for name, text in (("group", self.group), ("topic", self.topic)):
            if text is not None:
                check_id(text, name)
        if place_of(self.start, "from").offsets is not None:
            raise InvalidInput(f"from is {self.start!r}: give one offset, a time, or how long ago, such as -15m")
        if self.at is not None:
            place_of(self.at, "at")
        if self.gap_s is not None and (not math.isfinite(self.gap_s) or self.gap_s < 0):
            raise InvalidInput(f"gap_s is {self.gap_s!r}: give seconds, 0 or more")
        check_work(self.out, "out")
        check_evidence(self.evidence)

    @property
    def is_on_kafka(self) -> bool:
        return self.kafka is not None or self.kafka_config is not None

    @property
    def longest_gap_s(self) -> float:
        return self.interval_s if self.gap_s is None else self.gap_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a coordination log says."""

    log: str
    partitions: list[dict[str, int]]
    """Of the log: its partitions, the first record and the last one, how many, and their times in milliseconds."""
    gap_s: float
    violations: dict[str, int]
    """Overlaps, and records that are where another hash puts them."""
    facts: dict[str, int]
    spans: dict[str, int]
    """How many ended how."""
    evidence: dict[str, list[dict[str, Any]]]
    seconds: float
    tables: str | None = None
    """Where all tables are, as Parquet."""

    @property
    def verdict(self) -> bool:
        """At no place in the log had a partition two owners, and everybody looks for it in the same place."""
        return not any(self.violations.values())

    @property
    def exit_code(self) -> int:
        return 0 if self.verdict else 3

    def as_json(self) -> dict[str, Any]:
        from keylane.spark.pipelines.claims_text import told  # noqa: PLC0415 - only where somebody reads it

        return {
            "pipeline": "claims",
            "verdict": "clean" if self.verdict else "violations",
            "log": self.log,
            "partitions": [told(one) for one in self.partitions],
            "gap_s": self.gap_s,
            "violations": self.violations,
            "facts": told(self.facts),
            "spans": self.spans,
            "evidence": {kind: [told(one) for one in rows] for kind, rows in self.evidence.items()},
            "tables": self.tables,
            "seconds": round(self.seconds, 3),
        }

    def as_text(self) -> str:
        from keylane.spark.pipelines.claims_text import as_text  # noqa: PLC0415 - only where somebody reads it

        return as_text(self)


def look(settings: Settings) -> None:
    """See that the log is there, that it can be one, and that there is something to read: before Spark starts."""
    stops_of(open_log(settings), place_of(settings.at or "latest", "at"))


def run(spark: SparkSession, settings: Settings, say: Say = say_nothing) -> Report:
    """Replay a log. `InvalidInput`: it is empty, or this part of it is. `CoordinationLogError`: there is no such log.

    report = run(spark, Settings(address=Address(url="nats://127.0.0.1:4222"), interval_s=10, at="-1h"))
    print(report.as_text())
    """
    from keylane.spark.pipelines.claims_verdict import judge  # noqa: PLC0415 - needs pyspark, which is optional and slow

    began_s = time.monotonic()
    with working(settings.out, "claims") as directory, plainly(), building(directory) as aside:
        log = open_log(settings)
        with progress(spark, say, "claims"):
            found = judge(spark, log, settings, aside, say)
        kept: Path | None = None
        if settings.out is not None:
            kept = directory / TABLES
            put_in_place(aside / TABLES, kept)
    return Report(
        log=log.name,
        gap_s=settings.longest_gap_s,
        seconds=time.monotonic() - began_s,
        tables=str(kept) if kept is not None else None,
        **found,
    )
