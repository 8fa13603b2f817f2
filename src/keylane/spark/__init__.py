"""JetStream streams in Spark: the data source, the sink and the pipelines built on them.

>>> keylane.spark.register(spark)
>>> orders = spark.read.format("keylane").option("url", "nats://127.0.0.1:4222").option("stream", "ORDERS").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.extras import extra_missing
from keylane.lazy import loader, public_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keylane.spark.cluster.java import provide_java
    from keylane.spark.key_order import in_key_order

__all__ = ["in_key_order", "provide_java", "register", "table"]

__dir__ = public_names(__all__)

_HOMES = {"in_key_order": "keylane.spark.key_order", "provide_java": "keylane.spark.cluster.java"}


if not TYPE_CHECKING:  # a type checker that saw this would take every misspelt name for good
    __getattr__ = loader(__name__, _HOMES)


def register(spark: SparkSession) -> None:
    """Make `format("keylane")` known to a session. Works everywhere, also where nothing is installed on executors."""
    try:
        from keylane.spark.source import KeylaneSource  # noqa: PLC0415 - needs pyspark, which is optional and slow
    except ModuleNotFoundError as error:
        raise extra_missing(f"{error.name} is not installed", "spark") from error
    if not _is_known(spark, KeylaneSource.name()):
        spark.dataSource.register(KeylaneSource)


def table(spark: SparkSession, stream: str, **options: str | float | bool) -> DataFrame:
    """The messages of a stream as a DataFrame, for notebooks. `options` are those of `format("keylane")`.

    >>> orders = keylane.spark.table(spark, "ORDERS", url="nats://127.0.0.1:4222", group="billing")
    >>> orders.where("key = 'customer-1'").show()
    """
    register(spark)
    return spark.read.format("keylane").options(**options).option("stream", stream).load()


def _is_known(spark: SparkSession, source: str) -> bool:
    """Whether Spark knows it already, as it does where keylane is installed. Registering it again logs a warning."""
    session = getattr(spark, "_jsparkSession", None)  # Spark Connect has none
    return session is not None and bool(session.sessionState().dataSourceManager().dataSourceExists(source))
