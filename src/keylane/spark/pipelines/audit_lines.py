"""What a journal holds of each instance, and what of it is missing, in sum: one row for each line, read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.spark.pipelines import audit_rules as rules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_NAMES = pa.schema([("line", pa.int64()), ("writer", pa.string()), ("member", pa.string()), ("instance", pa.string())])


@dataclass(frozen=True, slots=True)
class JournalLines:
    """The lines of a journal."""

    found: Sequence[Row]
    broken: int
    """Messages that are no whole batch."""

    @classmethod
    def of(cls, journal: DataFrame) -> JournalLines:
        rows = rules.lines(journal).collect()
        nameless = [row for row in rows if row["writer"] is None]
        return cls([row for row in rows if row not in nameless], sum(row["copies"] + 1 for row in nameless))

    def __len__(self) -> int:
        return len(self.found)

    def total(self, name: str) -> int:
        """The sum of `batches`, `missing`, `dropped`, `copies` or `records`."""
        return sum(row[name] for row in self.found)

    @property
    def sample(self) -> float:
        """The least part of the keys that an instance wrote about."""
        return min((row["sample"] for row in self.found), default=1.0)

    @property
    def whole(self) -> bool:
        """Nothing is missing, as far as the batches that are there can tell."""
        return not (self.total("missing") or self.total("dropped") or self.broken)

    def names(self, spark: SparkSession) -> DataFrame:
        """Which instance a line is."""
        return spark.createDataFrame(
            pa.Table.from_pylist([{name: row[name] for name in _NAMES.names} for row in self.found], schema=_NAMES)
        )
