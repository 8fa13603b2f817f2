"""Loads public names at their first use, so that importing a package stays cheap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def loader(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package. `homes` maps each name to its module. A name is looked up once.

    A name whose home is the package itself is a module in it.
    """

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
