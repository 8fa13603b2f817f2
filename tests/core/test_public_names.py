"""What `import keylane` offers: every public name at its first use, nothing before it, and nothing else in `dir()`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import is_dataclass
from importlib import import_module
from inspect import isfunction, signature

import pytest

import keylane

HEAVY = "'asyncio', 'contextlib', 'enum', 'nats', 'pyspark', 're', 'rich', 'typer', 'typing'"
MODULES = [name for name in keylane.__all__ if name.islower() and name not in ("connect", "publish", "run")]
WITH_ALL = ["keylane", *(f"keylane.{name}" for name in MODULES if name not in ("__version__", "errors", "streams"))]


def in_a_new_process(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def test_import_alone_loads_nothing_that_takes_time() -> None:
    report = f"import sys; before = set(sys.modules); import keylane; print({{{HEAVY}}} & (set(sys.modules) - before))"
    assert in_a_new_process(report) == "set()"


def test_packages_and_names_are_there_without_an_import_of_their_own() -> None:
    used = "keylane.groups.join, keylane.errors.NotFound, keylane.streams.create, keylane.Publisher, keylane.publish"
    program = f"import keylane; print(*(one.__name__ for one in ({used})))"
    assert in_a_new_process(program) == "join NotFound create Publisher publish"


@pytest.mark.parametrize("name", keylane.__all__)
def test_every_name_loads(name: str) -> None:
    assert getattr(keylane, name) is not None


@pytest.mark.parametrize("name", WITH_ALL)
def test_dir_shows_the_public_names_alone(name: str) -> None:
    module = import_module(name)
    assert dir(module) == sorted(module.__all__)


def test_the_number_of_partitions_and_the_key_have_one_name_in_python() -> None:
    """`max_members` and pairs of a filter and its wildcards are the words of records and of `cg`."""
    packages = [import_module(name) for name in WITH_ALL if name not in ("keylane", "keylane.spark", "keylane.kafka")]
    public = [getattr(one, name) for one in packages for name in dir(one)]
    called = [one for one in public if isfunction(one) or (isinstance(one, type) and is_dataclass(one))]
    assert keylane.groups.create_static in called
    assert [one for one in called if "max_members" in signature(one).parameters] == []
    fleet = keylane.fleet
    for function in (keylane.groups.create_elastic, fleet.hashed, fleet.discovered, keylane.App.handler):
        assert "PartitionBy | str" in signature(function).parameters["partition_by"].annotation


def test_dir_of_the_errors_and_of_the_streams_shows_them_alone() -> None:
    assert dir(keylane.streams) == sorted(keylane.streams.__all__)
    assert all(issubclass(getattr(keylane.errors, name), keylane.errors.KeylaneError) for name in dir(keylane.errors))
    assert "NotFound" in dir(keylane.errors)
