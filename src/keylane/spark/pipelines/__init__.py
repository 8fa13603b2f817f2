"""Pipelines on Spark: what a stream and its journal tell.

Each is a module with `Settings` and `run(spark, settings, say) -> Report`: `lake`, `audit`, `parity`, `slo`, `skew`.
They need `keylane[spark]` and are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from types import ModuleType

PIPELINES = ("audit", "lake", "parity", "skew", "slo")

__all__ = ["audit", "lake", "parity", "skew", "slo"]


def __getattr__(name: str) -> ModuleType:
    if name in PIPELINES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
