"""How the suite is divided and run, as a pytest plugin: marks, order, parallel workers, slow tests, counts.

Owns the marks `long` and `alone`, the rules that give them to whole files, and what pytest prints at the end.
Never starts a peer (tests/peers does) and never chooses what runs: scripts/suite.py does, by these marks.
"""

from __future__ import annotations

import gc
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LONG_FILES = {
    "integration/bench/*": "runs benchmarks",
    "integration/chaos/test_chaos_groups.py": "causes faults for tens of seconds",
    "integration/chaos/test_chaos_short.py": "causes faults for tens of seconds",
    "integration/cli/test_examples.py": "runs whole examples, which test_programs starts too",
    "integration/exactly_once/test_example.py": "runs a whole example, which test_programs starts too",
    "integration/kafka/test_kafka_chaos.py": "causes faults for tens of seconds",
    "integration/kafka/test_kafka_failures.py": "kills brokers of a cluster of three",
    "integration/kafka/test_kafka_refused.py": "starts a broker of its own with logins, freezes and restarts it",
    "integration/kafka/test_kafka_secure.py": "starts a broker of its own with TLS",
    "integration/priority/test_disruption.py": "kills nodes and moves leaders of a cluster under load",
    "integration/spark/test_audit_rules.py": "judges random histories on Spark",
    "integration/spark/test_cluster_*.py": "starts clusters of Spark",
    "integration/spark/test_hot_standby.py": "kills drivers, each with a Spark of its own",
    "integration/spark/test_packing.py": "packs and unpacks a whole environment",
    "integration/spark/test_pipeline_*.py": "runs pipelines on large streams",
    "integration/spark/test_reading_lag.py": "restarts replicas of a cluster under a read",
    "integration/spark/test_reading_trouble.py": "waits for deadlines of a read, by each way to read",
    "integration/spark/test_sink_trouble.py": "stops servers under a write, by each way to write",
}
"""Every test in these files is long, without a mark of its own. Paths are relative to tests/."""
LONG_OUTSIDE_SPARK = "starts a Spark of its own"
"""Why a test with the mark `spark` is long where it cannot share the session of integration/spark."""
SLOW_S = 20.0
"""A test that takes longer carries the mark `long`."""
SLOWEST_SHOWN = 15
PROGRESS_S = 15.0
"""How often a parallel run says how far it is."""
SPARK = "integration/spark"
SHARED_PEERS = {"integration/kafka": 1, SPARK: max(2, os.cpu_count() or 1), "integration/exactly_once": 1}
"""Directories whose tests share a peer that is expensive to start, and how many workers start one for themselves.

A worker without other work helps with all but Spark: it computes more than it waits, so one for each core is enough.
`--spark-sessions` says how many there are. Files that use no session are for any worker.
"""
USES_SESSION = re.compile(r"\bspark: SparkSession\b|\bshared_spark\b")

