"""Loads public names at their first use, so that importing a package stays cheap.

`import keylane` imports this module, so it imports nothing itself: `typing` alone takes longer than Python's start.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from types import ModuleType, TracebackType
    from typing import Any


def loader(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package. `homes` maps each name to its module. A name is looked up once.

    A name whose home is the package itself is a module in it.
    """

    def load(name: str) -> object:
        from importlib import import_module

        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


def public_names(names: Collection[str]) -> Callable[[], list[str]]:
    """The `__dir__` of a module: its public names and nothing that it imports for itself."""
    return lambda: sorted(names)


def load_when_used(name: str) -> ModuleType | None:
    """Let `import` of a module succeed at once, and load it when something in it is used.

    Returns what stands for the module; None if it is loaded already, or not installed.

    `importlib.util.LazyLoader` does not do: in Python 3.11 an `import` of such a module loads it.
    """
    import importlib.util
    from types import ModuleType

    spec = importlib.util.find_spec(name)
    if name in sys.modules or spec is None:
        return None
    placeholder = ModuleType(name)
    placeholder.__spec__ = spec

    def look_up(attribute: str) -> Any:
        if sys.modules.get(name) is placeholder:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    placeholder.__getattr__ = look_up  # type: ignore[method-assign]
    sys.modules[name] = placeholder
    return placeholder


class deferred:  # noqa: N801 - used as a function: `with deferred("aiohttp"):`
    """What is imported in the block gets a module that loads itself when it is used; others then import it as usual."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._placeholder = load_when_used(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._placeholder is not None and sys.modules.get(self._name) is self._placeholder:
            del sys.modules[self._name]
