"""An audit's report in words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keylane.spark.pipelines.audit import Report

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
