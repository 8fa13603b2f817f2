"""The audit: reports every violation of what a group promises, from its stream and its journal, with evidence.

`audit_tables` reads the server into tables, `audit_rules` has the definitions, `audit_verdict` runs them over tables.
This runs both: once over a range, or again and again as the stream grows. A run that follows the stream judges what it
has read so far by the same rules, so it says what a batch over the same range would say.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane.errors import InvalidInput
from keylane.spark.pipelines.interface import GroupSettings, PipelineReport
from keylane.spark.pipelines.spark_jobs import Say, no_guessed_broadcasts, plainly, say_nothing
from keylane.spark.pipelines.stream_range import (
    StreamRange,
    address_options,
    bounds,
    check_evidence,
    check_span,
    find_range,
    group_of,
)
from keylane.spark.pipelines.work_directory import building, check_work, put_in_place, working
from keylane.spark.read_options import read_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from keylane.spark.pipelines.audit_tables import AuditSource, PendingWork

FINDINGS = "findings"
_ABOUT = "about.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(GroupSettings):
    """What to audit. It is one batch, unless `available_now` or `follow` is set."""

    end: str | None = None
    """In the same words; None is the newest message at the time."""
    work: str | None = None
    """A directory that driver and executors see under one path. All findings stay in `<work>/findings`, and a run that
    follows the stream keeps its tables and its checkpoint there. None: one that is removed in the end (batch only)."""
    available_now: bool = False
    """Go on from the last run in `work`, up to now, and judge all of it."""
    follow: bool = False
    """Do that again and again, until stopped."""
    interval_s: float = 60.0
    """From one verdict to the next when following."""
    tolerance_s: float = 0.5
    """How far the clocks of two members may be apart."""
    settle_s: float = 2.0
    """How long members may take to write down what they have handled."""
    complete: bool = False
    """Every instance has stopped and closed its journal: a record that is not there never was."""
    evidence: int = 20
    """Rows of each kind of finding in the report; all are in `<work>/findings`."""

    def __post_init__(self) -> None:
        GroupSettings.__post_init__(self)
        if self.available_now and self.follow:
            raise InvalidInput("available_now and follow are both given: one ends by itself, the other does not")
        if self.streaming and self.work is None:
            raise InvalidInput("work is missing: a run that goes on from the last one needs a directory to keep it in")
        check_work(self.work)
        check_span("tolerance_s", self.tolerance_s)
        check_span("settle_s", self.settle_s)
        check_span("interval_s", self.interval_s, 86_400)
        check_evidence(self.evidence)
        read_options(self.options)

    @property
    def streaming(self) -> bool:
        return self.available_now or self.follow

    @property
    def options(self) -> dict[str, str]:
        return address_options(self.address) | {"stream": self.stream} | bounds(self.start, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(PipelineReport):
    """What an audit found."""

    stream: str
    group: str
    first: int
    last: int
    violations: dict[str, int]
    """How many of each kind: messages; of two owners, pairs of tenures on a key."""
    unproven: dict[str, int]
    """What may be a violation and cannot be proven."""
    causes: dict[str, dict[str, int]]
    """The reasons of the findings of each kind, and how often."""
    facts: dict[str, int | float]
    evidence: dict[str, list[dict[str, Any]]]
    seconds: float
    findings: str | None = None
    """Where all findings are, as Parquet."""
    stopped: bool = False

    @property
    def verdict(self) -> bool:
        """No violation was found. Unproven findings are reported but do not count as violations."""
        return not any(self.violations.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "pipeline": "audit",
            "verdict": "clean" if self.verdict else "violations",
            "stream": self.stream,
            "group": self.group,
            "first": self.first,
            "last": self.last,
            "violations": self.violations,
            "unproven": self.unproven,
            "causes": self.causes,
            "facts": self.facts,
            "evidence": self.evidence,
            "findings": self.findings,
            "stopped": self.stopped,
            "seconds": round(self.seconds, 3),
        }

    def as_text(self) -> str:
        return as_text(self)


def run(
    spark: SparkSession, settings: Settings, say: Say = say_nothing, *, stop: threading.Event | None = None
) -> Report:
    """Audit a group. Setting `stop` ends a run that follows the stream, after the verdict it is at.

    `InvalidInput`: there is nothing to audit in this range. `NotFound`: no such stream, or it has no journal.
    `JournalTooNew`: members of a newer keylane wrote it.

        report = run(spark, Settings(stream="ORDERS", group="billing", start="-1h"))
        print(report.as_text())
    """
    with working(settings.work, "audit") as directory, plainly(), no_guessed_broadcasts(spark):
        return _Run(spark, settings, directory, say).go(stop or threading.Event())


class _Run:
    def __init__(self, spark: SparkSession, settings: Settings, directory: Path, say: Say) -> None:
        from keylane.spark.pipelines import audit_tables  # noqa: PLC0415 - needs pyspark, which is optional and slow

        self.spark = spark
        self.settings = settings
        self.directory = directory
        self.say = say
        self.began_s = time.monotonic()
        self.tables = audit_tables
        self.config = group_of(settings.address, settings.stream, settings.group)

    def go(self, stop: threading.Event) -> Report:
        from keylane.spark.pipelines.journal_frame import journal_state  # noqa: PLC0415 - needs pyspark

        journal_state(self.settings.address, self.settings.stream)
        if not self.settings.streaming:
            return self._once()
        part = self._part_to_follow()
        while True:
            report = self._cycle(part)
            self.say(report.as_text().splitlines()[0])
            if self.settings.available_now:
                return report
            if stop.wait(self.settings.interval_s):
                return replace(report, stopped=True)

    # ---- once -------------------------------------------------------------------------------------------

    def _once(self) -> Report:
        settings = self.settings
        part = find_range(settings.options)
        self._check_not_empty(part)
        with building(self.directory) as aside:
            where = self._where(aside)
            self.say(f"reading the messages {part.after + 1:,} to {part.upto:,} of {settings.stream}")
            self.tables.write_messages(self.spark, where, part)
            pending = self.tables.pending_of(self.spark, where)
            last = self._journal_end()
            self.say(f"reading the journal, {last:,} batches")
            self.tables.write_journal(self.spark, where, part, last)
            return self._judge(where, pending, must_have=True)

    def _check_not_empty(self, part: StreamRange) -> None:
        if part.is_empty:
            raise InvalidInput(
                f"there is nothing to audit: stream {self.settings.stream!r} holds no message from "
                f"{self.settings.start} to {self.settings.end or 'its end'} (after {part.after}, up to {part.upto})"
            )

    # ---- again and again --------------------------------------------------------------------------------

    def _part_to_follow(self) -> StreamRange:
        """The range that the first run in this directory was given; later runs must mean the same."""
        settings = self.settings
        asked = {"stream": settings.stream, "group": settings.group, "start": settings.start, "end": settings.end}
        about = self.directory / _ABOUT
        if about.exists():
            known = json.loads(about.read_text(encoding="utf-8"))
            for name, value in asked.items():
                if known["asked"][name] != value:
                    raise InvalidInput(
                        f"{name} is {value!r}, and the audit in {str(self.directory)!r} is about "
                        f"{known['asked'][name]!r}: go on with that, or give another work directory"
                    )
            return StreamRange(settings.stream, known["created"], known["after"], known["upto"])
        found = find_range(settings.options)
        if settings.end is not None:
            self._check_not_empty(found)
        upto = found.upto if settings.end is not None else 0
        new = about.with_name(f".new-{_ABOUT}")
        told = {"asked": asked, "created": found.created, "after": found.after, "upto": upto}
        new.write_text(json.dumps(told), encoding="utf-8")
        new.rename(about)
        return StreamRange(settings.stream, found.created, found.after, upto)

    def _cycle(self, part: StreamRange) -> Report:
        self.began_s = time.monotonic()
        where = self._where(self.directory)
        first, last = part.after + 1, part.upto or None
        self.tables.append_messages(self.spark, where, {"startingOffsets": str(first)}, last)
        pending = self.tables.pending_of(self.spark, where)
        time.sleep(self.settings.settle_s)
        self.tables.append_journal(self.spark, where, first, last)
        return self._judge(where, pending, must_have=False)

    # ---- both -------------------------------------------------------------------------------------------

    def _where(self, directory: Path) -> AuditSource:
        settings = self.settings
        for table in ("messages", "journal"):
            (directory / table).mkdir(parents=True, exist_ok=True)
        return self.tables.AuditSource(settings.address, settings.stream, settings.group, self.config, directory)

    def _journal_end(self) -> int:
        from keylane.spark.pipelines.journal_frame import journal_state  # noqa: PLC0415 - needs pyspark

        time.sleep(self.settings.settle_s)
        last = journal_state(self.settings.address, self.settings.stream).last
        if not last:
            raise InvalidInput(f"the journal of stream {self.settings.stream!r} is empty: there is nothing to audit")
        return last

    def _judge(self, where: AuditSource, pending: PendingWork, *, must_have: bool) -> Report:
        from keylane.spark.pipelines.audit_verdict import judge  # noqa: PLC0415 - needs pyspark

        settings = self.settings
        with building(self.directory) as aside:
            found = judge(self.spark, where, pending, settings, aside, must_have=must_have, say=self.say)
            kept: Path | None = None
            if settings.work is not None:
                kept = self.directory / FINDINGS
                put_in_place(aside / FINDINGS, kept)
        return Report(
            stream=settings.stream,
            group=settings.group,
            first=found.first,
            last=found.last,
            violations=found.violations,
            unproven=found.unproven,
            causes=found.causes,
            facts=found.facts,
            evidence=found.evidence,
            seconds=time.monotonic() - self.began_s,
            findings=str(kept) if kept is not None else None,
        )


# ---- the report in words -------------------------------------------------------------------------------------


_NAMES = {
    "lost": "lost",
    "duplicated": "handled twice",
    "out_of_order": "out of order",
    "two_owners": "two owners at once",
    "late_effect": "late effects",
    "unproven": "without a record",
    "order_unproven": "order not provable",
}


def as_text(report: Report) -> str:
    """The verdict in the first line; then what was counted, and the first rows of evidence."""
    facts = report.facts
    lines = [headline(report), ""]
    rows: list[tuple[str, str]] = [
        ("messages", f"{facts['messages']:,} ({report.first:,} to {report.last:,})"),
        ("handled", f"{facts['handled']:,}"),
        ("pending", f"{facts['pending']:,}"),
        *((_NAMES[kind], f"{count:,}") for kind, count in (report.violations | report.unproven).items()),
        (
            "journal",
            f"{facts['records']:,} records in {facts['batches']:,} batches of {facts['instances']:,} instances",
        ),
    ]
    rows += [
        (words, f"{facts[name]:,}")
        for name, words in (
            ("records_dropped", "  dropped records"),
            ("batches_missing", "  missing batches"),
            ("batches_broken", "  broken batches"),
            ("batches_copied", "  copied batches"),
            ("outside_the_sample", "outside the sample"),
            ("not_in_the_stream", "not in the stream"),
        )
        if facts[name]
    ]
    lines += [f"{name:<22} {value}" for name, value in rows]
    for kind, found in report.evidence.items():
        lines += ["", f"{_NAMES[kind]}:"]
        lines += [f"  {times:,} times: {why}" for why, times in report.causes[kind].items()]
        lines += [f"  {_row(one)}" for one in found]
    if report.findings is not None:
        lines += ["", f"all findings: {report.findings}"]
    return "\n".join(lines)


def headline(report: Report) -> str:
    found = [f"{count:,} {_NAMES[kind]}" for kind, count in report.violations.items() if count]
    open_ends = [f"{count:,} {_NAMES[kind]}" for kind, count in report.unproven.items() if count]
    who = f"{report.stream}/{report.group}"
    told = f"{who}: {', '.join(found)}" if found else f"{who}: no violation"
    return f"{told}; unproven: {', '.join(open_ends)}" if open_ends else told


def _row(one: dict[str, Any]) -> str:
    told = f"{one['sequence']} of key {one['key']} (partition {one['partition']})"
    for side, word in (("record", ": "), ("other", "; other: ")):
        if one[side] is not None:
            told += word + record_in_words(one[side])
    return told


def record_in_words(one: dict[str, Any]) -> str:
    return (
        f"{one['source_sequence']} {one['outcome']} by {one['member']}/{one['instance']} {_time(one['started_ns'])} to "
        f"{_time(one['ended_ns'])} (pin {one['pin'] or '-'}, revision {one['revision']}, queue {one['sequence']}, "
        f"delivery {one['delivered']})"
    )


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).strftime("%H:%M:%S.%f")
