"""The row `app`: every kind of payload handles the whole stream."""

from __future__ import annotations

from bench.app import BYTES, JOIN, run


def test_every_contestant_handles_all_messages() -> None:
    measured, text = run(1, 0.02, lambda _line: None)
    assert measured["count"] == 2000
    assert {JOIN, BYTES, "App, pydantic", "App, msgspec", "App, dataclass", "App, dict"} == set(measured["figures"])
    assert "of a plain join" in text
