"""The `spark-submit` command for a program that uses keylane: its arguments, and what is refused.

Owns the rules for master, deploy mode, Python and settings. Pure: looks at no file, starts nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from keylane.errors import InvalidInput
from keylane.spark.address import check_argument, check_setting, without_value

ENVIRONMENT = "environment"
"""Where Spark unpacks the archive, below the directory that an executor runs in."""

_LOCAL = re.compile(r"local(\[(\*|\d+)(\s*,\s*\d+)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]")
_STANDALONE = re.compile(r"spark://[^\s,:/]+:\d+(,[^\s,:/]+:\d+)*")
_KUBERNETES = re.compile(r"k8s://\S+")
_YARN = "yarn"
_FORMS = "local, local[N], local[*], local-cluster[N,CORES,MB], spark://HOST:PORT, yarn or k8s://URL"

_ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_PYTHON = "spark.pyspark.python"
_DRIVER_PYTHON = "spark.pyspark.driver.python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What the user asked for. Files may be addresses that Spark understands, such as hdfs:// or local://."""

    app: str
    arguments: tuple[str, ...] = ()
    master: str = "local[*]"
    deploy_mode: str = "client"
    env: str | None = None
    name: str | None = None
    conf: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to submit with: Spark, Java and the Python that runs the driver."""

    spark_home: str
    java_home: str
    python: str
    workers_python: str | None = None
    """What PYSPARK_PYTHON says, if anything."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. `stand_in` is a file that must be there while it runs: its path, relative, and its text."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    stand_in: tuple[str, str] | None = None

    def shell(self) -> str:
        """The same for a shell, ready to be copied."""
        lines = []
        if self.stand_in is not None:
            path, text = self.stand_in
            lines.append(f"mkdir -p {shlex.quote(str(Path(path).parent))}")
            lines.append(f"printf %s {shlex.quote(text)} > {shlex.quote(path)} && chmod +x {shlex.quote(path)}")
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines.append(" \\\n  ".join([*settings, *_in_pairs(self.arguments)]))
        return "\n".join(lines)


def build(asked: Submission, machine: Machine, *, environment: str = ENVIRONMENT) -> Command:
    """The command for a submission; `InvalidInput` for one that cannot work or would show a secret.

    `environment` names the directory of the unpacked archive. In client mode a file stands in for its Python beside the
    driver: Spark starts the same `./environment/bin/python` there to plan reads, and unpacks nothing there.
    """
    _check_master(asked)
    conf = [_checked_setting(text) for text in asked.conf]
    _check_arguments(asked.arguments)
    chosen = dict(conf)
    stand_in = None
    pythons: list[tuple[str, str]] = []
    if asked.env is not None:
        if clash := {_PYTHON, _DRIVER_PYTHON} & chosen.keys():
            raise InvalidInput(f"--env decides which Python runs: leave out --conf {min(clash)}")
        packed = f"./{environment}/bin/python"
        pythons.append((_PYTHON, packed))
        if asked.deploy_mode == "client":
            pythons.append((_DRIVER_PYTHON, machine.python))
            stand_in = (packed, f'#!/bin/sh\nexec {shlex.quote(machine.python)} "$@"\n')
    elif _PYTHON not in chosen:
        pythons.append((_PYTHON, _python_without_env(asked, machine)))
        if asked.deploy_mode == "client" and _DRIVER_PYTHON not in chosen:
            pythons.append((_DRIVER_PYTHON, machine.python))
    arguments = [f"{machine.spark_home}/bin/spark-submit", "--master", asked.master, "--deploy-mode", asked.deploy_mode]
    arguments += ["--name", asked.name or Path(asked.app).stem]
    if asked.env is not None:
        arguments += ["--archives", f"{_whole('--env', asked.env)}#{environment}"]
    if asked.files:
        arguments += ["--files", ",".join(_whole("--files", file) for file in asked.files)]
    for name, value in [*pythons, *conf]:
        arguments += ["--conf", f"{name}={value}"]
    settings = {"JAVA_HOME": machine.java_home, "SPARK_HOME": machine.spark_home}
    return Command((*arguments, asked.app, *asked.arguments), settings, stand_in)


def is_elsewhere(path: str) -> bool:
    """Whether it is an address, which only Spark can look at."""
    return _ELSEWHERE.match(path) is not None


def _check_master(asked: Submission) -> None:
    master = asked.master
    local = _LOCAL.fullmatch(master) is not None
    one_machine = local or _LOCAL_CLUSTER.fullmatch(master) is not None
    standalone = _STANDALONE.fullmatch(master) is not None
    if not (one_machine or standalone or master == _YARN or _KUBERNETES.fullmatch(master)):
        raise InvalidInput(f"--master {master!r} is not one of {_FORMS}")
    if asked.deploy_mode not in ("client", "cluster"):
        raise InvalidInput(f"--deploy-mode {asked.deploy_mode!r} must be client or cluster")
    if asked.deploy_mode == "cluster" and (one_machine or standalone):
        raise InvalidInput(
            f"--deploy-mode cluster with master {master} is nothing that Spark can do for Python programs: "
            "leave it out, or use yarn or k8s://"
        )
    if local and asked.env is not None:
        raise InvalidInput(f"--env is for executors, and with master {master} there are none: leave it out")


def _python_without_env(asked: Submission, machine: Machine) -> str:
    if machine.workers_python is not None:
        return machine.workers_python
    if asked.master.startswith("local"):
        return machine.python
    raise InvalidInput(
        f"executors of {asked.master} need a Python with keylane: give --env (see `keylane spark pack`), "
        f"or say which one they have with --conf {_PYTHON}=PATH"
    )


def _checked_setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise InvalidInput(f"--conf {without_value(text)!r} must be of the form spark.NAME=VALUE")
    check_setting("--conf", name, value)
    return name, value


def _check_arguments(arguments: Sequence[str]) -> None:
    for number, (before, argument) in enumerate(pairwise(("", *arguments)), start=1):
        check_argument(f"argument {number} of the program", argument, before)


def _whole(option: str, file: str) -> str:
    if "," in file:
        raise InvalidInput(f"{option} {file!r} has a comma, at which Spark would cut it: rename the file")
    return file


def _in_pairs(arguments: Sequence[str]) -> list[str]:
    """Options with their values, quoted, one pair to a line; the program and its arguments on the last."""
    lines = [shlex.quote(arguments[0])]
    place = 1
    while place < len(arguments) and arguments[place].startswith("--"):
        lines.append(f"{arguments[place]} {shlex.quote(arguments[place + 1])}")
        place += 2
    return [*lines, shlex.join(arguments[place:])]
