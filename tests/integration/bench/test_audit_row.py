"""The row `audit` at a small size: it fills, audits, watches memory, and draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import audit
from tests.peers.java import LIGHT_JAVA

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_small_journals_are_audited_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "SIZES", (2_000, 4_000))
    monkeypatch.setattr(audit, "KEYS", 50)
    for name, value in LIGHT_JAVA.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    figures, text = audit.run(1, 1.0, said.append, chart=tmp_path / "audit.png")
    sizes = figures["sizes"]
    assert isinstance(sizes, list)
    assert [one["records"] for one in sizes] == [2_000, 4_000]
    for one in sizes:
        assert one["seconds"] > 0
        assert one["jvm_mb"] > 50
        assert one["worker_mb"] > 10
    assert "| 4,000 |" in text
    if not any("no chart" in line for line in said):
        assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
