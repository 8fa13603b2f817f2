"""A lake's table in Delta Lake: whose messages it holds, who may write it, and what it holds.

Two runs may write one table at a time, one on either side of a boundary: a streaming run above it, a backfill up to it.
Each holds the `WriteClaim` of its side, a transaction id of Delta's (`txnAppId`, `txnVersion`): every commit raises the
version, and a newer claim begins above all versions of the older one. Delta itself leaves out a commit whose
version is not above the last one, and fails one that was overtaken on its way. So whoever lost the side cannot write
any more, and a run that reads the table after its claim sees all that runs before it will ever have written.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from keylane.errors import InvalidInput, KeylaneError, LakeConflict
from keylane.spark.compatibility import delta_package, misfit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Side = Literal["stream", "backfill"]
Span = tuple[int, int]
"""Everything above the first sequence, up to and including the second."""

_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
_BOUNDARY = "keylane.streamed_after"
_COUNT_BITS, _OWNER_BITS = 22, 18
_RACE = re.compile(r"DELTA_(CONCURRENT_|METADATA_CHANGED|PROTOCOL_CHANGED)")
_TRIES = 20


class TakenOver(KeylaneError):
    """Another run has claimed this side of the table; nothing was written after that."""


def delta_settings(spark: str, jars: str | None) -> dict[str, str]:
    """The settings of a session that writes Delta tables. Without `jars` Spark fetches them itself.

    Raises `InvalidInput` where they do not fit this Spark.
    """
    given = [] if jars is None else jars.split(",")
    if (told := misfit(spark, jars=given)) is not None:
        raise InvalidInput(told)
    brought = {"spark.jars": jars} if jars is not None else {"spark.jars.packages": delta_package(spark)}
    return {
        **brought,
        "spark.sql.extensions": _EXTENSION,
        "spark.sql.catalog.spark_catalog": _CATALOG,
        "spark.databricks.delta.snapshotPartitions": "4",
    }


def check_session(spark: SparkSession) -> None:
    """Raise `InvalidInput` unless the session was started with Delta Lake."""
    jars = f"{spark.conf.get('spark.jars', '')},{spark.conf.get('spark.jars.packages', '')}".split(",")
    if (told := misfit(spark.version, jars=jars)) is not None:
        raise InvalidInput(told)
    if _EXTENSION not in (spark.conf.get("spark.sql.extensions", "") or ""):
        needed = " ".join(f"--conf {name}={value}" for name, value in delta_settings(spark.version, None).items())
        raise InvalidInput(f"this Spark was started without Delta Lake: start it with {needed}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Which messages a table is of. Sequences of another selection would mean other messages."""

    stream: str
    created: str
    """When the stream was made, as the server tells it."""
    selection: Mapping[str, str]
    """The reader's options that choose messages or columns."""

    def as_properties(self) -> dict[str, str]:
        selection = json.dumps(dict(self.selection), sort_keys=True)
        return {"keylane.stream": self.stream, "keylane.created": self.created, "keylane.selection": selection}


@dataclass(frozen=True, slots=True)
class Totals:
    """What a table holds."""

    rows: int
    first: int
    last: int


