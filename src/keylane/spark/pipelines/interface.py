"""What all pipelines have: `Settings` that check themselves, a `Report` with a verdict, text, JSON and an exit code.

Each pipeline is a module with `Settings`, `Report` and `run(spark, settings, say) -> Report`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

from keylane.core.names import check_group_name, check_stream_name
from keylane.spark.address import Address
from keylane.spark.options import read_options
from keylane.spark.pipelines.stream_range import address_options, bounds, check_evidence, check_span
from keylane.spark.pipelines.work_directory import check_work

VIOLATED = 3
"""The exit code of a run whose verdict is no."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """What to read, and from where."""

    address: Address = field(default_factory=Address)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings(PipelineSettings):
    """A pipeline about one group of a stream."""

    stream: str
    group: str
    start: str = "earliest"
    """Of the stream: earliest, a sequence, a time, or how long ago (`-1h`)."""

    def __post_init__(self) -> None:
        check_stream_name(self.stream)
        check_group_name(self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings(GroupSettings):
    """A pipeline that judges what the members of a group wrote into their journals."""

    end: str | None = None
    """In the same words as `start`; None is the newest message at the time."""
    work: str | None = None
    """A directory that driver and executors see under one path. All findings stay in `<work>/findings`. None: one that
    is removed in the end."""
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
        check_work(self.work)
        check_span("tolerance_s", self.tolerance_s)
        check_span("settle_s", self.settle_s)
        check_evidence(self.evidence)
        read_options(self.options)

    @property
    def options(self) -> dict[str, str]:
        return address_options(self.address) | {"stream": self.stream} | bounds(self.start, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport(ABC):
    """What a pipeline found."""

    PIPELINE: ClassVar[str]
    VERDICTS: ClassVar[tuple[str, str]]
    """The verdict in a word: yes and no."""
    FIELDS: ClassVar[tuple[str, ...]]
    """What `as_json` shows besides pipeline, verdict and seconds, in this order."""

    seconds: float

    @property
    @abstractmethod
    def verdict(self) -> bool:
        """Whether what was asked for holds."""

    @property
    def exit_code(self) -> int:
        return 0 if self.verdict else VIOLATED

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "pipeline": self.PIPELINE,
            "verdict": self.VERDICTS[0 if self.verdict else 1],
            **{name: getattr(self, name) for name in self.FIELDS},
            "seconds": round(self.seconds, 3),
        }

    @abstractmethod
    def as_text(self) -> str:
        """For people; the verdict is in the first lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingsReport(PipelineReport):
    """What the rules found in the journals of groups, with evidence."""

    NAMES: ClassVar[dict[str, str]]
    """The kinds of findings, in words."""

    stream: str
    group: str
    first: int
    last: int
    unproven: dict[str, int]
    """What may be a violation and cannot be proven. It is reported and does not count."""
    causes: dict[str, dict[str, int]]
    """The reasons of the findings of each kind, and how often."""
    facts: dict[str, int | float]
    evidence: dict[str, list[dict[str, Any]]]
    findings: str | None = None
    """Where all findings are, as Parquet."""

    @property
    @abstractmethod
    def proven(self) -> dict[str, int]:
        """The findings that count, by kind."""

    @property
    def verdict(self) -> bool:
        return not any(self.proven.values())

    def headline(self, who: str, nothing: str) -> str:
        found, unproven = (
            ", ".join(f"{count:,} {self.NAMES[kind]}" for kind, count in counts.items() if count)
            for counts in (self.proven, self.unproven)
        )
        return f"{who}: {found or nothing}" + (f"; unproven: {unproven}" if unproven else "")

    def counts(self) -> list[tuple[str, str]]:
        return [(self.NAMES[kind], f"{count:,}") for kind, count in (self.proven | self.unproven).items()]

    def evidence_lines(self, sides: Mapping[str, str]) -> Iterator[str]:
        """The findings of each kind: their reasons, and the first rows. `sides` has the word before either record."""
        for kind, rows in self.evidence.items():
            yield from ("", f"{self.NAMES[kind]}:")
            yield from (f"  {times:,} times: {why}" for why, times in self.causes[kind].items())
            for one in rows:
                records = "".join(word + record_in_words(one[side]) for side, word in sides.items() if one[side])
                yield f"  {one['sequence']} of key {one['key']} (partition {one['partition']}){records}"
        if self.findings is not None:
            yield from ("", f"all findings: {self.findings}")


def record_in_words(one: Mapping[str, Any]) -> str:
    began, ended = (
        datetime.fromtimestamp(one[name] / 1e9, UTC).strftime("%H:%M:%S.%f") for name in ("started_ns", "ended_ns")
    )
    return (
        f"{one['source_sequence']} {one['outcome']} by {one['member']}/{one['instance']} {began} to {ended} "
        f"(pin {one['pin'] or '-'}, revision {one['revision']}, queue {one['sequence']}, delivery {one['delivered']})"
    )
