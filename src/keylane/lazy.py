"""Loads public names at their first use, so that importing a package stays cheap."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


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


def load_when_used(name: str) -> ModuleType | None:
    """Let `import` of a module succeed at once, and load it when something in it is used.

    Returns what stands for the module; None if it is loaded already, or not installed.

    `importlib.util.LazyLoader` does not do: in Python 3.11 an `import` of such a module loads it.
    """
    spec = importlib.util.find_spec(name)
    if name in sys.modules or spec is None:
        return None
    placeholder = ModuleType(name)
    placeholder.__spec__ = spec

    def look_up(attribute: str) -> Any:
        if sys.modules.get(name) is placeholder:
            del sys.modules[name]
        return getattr(import_module(name), attribute)

    placeholder.__getattr__ = look_up  # type: ignore[method-assign]
    sys.modules[name] = placeholder
    return placeholder


@contextmanager
def deferred(name: str) -> Iterator[None]:
    """What is imported in the block gets a module that loads itself when it is used; others then import it as usual."""
    placeholder = load_when_used(name)
    try:
        yield
    finally:
        if placeholder is not None and sys.modules.get(name) is placeholder:
            del sys.modules[name]
