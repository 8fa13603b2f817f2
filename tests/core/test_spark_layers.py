"""Driver, executor and sink of the Spark source meet only in modules that they share.

Read from source text, so that nothing of Spark has to be installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

SPARK = Path(__file__).parents[2] / "src" / "keylane" / "spark"
PARTS = ("driver", "executor", "sink")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def crossings(paths: Iterable[Path], others: tuple[str, ...]) -> list[str]:
    prefixes = tuple(f"keylane.spark.{other}." for other in others)
    return [
        f"{path.name}:{line}: {module}"
        for path in sorted(paths)
        for line, module in imported(path)
        if f"{module}.".startswith(prefixes)
    ]


@pytest.mark.parametrize("part", PARTS)
def test_no_part_imports_another(part: str) -> None:
    modules = list((SPARK / part).glob("*.py"))
    assert len(modules) > 1, "there is nothing to look at"
    assert crossings(modules, (*(other for other in PARTS if other != part), "pipelines", "source")) == []


def test_what_the_parts_share_imports_none_of_them() -> None:
    """`source` wires the parts together, and `key_order` asks the driver's part how a stream is split."""
    shared = [path for path in SPARK.glob("*.py") if path.stem not in ("source", "key_order")]
    assert SPARK / "tasks.py" in shared
    assert crossings(shared, (*PARTS, "pipelines")) == []


def test_pipelines_read_and_write_through_the_source() -> None:
    assert crossings((SPARK / "pipelines").glob("*.py"), ("executor", "sink")) == []


@pytest.mark.parametrize(
    "line",
    [
        "from keylane.spark.driver.lease import Lease",
        "from keylane.spark.driver import lease",
        "from keylane.spark import driver",
        "import keylane.spark.driver.lease",
        "def f():\n    from keylane.spark.driver.lease import Lease",
    ],
)
def test_every_way_to_import_is_seen(tmp_path: Path, line: str) -> None:
    module = tmp_path / "reader.py"
    module.write_text(line)
    assert len(crossings([module], ("driver", "sink"))) == 1
    assert crossings([module], ("executor", "sink")) == []


def test_an_import_within_a_function_is_seen() -> None:
    """The source wires the parts together, late: the same look must find that."""
    found = [module for _, module in imported(SPARK / "source.py")]
    assert any(module.startswith("keylane.spark.executor.") for module in found)
