"""What an error says about a name that does not exist."""

from __future__ import annotations

import pytest

from keylane.core.name_suggestions import name_missing, similar_name


@pytest.mark.parametrize(
    ("name", "existing", "meant"),
    [
        ("ORDRES", ["REFUNDS", "ORDERS"], "ORDERS"),
        ("orders", ["ORDERS", "REFUNDS"], "ORDERS"),
        ("Grösse", ["Größe", "ORDERS"], "Größe"),
        ("X", ["ORDERS"], None),
        ("X", [], None),
    ],
)
def test_the_name_that_was_probably_meant(name: str, existing: list[str], meant: str | None) -> None:
    assert similar_name(name, existing) == meant


def test_names_are_listed_sorted_and_not_all_of_many() -> None:
    assert name_missing("there is no stream 'X'", "X", []) == "there is no stream 'X'; there is: none"
    many = name_missing("there is no stream 'X'", "X", [f"S{number:02}" for number in range(12, 0, -1)])
    assert many.endswith("; there is: S01, S02, S03, S04, S05, S06, S07, S08, S09, S10 and 2 more")
