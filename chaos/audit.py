"""The audit of a run, held against the judge of evidence: do they say exactly the same?

The journal is read a second time here, record by record and without Spark. What a killed process had not sent yet is
missing in it: that must be the last it did, and is taken out of the evidence before the two are compared.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.evidence import Handled, verdict
from keylane.jetstream import Connection
from keylane.journal import JournalRecord, read_journal

FINAL = ("done", "dead", "terminated")
_SAME_S = 5.0
"""An effect and its record: a dead letter is written down after it was stored, for which a server may be waited for."""


@dataclass(slots=True)
class Audited:
    """What the audit said of a run, and where the judge says otherwise."""

    summary: str
    report: dict[str, Any]
    unwritten: int
    """Effects of killed processes that their journal had not sent."""
    disagreements: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "summary": self.summary,
            "violations": self.report["violations"],
            "unproven": self.report["unproven"],
            "causes": self.report["causes"],
            "facts": self.report["facts"],
            "unwritten": self.unwritten,
            "disagreements": self.disagreements,
        }


async def audited(
    connection: Connection, where: tuple[str, str, str], stored: Iterable[int], effects: Sequence[Handled]
) -> Audited:
    """Run the audit on `where` (url, stream, group) and compare. `effects` in the order in which they happened."""
    url, stream, group = where
    report, findings = await asyncio.to_thread(_run, url, stream, group)
    records = [one async for one in read_journal(connection, stream, group=group) if one.outcome in FINAL]
    written, unwritten, problems = matched(effects, records)
    result = Audited(report.as_text().splitlines()[0], report.as_json(), len(unwritten), problems)
    result.disagreements += compared(list(stored), effects, written, findings)
    return result


def _run(url: str, stream: str, group: str) -> tuple[Any, dict[str, set[int]]]:
    """The report, and the sequences of every kind of finding."""
    import pyarrow.dataset as ds  # type: ignore[import-untyped]  # noqa: PLC0415 - only a run with an audit needs it

    from keylane.spark.address import Address  # noqa: PLC0415 - as above
    from keylane.spark.pipelines import audit  # noqa: PLC0415 - as above
    from tests.peers.spark import spark_session  # noqa: PLC0415 - as above

    with tempfile.TemporaryDirectory(prefix="chaos-audit-") as temporary:
        with spark_session(Path(temporary) / "spark") as spark:
            settings = audit.Settings(
                stream=stream,
                group=group,
                address=Address(url=url),
                work=f"{temporary}/work",
                tolerance_s=0.0,  # one machine, one clock
            )
            report = audit.run(spark, settings)
        findings: dict[str, set[int]] = defaultdict(set)
        table = ds.dataset(f"{temporary}/work/findings", format="parquet").to_table(columns=["kind", "sequence"])
        for kind, sequence in zip(table.column("kind").to_pylist(), table.column("sequence").to_pylist(), strict=True):
            findings[kind].add(sequence)
    return report, findings


def matched(
    effects: Sequence[Handled], records: Iterable[JournalRecord]
) -> tuple[list[Handled], list[Handled], list[str]]:
    """Effects that have a record, effects that have none, and what should not be.

    Both carry the clock of one machine: an effect and its record lie close together.
    """
    offset_s = time.time() - time.monotonic()
    waiting: dict[int, list[float]] = defaultdict(list)
    for one in records:
        waiting[one.source_sequence].append(one.ended_ns / 1e9 - offset_s)
    written, unwritten = [], []
    for effect in effects:
        near = [at_s for at_s in waiting[effect.sequence] if -0.5 <= at_s - effect.at_s <= _SAME_S]
        if near:
            waiting[effect.sequence].remove(min(near, key=lambda at_s: abs(at_s - effect.at_s)))
            written.append(effect)
        else:
            unwritten.append(effect)
    problems = [f"{sequence} has a record and no evidence" for sequence, times in waiting.items() if times]
    last: dict[str, float] = {}
    for effect in written:
        last[effect.by] = max(effect.at_s, last.get(effect.by, 0.0))
    problems += [
        f"{effect.sequence} by {effect.by} at {effect.at_s:.3f} s has no record, and its process wrote later ones"
        for effect in unwritten
        if effect.at_s < last.get(effect.by, 0.0)
    ]
    return written, unwritten, problems


def compared(
    stored: Sequence[int], effects: Sequence[Handled], written: Sequence[Handled], findings: dict[str, set[int]]
) -> list[str]:
    """Where audit and judge differ, each in a line."""
    whole, known = verdict(stored, effects), verdict(stored, written)
    expected = {
        "lost": set(whole.lost),
        "unproven": set(known.lost) - set(whole.lost),
        "duplicated": set(known.duplicated),
        "out_of_order": set(known.out_of_order),
        "order_unproven": set(),
    }
    told = []
    for kind, sequences in expected.items():
        more, less = sorted(findings[kind] - sequences), sorted(sequences - findings[kind])
        if more or less:
            told.append(f"{kind}: the audit has {more[:10]} more than the judge, and not {less[:10]}")
    return told
