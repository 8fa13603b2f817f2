"""How the suite is divided and run, as a pytest plugin: marks, work units of parallel workers, slow tests, counts.

Owns the marks `long` and `alone`, the rules that give them to whole directories, and what pytest prints at the end.
Never starts a peer (tests/peers does) and never chooses what runs: scripts/suite.py does, by these marks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

LONG_DIRECTORIES = {
    "integration/bench": "runs a benchmark",
}
"""Every test below these is long, without a mark of its own."""
SLOW_S = 20.0
"""A test that takes longer carries the mark `long`."""
SLOWEST_SHOWN = 15

_MARKS = ("long", "alone")


# ---- marks ------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long(reason): not part of `make test`, but of `make test-long`")
    config.addinivalue_line("markers", "alone(reason): measures time; never runs beside other tests")
    config.pluginmanager.register(Durations(), "keylane-durations")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for directory, reason in LONG_DIRECTORIES.items():
            if item.path.is_relative_to(config.rootpath / "tests" / directory):
                item.add_marker(pytest.mark.long(reason))
        for mark in item.iter_markers():
            if mark.name in _MARKS and not (mark.args and isinstance(mark.args[0], str)):
                raise pytest.UsageError(f'{item.nodeid}: say why, as in @pytest.mark.{mark.name}("kills ten drivers")')


# ---- parallel workers -------------------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Workers are given whole files, so that fixtures of modules and sessions are made as seldom as possible."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # noqa: PLC0415 - only where used

    if config.getoption("dist") != "loadfile":
        return None

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            return work_unit(nodeid)

    return Scheduling(config, log)


def work_unit(nodeid: str) -> str:
    """What a worker is given at once: a file."""
    return nodeid.partition("::")[0]


# ---- the end ----------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--counts", type=Path, help="write the outcomes to this file, as JSON, for scripts/suite.py")


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
