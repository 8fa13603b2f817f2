"""What all pipelines have: `Settings` that check themselves, a `Report` with a verdict, text, JSON and an exit code.

Each pipeline is a module with `Settings`, `Report` and `run(spark, settings, say) -> Report`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from keylane.core.names import check_group_name, check_stream_name
from keylane.spark.address import Address

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


class PipelineReport(ABC):
    """What a pipeline found."""

    __slots__ = ()

    @property
    @abstractmethod
    def verdict(self) -> bool:
        """Whether what was asked for holds."""

    @property
    def exit_code(self) -> int:
        return 0 if self.verdict else VIOLATED

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """For programs."""

    @abstractmethod
    def as_text(self) -> str:
        """For people; the verdict is in the first lines."""
