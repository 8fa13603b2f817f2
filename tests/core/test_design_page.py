"""Pages that follow the code: docs/DESIGN.md names every module of the package, docs/api.md its public names."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def named_modules(page: str) -> Iterator[str]:
    """The modules that the page lists, each below the heading of its package."""
    package = ""
    for line in page.split("## Packages and modules")[1].splitlines():
        if heading := re.match(r"### (?:`([a-z_]+)/`)?", line):
            package = f"{heading[1]}/" if heading[1] else ""
        elif row := re.match(r"\| `([a-z_/]+)` \| [^|\s]", line):
            yield package + row[1]


def test_the_page_names_every_module_once() -> None:
    package = ROOT / "src" / "keylane"
    there = [path.relative_to(package).with_suffix("") for path in package.rglob("*.py") if path.name != "__init__.py"]
    named = list(named_modules((ROOT / "docs" / "DESIGN.md").read_text(encoding="utf-8")))
    assert sorted(named) == sorted(map(str, there))


def test_a_module_that_is_not_listed_is_found() -> None:
    page = "## Packages and modules\n### `core/`\n| `lanes` | order |\n### Beside\n| `errors` | all |\n| `empty` | |\n"
    assert list(named_modules(page)) == ["core/lanes", "errors"]


def test_the_api_page_is_what_the_docstrings_say() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "api_page.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
