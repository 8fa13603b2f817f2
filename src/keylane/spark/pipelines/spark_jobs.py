"""Spark while a pipeline runs: the progress of its tasks, its errors in one sentence, and no guessed broadcasts."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keylane import errors
from keylane.errors import ApiError, KeylaneError, LakeBroken

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Say = Callable[[str], None]


_LOOK_S = 1.0


def say_nothing(line: str) -> None:
    del line


@contextmanager
def progress(spark: SparkSession, say: Say, what: str) -> Iterator[None]:
    """Say every second how many rows Spark's tasks have read since the beginning, and how many tasks are left."""
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(spark, say, what, ended), name="keylane-progress", daemon=True)
    if say is not say_nothing:
        watch.start()
    try:
        yield
    finally:
        ended.set()
        if watch.is_alive():
            watch.join(10.0)


def _watch(spark: SparkSession, say: Say, what: str, ended: threading.Event) -> None:
    began_s = time.monotonic()
    read: dict[int, int] = {}
    while not ended.wait(_LOOK_S):
        stages = spark.sparkContext._jsc.sc().statusStore().activeStages()
        active = [stages.apply(place) for place in range(stages.size())]
        for counter, rows in _rows_read(spark):
            read[counter] = max(rows, read.get(counter, 0))
        rows, seconds = sum(read.values()), time.monotonic() - began_s
        done, total = (sum(getattr(stage, name)() for stage in active) for name in ("numCompleteTasks", "numTasks"))
        if rows or total:
            tasks = f"; {done} of {total} tasks done" if total else ""
            say(f"{what}: {rows:,} rows so far, {rows / seconds:,.0f}/s{tasks}")


def _rows_read(spark: SparkSession) -> Iterator[tuple[int, int]]:
    """What each scan of `format("keylane")` in the plans that run now has given, by the number of its counter."""
    store = spark._jsparkSession.sharedState().statusStore()
    executions = store.executionsList()
    for place in range(executions.size()):
        execution = executions.apply(place)
        if execution.completionTime().isDefined():
            continue
        values = store.executionMetrics(execution.executionId())
        nodes = store.planGraph(execution.executionId()).allNodes()
        for number in range(nodes.size()):
            node = nodes.apply(number)
            metrics = node.metrics()
            for one in range(metrics.size()) if _is_scan(node.name(), node.desc()) else ():
                metric = metrics.apply(one)
                if metric.name() == "number of output rows":
                    told = values.get(metric.accumulatorId())
                    text = told.get().replace(",", "") if told.isDefined() else ""
                    yield metric.accumulatorId(), int(text) if text.isdecimal() else 0


def _is_scan(name: str, description: str) -> bool:
    """A scan of ours; those of Parquet may have our name in their path."""
    return "keylane" in description and "Scan" in name and "parquet" not in name


_OURS = re.compile(r"keylane\.errors\.(\w+): (.+)")


_IN_PYTHON = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception): .+)", re.MULTILINE)


@contextmanager
def plainly() -> Iterator[None]:
    """Turn Spark's errors, which are pages of Java, into one that says what happened."""
    try:
        yield
    except KeylaneError:
        raise
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("pyspark", "py4j"):
            raise
        raise plain_error(str(error), getattr(error, "_stackTrace", "")) from error


@contextmanager
def no_guessed_broadcasts(spark: SparkSession) -> Iterator[None]:
    """Let Spark broadcast only what is marked for it.

    It guesses the size of a table from its files, and sequences pack so well that millions of rows look small: the
    guess would put them all into the memory of one process.
    """
    names = ("spark.sql.autoBroadcastJoinThreshold", "spark.sql.adaptive.autoBroadcastJoinThreshold")
    before = {name: spark.conf.get(name, None) for name in names}
    for name in names:
        spark.conf.set(name, "-1")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


def plain_error(text: str, causes: str = "") -> KeylaneError:
    """The error in a text of Spark's: keylane's own where a task raised one, else Spark's first line.

    `causes` is what the JVM says besides: an error of a streaming query names there what it came from.
    """
    if found := _OURS.findall(text) or _OURS.findall(causes):
        name, words = found[-1]
        kind = getattr(errors, name, KeylaneError)
        return KeylaneError(words) if issubclass(kind, ApiError) else kind(words)
    if any(words in told for words in ("No space left on device", "Disk quota exceeded") for told in (text, causes)):
        return LakeBroken(
            "no space is left on the disk that was written to: what was committed before is whole; make room and run "
            "the same command again"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = next((line for line in lines if not line.startswith(("at ", "Traceback", "File "))), "Spark gave no reason")
    if "Traceback (most recent call last)" in text and (raised := _IN_PYTHON.findall(text)):
        told = raised[-1]
    return KeylaneError(f"Spark ended the run: {told[:500]}")