ALONE = "pytest.mark.alone("
_ROOT = Path(__file__).resolve().parent.parent
_MARKS = ("long", "alone")
_FIRST, _LAST = ("core", "properties"), ("integration",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--counts", type=Path, help="write the outcomes to this file, as JSON, for scripts/suite.py")
    parser.addoption(
        "--spark-sessions", type=int, default=SHARED_PEERS[SPARK], help="how many parallel workers start a Spark"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long(reason): not part of `make test`, but of `make test-long`")
    config.addinivalue_line("markers", "alone(reason): measures time; never runs beside other tests")
    config.pluginmanager.register(Durations(), "keylane-durations")
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Progress(), "keylane-progress")
    # readline sets these for children alone, so parallel workers get them; terminals of tests have sizes of their own.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


# ---- marks and order --------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        where = _inside_tests(item.path, config.rootpath)
        if (reason := _why_long(item, where)) is not None:
            item.add_marker(pytest.mark.long(reason))
        for mark in item.iter_markers():
            if mark.name in _MARKS and not (mark.args and isinstance(mark.args[0], str)):
                raise pytest.UsageError(f'{item.nodeid}: say why, as in @pytest.mark.{mark.name}("kills ten drivers")')
            if mark.name == "alone" and ALONE not in item.path.read_text():
                raise pytest.UsageError(f"{item.nodeid}: write {ALONE} in its file: scripts/suite.py looks for that")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        items.sort(key=lambda item: _rank(_inside_tests(item.path, config.rootpath)))
        return
    on_spark = Counter(item.path for item in items if "spark" in getattr(item, "fixturenames", ()))
    items.sort(key=lambda item: (_rank_in_parallel(_inside_tests(item.path, config.rootpath)), -on_spark[item.path]))


def pytest_collection_finish() -> None:
    """What is collected stays until the end: nobody need look through it for garbage."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.collect()
        gc.freeze()


def _why_long(item: pytest.Item, where: str) -> str | None:
    if (reason := why_file_is_long(where)) is not None:
        return reason
    if item.get_closest_marker("spark") is not None and not where.startswith("integration/spark/"):
        return LONG_OUTSIDE_SPARK
    return None


@cache
def why_file_is_long(where: str) -> str | None:
    return next((reason for pattern, reason in LONG_FILES.items() if fnmatch(where, pattern)), None)


@cache  # thousands of tests are in hundreds of files
def _inside_tests(file: Path, root: Path) -> str:
    return file.relative_to(root / "tests").as_posix() if file.is_relative_to(root / "tests") else ""


def _rank(where: str) -> int:
    """One after the other, what is quick runs first: what is wrong shows early."""
    directory = where.partition("/")[0]
    if directory in _FIRST:
        return _FIRST.index(directory) - len(_FIRST)
    return 1 + _LAST.index(directory) if directory in _LAST else 0


def _rank_in_parallel(where: str) -> int:
    """In parallel, what takes long runs first: short tests fill the gaps at the end.

    Of two files with the same rank, the one with more tests that need a Spark session runs first.
    """
    shared = [number for number, directory in enumerate(SHARED_PEERS) if where.startswith(directory)]
    return shared[0] if shared else len(SHARED_PEERS) - _rank(where)


# ---- parallel workers -------------------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """`--dist loadfile`, but a worker that has started a shared peer goes on with the files that use it."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # noqa: PLC0415 - only where used

    if config.getoption("dist") != "loadfile":
        return None
    limits = SHARED_PEERS | {SPARK: config.getoption("spark_sessions")}

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
        peers: dict[Any, set[str]]

        def _assign_work_unit(self, node: Any) -> None:
            if not hasattr(self, "peers"):
                self.peers = {}
            own = self.peers.setdefault(node, set())
            others = Counter(peer for other, held in self.peers.items() if other in self.nodes for peer in held - own)
            chosen = next_file(list(self.workqueue), own, others, limits)
            if chosen is None:
                node.shutdown()
                return
            own |= {peer_of(chosen)} - {""}
            self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


def next_file(
    waiting: list[str], own: set[str], others: Mapping[str, int], limits: Mapping[str, int] = SHARED_PEERS
) -> str | None:
    """The file for a worker with these peers of its own, where so many other workers have each peer, and so many may.

    None: all that is left needs a Spark, of which enough others have one.
    """

    def first(peers: Callable[[str], bool]) -> str | None:
        return next((file for file in waiting if peers(peer_of(file))), None)

    goes_on = first(lambda peer: peer in own)
    is_new = first(lambda peer: peer != "" and others.get(peer, 0) < limits[peer])
    needs_none = first(lambda peer: peer == "")
    return goes_on or is_new or needs_none or first(lambda peer: peer != SPARK)


@cache
def peer_of(file: str) -> str:
    peer = next((one for one in SHARED_PEERS if file.startswith(f"tests/{one}/")), "")
    return "" if peer == SPARK and not USES_SESSION.search((_ROOT / file).read_text()) else peer


class Progress:
    """A line every few seconds instead of thousands of dots, and a line for each failure when it happens."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()
        self._done = self._failed = 0
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, Any, Any]:
        category, _, word = yield
        return category, "", word

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._done += report.when == "teardown"
        if report.failed:
            self._failed += 1
            self._tell(f"FAILED {report.nodeid} ({report.when})")
        if time.monotonic() - self._told >= PROGRESS_S:
            self._tell_progress()

    def _tell_progress(self) -> None:
        self._told = time.monotonic()
        assert self._session is not None
        minutes, seconds = divmod(round(self._told - self._began), 60)
        self._tell(f"{minutes:3}:{seconds:02}  {self._done} of {self._session.testscollected}, {self._failed} failed")

    def _tell(self, line: str) -> None:
        assert self._session is not None
        reporter = self._session.config.pluginmanager.getplugin("terminalreporter")
        assert reporter is not None
        reporter.ensure_newline()
        reporter.write_line(line)


# ---- the end ----------------------------------------------------------------------------------------------


class Durations:
    """Adds up what each test took, and names at the end the slowest and those that lack the mark `long`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._call_seconds: dict[str, float] = {}
        self._long: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.when == "call":
            self._call_seconds[report.nodeid] = report.duration
        if "long" in report.keywords:
            self._long.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        for line in self._lines():
            terminalreporter.write_line(line)
        if (file := config.getoption("counts")) is not None:
            file.write_text(json.dumps(_counts(terminalreporter)))

    def _lines(self) -> Iterator[str]:
        slowest = sorted(self._seconds.items(), key=lambda one: -one[1])[:SLOWEST_SHOWN]
        if len(self._seconds) > SLOWEST_SHOWN:
            yield f"slowest {SLOWEST_SHOWN} of {len(self._seconds)} tests, with their fixtures:"
            yield from (f"{seconds:8.1f} s  {nodeid}" for nodeid, seconds in slowest)
        for nodeid, seconds in self._call_seconds.items():
            if seconds > SLOW_S and nodeid not in self._long:
                yield f'took {seconds:.0f} s without @pytest.mark.long("why"): {nodeid}'


def _counts(reporter: pytest.TerminalReporter) -> dict[str, object]:
    def of(*kinds: str) -> list[str]:
        return [getattr(report, "nodeid", "?") for kind in kinds for report in reporter.stats.get(kind, [])]

    return {
        "passed": len(of("passed", "xpassed")),
        "failed": of("failed", "error"),
        "skipped": len(of("skipped", "xfailed")),
    }
