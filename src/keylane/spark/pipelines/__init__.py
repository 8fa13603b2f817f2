"""Pipelines on Spark over a stream, its journal or a coordination log.

Each is a module with `Settings`, `Report` and `run(spark, settings, say) -> Report` (see `interface`): `lake`, `audit`,
`parity`, `slo`, `skew`, `claims`. They need `keylane[spark]` and are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from types import ModuleType

PIPELINES = ("audit", "claims", "lake", "parity", "skew", "slo")

__all__ = ["audit", "claims", "lake", "parity", "skew", "slo"]


def __getattr__(name: str) -> ModuleType:
    if name in PIPELINES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
