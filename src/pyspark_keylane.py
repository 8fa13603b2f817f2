"""Lets Spark find `format("keylane")` by itself: it looks for modules of this kind of name where it starts.

That works where keylane is installed on every machine, as on a laptop. Elsewhere call `keylane.spark.register(spark)`.
"""

from __future__ import annotations

from keylane.spark.source import KeylaneSource as DefaultSource

__all__ = ["DefaultSource"]
