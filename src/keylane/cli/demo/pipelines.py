"""The pipelines that follow the demo: an audit of what its members recorded, and the load of each member."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from keylane.cli.demo.member import JOURNAL_FLUSH_S
from keylane.errors import KeylaneError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STREAM = "ORDERS"
GROUP = "billing"


def run_pipelines(console: Console, url: str) -> bool:
    """Run audit and skew and print their reports. Returns whether the audit is clean; true if it could not run."""
    from keylane.spark.pipelines.session import is_installed, spark_session

    console.print()
    if not is_installed():
        console.print("Audit and load of this run, on Spark: pip install 'keylane[spark]'", markup=False)
        return True
    console.print("Two pipelines look at what the members wrote down. Starting Spark ...")
    try:
        with spark_session("keylane demo") as spark:
            return _run_both(console, spark, url)
    except KeylaneError as error:
        console.print(f"The pipelines did not run: {error}", markup=False)
        return True


def _run_both(console: Console, spark: SparkSession, url: str) -> bool:
    from keylane.spark.address import Address
    from keylane.spark.pipelines import audit, skew
    from keylane.spark.sync_connection import shared_connection

    address = Address(url=url)
    link = shared_connection(address)
    try:
        audited = audit.run(spark, audit.Settings(stream=STREAM, group=GROUP, address=address))
        summary = audited.as_text() if not audited.verdict else "\n\n".join(audited.as_text().split("\n\n")[:2])
        _show(console, f"keylane pipeline run audit --stream {STREAM} --group {GROUP}", summary)
        if without := audited.unproven.get("unproven"):
            _explain(console, without)
        load = skew.run(spark, skew.Settings(stream=STREAM, group=GROUP, address=address, top=3))
        _show(console, f"keylane pipeline run skew --stream {STREAM} --group {GROUP}", load.as_text())
    finally:
        link.close()  # the demo's server ends before this process does
    return audited.verdict


def _explain(console: Console, without: int) -> None:
    console.print(
        f"The {without:,} without a record are not lost: the process that was killed had handled them, and the last "
        f"batch of its journal ({JOURNAL_FLUSH_S:g} s) died with it. The verdict above does not need the journal and "
        "has them as handled; an audit has nothing else, so it says that it cannot prove it.",
        markup=False,
        highlight=False,
    )


def _show(console: Console, command: str, text: str) -> None:
    console.print(f"\n$ {command}", style="bold", markup=False, highlight=False)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
