"""Driver, executor and sink of the Spark source meet only in modules that they share.

Read from source text, so that nothing of Spark has to be installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SPARK = Path(__file__).parents[2] / "src" / "keylane" / "spark"
PARTS = ("driver", "executor", "sink")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def crossings(directory: Path, others: tuple[str, ...]) -> list[str]:
    prefixes = tuple(f"keylane.spark.{other}." for other in others)
    return [
        f"{path.relative_to(SPARK)}:{line}: {module}"
        for path in sorted(directory.rglob("*.py"))
        for line, module in imported(path)
        if f"{module}.".startswith(prefixes)
    ]


@pytest.mark.parametrize("part", PARTS)
def test_no_part_imports_another(part: str) -> None:
    assert list((SPARK / part).glob("*.py")), "there is nothing to look at"
    assert crossings(SPARK / part, tuple(other for other in PARTS if other != part)) == []


def test_pipelines_read_and_write_through_the_source() -> None:
    assert crossings(SPARK / "pipelines", ("executor", "sink")) == []


def test_an_import_within_a_function_is_seen() -> None:
    """The source wires the parts together, late: the same look must find that."""
    found = [module for _, module in imported(SPARK / "source.py")]
    assert any(module.startswith("keylane.spark.executor.") for module in found)
