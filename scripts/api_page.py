"""Writes docs/api.md from the docstrings of the public names: `python scripts/api_page.py [--check]`.

The public names of a module are those of its `__all__`. Of each the page has the signature and the whole docstring, and
of a class also its public methods and properties, with their first sentence.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
MODULES = (
    "keylane",
    "keylane.app",
    "keylane.groups",
    "keylane.fleet",
    "keylane.jetstream",
    "keylane.priority",
    "keylane.exactly_once",
    "keylane.journal",
    "keylane.marshal",
    "keylane.kafka",
    "keylane.spark",
    "keylane.overview",
    "keylane.autoscale",
    "keylane.metrics",
    "keylane.server",
    "keylane.testing",
)
LINE = 110
_PLAIN = (str, int, float, bool)
_HEAD = """\
# API

The public names of keylane, from their docstrings; `python scripts/api_page.py` writes this page. Names that are not
here may change in any version. Every error is a `KeylaneError` of `keylane.errors`.
"""


def page() -> str:
    parts = [_HEAD]
    for name in MODULES:
        module = importlib.import_module(name)
        parts.append(f"## {name}\n\n{_paragraph(module)}\n")
        public = [one for one in sorted(module.__all__, key=str.lower) if one[0] != "_"]
        parts.extend(section(module, one) for one in public if not inspect.ismodule(getattr(module, one)))
    return "\n".join(parts)


def section(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    title = f"### `{module.__name__}.{name}`\n"
    if not callable(value):
        return f"{title}\n`{value!r}`\n"
    body = inspect.getdoc(value) or "" if _own_docstring(value) else ""
    lines = [title, "```py", signature(name, value), "```", "", _text(body), ""]
    if inspect.isclass(value):
        lines += [f"- `{member}`: {first}" for member, first in members(value)] + [""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def signature(name: str, value: object) -> str:
    try:
        found = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return name
    parameters = [
        one.replace(annotation=_plain(one.annotation), default=_shown(one.default)) for one in found.parameters.values()
    ]
    plain = found.replace(parameters=parameters, return_annotation=_plain(found.return_annotation))
    start = ("async " if inspect.iscoroutinefunction(value) else "") + name
    line = f"{start}{plain}"
    if len(line) <= LINE or not parameters:
        return line
    shown, is_keyword = [], False
    for one in parameters:
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not is_keyword:
            shown.append("    *,")
            is_keyword = True
        shown.append(f"    {one},")
    return "\n".join([f"{start}(", *shown, f"){str(plain.replace(parameters=[]))[2:]}"])


class _Annotation(str):
    """Source text, which `inspect` shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(default: object) -> object:
    """A default, if it is a plain value: others may differ from one machine to the next."""
    is_plain = default is inspect.Parameter.empty or default is None or isinstance(default, (*_PLAIN, Enum))
    return default if is_plain or default == () else _Annotation("…")


def _plain(annotation: object) -> object:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def members(kind: type) -> Iterator[tuple[str, str]]:
    for name, value in sorted(vars(kind).items()):
        if name.startswith("_") or inspect.isclass(value):
            continue
        described = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        doc = inspect.getdoc(described) if callable(described) else None
        if doc:
            yield (name if isinstance(value, property) else f"{name}()"), doc.split("\n\n")[0].replace("\n", " ")


def _own_docstring(value: object) -> bool:
    """Whether somebody wrote it: dataclasses and named tuples make one from their fields."""
    doc = getattr(value, "__doc__", None) or ""
    return not re.match(rf"{getattr(value, '__name__', '')}\(.*\)( ->.*)?$", doc, re.DOTALL)


def _text(doc: str) -> str:
    """A docstring as Markdown: an example becomes a block."""
    lines, in_example = [], False
    for line in doc.splitlines():
        is_example = line.startswith((">>> ", "... ")) or (in_example and bool(line.strip()))
        if is_example != in_example:
            lines += ["```pycon" if is_example else "```"]
            in_example = is_example
        lines.append(line)
    return "\n".join([*lines, *(["```"] if in_example else [])])


def _paragraph(module: ModuleType) -> str:
    return (inspect.getdoc(module) or "").split("\n\n")[0]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if PAGE.read_text() == page() else "docs/api.md is out of date: run python scripts/api_page.py")
    PAGE.write_text(page())
