"""Parity: two groups of one stream, compared by what they wrote down: before one takes the place of the other.

`parity_verdict` has the definitions. The tables are those of the audit, a set for each group.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane.core.names import check_group_name
from keylane.errors import InvalidInput
from keylane.spark.address import Address
from keylane.spark.pipelines.interface import GroupSettings, PipelineReport
from keylane.spark.pipelines.spark_jobs import Say, no_guessed_broadcasts, plainly, say_nothing
from keylane.spark.pipelines.stream_range import (
    StreamRange,
    address_options,
    bounds,
    check_evidence,
    check_span,
    find_range,
)
from keylane.spark.pipelines.work_directory import building, check_work, put_in_place, working
from keylane.spark.read_options import read_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FINDINGS = "findings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(GroupSettings):
    """Which two groups to compare, over which messages: `group` is what there is."""

    other_group: str
    """What is compared with it."""
    other_server: str | None = None
    """The other group's server, if it is another one: its stream must have the same sequences, as a mirror has."""
    end: str | None = None
    """None is the newest message at the time."""
    work: str | None = None
    """A directory that driver and executors see under one path; all findings stay in `<work>/findings`."""
    tolerance_s: float = 0.5
    """How far the clocks of two members may be apart."""
    settle_s: float = 2.0
    """How long members may take to write down what they have handled."""
    complete: bool = False
    """Every instance of both groups has stopped and closed its journal: a record that is not there never was."""
    evidence: int = 20

    def __post_init__(self) -> None:
        GroupSettings.__post_init__(self)
        check_group_name(self.other_group)
        if self.group == self.other_group and self.other_server is None:
            raise InvalidInput(f"group and other_group are both {self.group!r}: give two groups, or other_server")
        _ = self.other_address  # refuses a login in its url
        check_work(self.work)
        check_span("tolerance_s", self.tolerance_s)
        check_span("settle_s", self.settle_s)
        check_evidence(self.evidence)
        read_options(self.options)

    @property
    def options(self) -> dict[str, str]:
        return address_options(self.address) | {"stream": self.stream} | bounds(self.start, self.end)

    @property
    def other_address(self) -> Address:
        return replace(self.address, url=self.other_server) if self.other_server is not None else self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(PipelineReport):
    """How two groups differ."""

    stream: str
    group: str
    other_group: str
    first: int
    last: int
    differences: dict[str, int]
    unproven: dict[str, int]
    causes: dict[str, dict[str, int]]
    facts: dict[str, int]
    evidence: dict[str, list[dict[str, Any]]]
    seconds: float
    findings: str | None = None

    @property
    def verdict(self) -> bool:
        """No difference was found. Unproven findings are reported but do not count as violations."""
        return not any(self.differences.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "pipeline": "parity",
            "verdict": "same" if self.verdict else "different",
            "stream": self.stream,
            "group": self.group,
            "other_group": self.other_group,
            "first": self.first,
            "last": self.last,
            "differences": self.differences,
            "unproven": self.unproven,
            "causes": self.causes,
            "facts": self.facts,
            "evidence": self.evidence,
            "findings": self.findings,
            "seconds": round(self.seconds, 3),
        }

    def as_text(self) -> str:
        from keylane.spark.pipelines.parity_verdict import as_text  # noqa: PLC0415 - needs pyspark

        return as_text(self)


def run(spark: SparkSession, settings: Settings, say: Say = say_nothing) -> Report:
    """Compare two groups. `InvalidInput`: nothing is there to compare. `NotFound`: no such stream, or no journal.

    report = run(spark, Settings(stream="ORDERS", group="billing", other_group="billing-new"))
    """
    from keylane.spark.pipelines.parity_verdict import compare  # noqa: PLC0415 - needs pyspark

    began_s = time.monotonic()
    with (
        working(settings.work, "parity") as directory,
        plainly(),
        no_guessed_broadcasts(spark),
        building(directory) as aside,
    ):
        part = find_range(settings.options)
        if part.is_empty:
            raise InvalidInput(
                f"there is nothing to compare: stream {settings.stream!r} holds no message from {settings.start} to "
                f"{settings.end or 'its end'}"
            )
        found = compare(spark, settings, part, aside, say)
        kept: Path | None = None
        if settings.work is not None:
            kept = directory / FINDINGS
            put_in_place(aside / FINDINGS, kept)
    return _report(settings, part, found, time.monotonic() - began_s, kept)


def _report(settings: Settings, part: StreamRange, found: dict[str, Any], seconds: float, kept: Path | None) -> Report:
    return Report(
        stream=settings.stream,
        group=settings.group,
        other_group=settings.other_group,
        first=part.after + 1,
        last=part.upto,
        seconds=seconds,
        findings=str(kept) if kept is not None else None,
        **found,
    )
