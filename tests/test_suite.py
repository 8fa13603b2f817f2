"""The division of the suite: which tests are long, what a worker takes next, and what the passes add up to."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.peers.store import REPOSITORY
from tests.suite import ALONE, LONG_FILES, SHARED_PEERS, next_file

KAFKA, SPARK = "tests/integration/kafka/test_kafka_", "tests/integration/spark/test_"
MOST_SPARK = SHARED_PEERS["integration/spark"]
PLAIN = "tests/integration/groups/test_a.py"
BROKER, BROKER_2, SESSION = KAFKA + "log.py", KAFKA + "cli.py", SPARK + "source_batch.py"
NO_SESSION = SPARK + "lease.py"


def script() -> ModuleType:
    """scripts/suite.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("suite_script", REPOSITORY / "scripts" / "suite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_pattern_of_long_files_matches_one() -> None:
    missing = [pattern for pattern in LONG_FILES if not list((REPOSITORY / "tests").glob(pattern))]
    assert missing == []


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        (set(), {}, BROKER),
        ({"integration/spark"}, {}, SESSION),
        (set(), {"integration/kafka": 1}, SESSION),
        (set(), {"integration/kafka": 1, "integration/spark": 1}, SESSION),
        (set(), {"integration/kafka": 1, "integration/spark": MOST_SPARK}, PLAIN),
        ({"integration/kafka"}, {"integration/spark": MOST_SPARK}, BROKER),
        ({"integration/spark"}, {"integration/kafka": 1, "integration/spark": MOST_SPARK - 1}, SESSION),
    ],
)
def test_a_worker_keeps_to_its_peers_and_leaves_others_theirs(
    own: set[str], others: dict[str, int], chosen: str
) -> None:
    assert next_file([BROKER, SESSION, PLAIN, BROKER_2], own, others) == chosen


def test_a_worker_without_other_work_helps_but_not_with_spark() -> None:
    others = {"integration/kafka": 1, "integration/spark": MOST_SPARK}
    assert next_file([SESSION, BROKER], set(), others) == BROKER
    assert next_file([SESSION], {"integration/kafka"}, others) is None
    assert next_file([SESSION], set(), {"integration/spark": MOST_SPARK - 1}) == SESSION


def test_spark_is_started_by_as_few_workers_as_wanted() -> None:
    others = {"integration/spark": 1}
    assert next_file([SESSION], set(), others, {**SHARED_PEERS, "integration/spark": 1}) is None
    assert next_file([SESSION], set(), others, {**SHARED_PEERS, "integration/spark": 2}) == SESSION


def test_a_file_of_spark_that_uses_no_session_is_for_everybody() -> None:
    others = {"integration/spark": MOST_SPARK}
    assert next_file([SESSION, NO_SESSION], set(), others) == NO_SESSION


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pytest that a test starts loads nothing but what it is given: it is quicker."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def pytest_on(directory: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_given.py").write_text(text)
    (directory / "conftest.py").write_text('pytest_plugins = ["tests.suite"]\n')
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={directory}", "-c", "/dev/null"]
    return subprocess.run(
        [*command, "--strict-markers", "-o", f"pythonpath={REPOSITORY}", *arguments, str(directory)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize("mark", ["long", "alone"])
def test_a_mark_without_a_reason_is_refused(tmp_path: Path, mark: str) -> None:
    done = pytest_on(tmp_path, f"import pytest\n@pytest.mark.{mark}\ndef test_one(): ...\n")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"test_one: say why, as in @pytest.mark.{mark}(" in done.stderr


def test_a_mark_that_the_suite_would_not_find_is_refused(tmp_path: Path) -> None:
    done = pytest_on(tmp_path, "from pytest import mark\n@mark.alone('measures')\ndef test_one(): ...\n")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"test_one: write {ALONE} in its file" in done.stderr


def test_all_files_with_tests_that_measure_time_are_found() -> None:
    found = {Path(file).relative_to(REPOSITORY).as_posix() for file in script().alone()}
    assert "tests/integration/jetstream/test_awake.py" in found
    assert "tests/core/test_pin.py" not in found


def test_a_slow_test_without_the_mark_is_named(tmp_path: Path) -> None:
    text = """
import pytest, time, tests.suite
tests.suite.SLOW_S = 0.05
def test_slow(): time.sleep(0.1)
@pytest.mark.long("sleeps")
def test_marked(): time.sleep(0.1)
def test_quick(): ...
"""
    done = pytest_on(tmp_path, text)
    named = [line for line in done.stdout.splitlines() if line.startswith("took ")]
    assert named == ['took 0 s without @pytest.mark.long("why"): test_given.py::test_slow']


def test_a_test_is_compiled_until_it_changes(tmp_path: Path) -> None:
    is_compiled = script().is_compiled
    file = tmp_path / "test_one.py"
    file.write_text("")
    assert not is_compiled(file)
    (tmp_path / "__pycache__").mkdir()
    kept = tmp_path / "__pycache__" / f"test_one.{sys.implementation.cache_tag}-pytest-9.0.0.pyc"
    kept.write_bytes(b"")
    assert is_compiled(file)
    os.utime(file, (time.time() + 60, time.time() + 60))
    assert not is_compiled(file)


Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run scripts/suite.py on a pass for each text; gives its exit code and what it printed."""

    def suite_on(texts: list[str], *arguments: str) -> tuple[int, list[str]]:
        suite = script()
        passes = []
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.suite"]\n')
        for number, text in enumerate(texts):
            file = tmp_path / f"test_{number}.py"
            file.write_text(text)
            passes.append(suite.Pass(f"pass {number}", [str(file), "-p", "no:cacheprovider"], parallel=False))
        monkeypatch.setitem(suite.SUITES, "test", passes)
        return suite.main([*arguments, "test"]), capfd.readouterr().out.splitlines()

    return suite_on


@pytest.mark.parametrize(
    ("texts", "last", "code"),
    [
        (["def test_a(): ...", "def test_b(): ...\ndef test_c(): ..."], "3 passed, 0 failed, 0 skipped", 0),
        (["def test_a(): assert 0", "def test_b(): ..."], "1 passed, 1 failed, 0 skipped", 1),
        (["def test_a(): ...", "# nothing here"], "1 passed, 0 failed, 0 skipped", 0),
        (["# nothing here", "# nothing here"], "0 passed, 0 failed, 0 skipped", 1),
        (["this is no Python", "import pytest\ndef test_b(): pytest.skip()"], "0 passed, 1 failed, 1 skipped", 1),
        (["import os\ndef test_a(): os._exit(3)", "def test_b(): ..."], "1 passed, 0 failed, 0 skipped", 1),
    ],
    ids=["good", "one fails", "one is empty", "all are empty", "no Python", "pytest dies"],
)
def test_all_passes_run_and_are_added_up(run: Run, texts: list[str], last: str, code: int) -> None:
    ended, said = run(texts)
    assert said[-2].startswith("took 0 min ")
    assert said[-1] == last
    assert ended == code


def test_what_failed_before_the_tests_counts(run: Run) -> None:
    ended, said = run(["def test_a(): ..."], "--failed", "lint or types")
    assert ended == 1
    assert said[-3] == "FAILED lint or types"
    assert said[-1] == "1 passed, 0 failed, 0 skipped"
