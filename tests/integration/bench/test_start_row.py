"""The row `start`: what a new process costs before it does anything."""

from __future__ import annotations

from bench.start import AIMS, run


def test_import_and_help_stay_near_their_aims() -> None:
    """The aims are for a calm machine; `test_cli_start` and `test_public_names` say what may be loaded."""
    measured, text = run(1, 0.3, lambda line: None)
    found = {row["program"]: row for row in measured["programs"]}
    assert found["python -c pass"]["ratio"] == 1.0
    for program, aim in AIMS.items():
        assert found[program]["cpu_ratio"] <= 2 * aim, text
