"""The row `start`: what a new process costs before it does anything."""

from __future__ import annotations

from bench.start import AIMS, run


def test_import_and_help_stay_within_their_aims() -> None:
    """By the CPU time, which other work on the machine hardly changes."""
    measured, text = run(1, 0.8, lambda line: None)
    found = {row["program"]: row for row in measured["programs"]}
    assert found["python -c pass"]["ratio"] == 1.0
    for program, aim in AIMS.items():
        assert found[program]["cpu_ratio"] <= aim, text
