"""What an index shows about the package is complete and true."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_metadata_is_complete() -> None:
    assert PROJECT["description"].endswith("Every key its own ordered lane.")
    for name in (PROJECT["readme"], *PROJECT["license-files"], "src/keylane/py.typed"):
        assert (ROOT / name).is_file(), name
    assert PROJECT["license"] == "Apache-2.0"
    assert {"nats", "jetstream", "consumer-groups", "kafka"} <= set(PROJECT["keywords"])
    assert "urls" not in PROJECT, "there is no public address yet: do not invent one"


def test_the_classifiers_say_what_is_there() -> None:
    classifiers = PROJECT["classifiers"]
    assert classifiers == sorted(classifiers)
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in classifiers
    assert not any(one.startswith("License") for one in classifiers), "the license expression says it"
    assert ("Framework :: Pytest" in classifiers) == ("pytest11" in PROJECT["entry-points"])
    assert {"Framework :: AsyncIO", "Typing :: Typed", "Topic :: System :: Distributed Computing"} <= set(classifiers)
