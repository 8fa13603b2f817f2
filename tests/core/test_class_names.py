"""One public class name is defined once in the whole package, so that it has one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "keylane"

FAMILIES = {
    "Report": {"PipelineReport", "FindingsReport"},
    "Settings": {"PipelineSettings", "GroupSettings", "JournalSettings"},
}
"""Each pipeline has its own, below these base classes."""


def public_classes(files: Iterable[Path]) -> dict[str, list[str]]:
    """The modules that define each public class, without members of families."""
    defined: dict[str, list[str]] = defaultdict(list)
    for path in sorted(files):
        for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if not bases & FAMILIES.get(node.name, set()):
                defined[node.name].append(str(path))
    return defined


def test_each_public_class_name_is_defined_once() -> None:
    defined = public_classes(PACKAGE.rglob("*.py"))
    assert "World" in defined
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}


def test_a_name_that_is_defined_twice_is_found(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("class Claim: ...\nclass _Own: ...\nclass Report(PipelineReport): ...\n", encoding="utf-8")
    other.write_text("class Claim: ...\nclass _Own: ...\nclass Report: ...\n", encoding="utf-8")
    assert public_classes([one, other]) == {"Claim": [str(one), str(other)], "Report": [str(other)]}