class DeltaTable:
    """The table at a path of any file system that Spark knows.

    >>> table = DeltaTable(spark, "s3a://bucket/orders")  # doctest: +SKIP
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.spark = spark
        self.path = path
        self._name = "delta.`" + path.replace("`", "``") + "`"

    @property
    def exists(self) -> bool:
        return bool(self._jvm.io.delta.tables.DeltaTable.isDeltaTable(self.spark._jsparkSession, self.path))

    def open(self, identity: Identity, schema: str) -> None:
        """Create it, or see that it is the table of these messages; `LakeConflict` if it is not."""
        wanted = identity.as_properties()
        if not self.exists:
            self._create(schema, wanted)
        held = {name: self.read_property(name) for name in wanted}
        if held["keylane.stream"] is None:
            raise LakeConflict(f"table {self.path!r} was not made by this pipeline: give another directory")
        if held["keylane.stream"] != identity.stream:
            raise LakeConflict(
                f"table {self.path!r} is of stream {held['keylane.stream']!r}, and this run reads stream "
                f"{identity.stream!r}: give another table"
            )
        if held["keylane.created"] != identity.created:
            raise LakeConflict(
                f"table {self.path!r} is of stream {identity.stream!r} of {held['keylane.created']}, and the stream "
                "was made anew: its sequences mean other messages now; give another table"
            )
        if held["keylane.selection"] != wanted["keylane.selection"]:
            raise LakeConflict(
                f"table {self.path!r} was written with {held['keylane.selection']}, and this run asks for "
                f"{wanted['keylane.selection']}: give the same options, or another table"
            )

    def _create(self, schema: str, properties: Mapping[str, str]) -> None:
        told = ", ".join(f"{_text(name)} = {_text(value)}" for name, value in properties.items())
        try:
            self.spark.sql(
                f"CREATE TABLE IF NOT EXISTS {self._name} ({schema}) USING delta PARTITIONED BY (partition, day) "
                f"TBLPROPERTIES ({told})"
            )
        except Exception:
            if not self.exists:  # else another run made it meanwhile
                raise

    # ---- what it holds --------------------------------------------------------------------------------

    def read_property(self, name: str) -> str | None:
        """One of the table's properties, as of now."""
        found = self._snapshot().metadata().configuration().get(name)
        return str(found.get()) if found.isDefined() else None

    def size(self) -> tuple[int, int]:
        """Files and bytes of the newest version."""
        newest = self._snapshot()
        return int(newest.numOfFiles()), int(newest.sizeInBytes())

    def totals(self) -> Totals:
        """Delta answers from its log, without reading a file."""
        frame = self.spark.read.format("delta").load(self.path)
        rows, first, last = frame.selectExpr("count(*)", "min(sequence)", "max(sequence)").collect()[0]
        return Totals(rows, first or 0, last or 0)

    def count(self, span: Span) -> int:
        return self.sequences(span).count()

    def sequences(self, span: Span) -> DataFrame:
        frame = self.spark.read.format("delta").load(self.path).select("sequence")
        return frame.where((frame.sequence > span[0]) & (frame.sequence <= span[1]))

    # ---- who writes it --------------------------------------------------------------------------------

    @property
    def boundary(self) -> int | None:
        """The streaming run writes what is above, backfills what is not; None before the first streaming run."""
        told = self.read_property(_BOUNDARY)
        return None if told is None else int(told)

    def set_boundary(self, after: int) -> None:
        self.spark.sql(f"ALTER TABLE {self._name} SET TBLPROPERTIES ({_text(_BOUNDARY)} = '{after}')")

    def claim(self, side: Side) -> WriteClaim:
        """Take over a side of the table: a run that had it before writes nothing any more."""
        claim = WriteClaim(self, f"keylane/{side}")
        for _ in range(_TRIES):
            if claim.take():
                return claim
        raise LakeConflict(f"table {self.path!r} is claimed by other runs again and again: end all but one of them")

    def version(self, application: str) -> int:
        """The newest transaction of an application that the table's log names."""
        found = self._snapshot().transactions().get(application)
        return int(found.get()) if found.isDefined() else 0

    # ---- upkeep ---------------------------------------------------------------------------------------

    def optimize(self) -> tuple[int, int]:
        """Merge small files: how many became how many, none where another run merges at the same time.

        Writers and readers go on meanwhile.
        """
        try:
            metrics = self.spark.sql(f"OPTIMIZE {self._name}").collect()[0]["metrics"]
        except Exception as error:
            if _RACE.search(str(error)) is None:
                raise
            return 0, 0
        return int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"])

    def vacuum(self, hours: float) -> None:
        """Delete files that no version of the last hours needs."""
        self.spark.sql(f"VACUUM {self._name} RETAIN {hours:g} HOURS")

    def _snapshot(self) -> Any:
        """The newest version as Delta's own object: SQL shows no transactions, and takes a job for the rest."""
        nothing = self._jvm.scala.Option.empty()
        log = self._jvm.org.apache.spark.sql.delta.DeltaLog.forTable(self.spark._jsparkSession, self.path)
        return log.update(False, nothing, nothing)

    @property
    def _jvm(self) -> Any:
        return self.spark._jvm


class WriteClaim:
    """The right to write one side of a table, until another run claims it."""

    def __init__(self, table: DeltaTable, application: str) -> None:
        self._table = table
        self._application = application
        self._version = 0

    def take(self) -> bool:
        """Begin a row of versions above all others; False where another run was quicker."""
        newest = self._table.version(self._application) >> (_OWNER_BITS + _COUNT_BITS)
        owner = random.getrandbits(_OWNER_BITS)
        self._version = ((newest + 1) << (_OWNER_BITS + _COUNT_BITS)) | (owner << _COUNT_BITS)
        schema = self._table.spark.read.format("delta").load(self._table.path).schema
        self._write(self._table.spark.createDataFrame([], schema))
        return self._is_newest()

    def append(self, rows: DataFrame) -> None:
        """Add rows, in one commit. Raises `TakenOver` if the claim was lost, and then nothing was added."""
        self._version += 1
        if not self._version % (1 << _COUNT_BITS) and not self.take():  # the versions of this claim are used up
            self._lost()
        self._write(rows)
        if not self._is_newest():
            self._lost()

    def _write(self, rows: DataFrame) -> None:
        before = self._table.version(self._application)
        for attempt in range(_TRIES):
            try:
                (
                    rows.write.format("delta")
                    .mode("append")
                    .options(txnAppId=self._application, txnVersion=str(self._version))
                    .save(self._table.path)
                )
            except Exception as error:
                if _RACE.search(str(error)) is None or attempt == _TRIES - 1:
                    raise
                if self._table.version(self._application) != before:
                    return  # whose it is now, the caller sees
            else:
                return

    def _is_newest(self) -> bool:
        return self._table.version(self._application) == self._version

    def _lost(self) -> None:
        side = self._application.removeprefix("keylane/")
        what = "streaming run" if side == "stream" else "backfill, or the first streaming run,"
        raise TakenOver(f"another {what} began to write table {self._table.path!r}: this one ended, and lost nothing")


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
