"""README and every page of docs, done from top to bottom as a reader would: it runs and prints what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.docs.pages import PAGES, Command, steps
from tests.integration.docs.reader import reader

NOT_YET = {
    page
    for page in PAGES
    if page.startswith(("docs/spark", "docs/pipelines"))
    or page
    in (
        "docs/marshal.md",
        "docs/tutorial.md",
        "docs/migrating/per-partition-consumers.md",
        "docs/migrating/kafka.md",
        "docs/priority/index.md",
    )
}
MANY = 10
pytestmark = pytest.mark.timeout(180)


def parameter(page: str) -> Any:
    """A page with many commands takes as long as they take to start."""
    commands = [step for step in steps(page) if isinstance(step, Command)]
    return pytest.param(
        page, marks=[pytest.mark.long(f"runs {len(commands)} commands")] if len(commands) > MANY else []
    )


@pytest.mark.parametrize("page", [parameter(page) for page in PAGES if page not in NOT_YET])
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    with reader(tmp_path) as person:
        for step in steps(page):
            person.take(step)
        person.finish()
