"""Makes `.venv` ready: `python3 scripts/setup.py demo|dev|test`, run by make.

demo: keylane and Spark; with `--without-spark`, and where Spark cannot be installed, keylane alone. dev: also the
tools and all extras. test: dev and the peers.
Does nothing where nothing changed. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PINS = "constraints.txt"
REQUIREMENTS = {
    "demo": ["--editable", "."],
    "demo-spark": ["--editable", ".[charts,fast,spark]"],
    "dev": ["--editable", ".[charts,fast,kafka,metrics,spark,sql,websocket]", "--group", "dev"],
}
WITH = {
    "demo": "",
    "demo-spark": " and Spark: a few minutes, once (make demo ARGS=--without-spark is quicker)",
    "dev": " with its tools and extras: a few minutes",
}
ENOUGH = {"demo": ("demo", "demo-spark", "dev"), "demo-spark": ("demo-spark", "dev"), "dev": ("dev",)}
"""What is installed when something else was asked for before."""
LARGE_BYTES = 30_000_000

_PROBE = """
import importlib.metadata, json, sys
try:
    pip = importlib.metadata.version("pip")
except importlib.metadata.PackageNotFoundError:
    pip = None
print(json.dumps({"python": list(sys.version_info[:2]), "pip": pip}))
"""


class SetupFailed(Exception):
    """Set-up cannot go on; the message is all the user needs to see."""


@dataclass(frozen=True)
class Environment:
    python: tuple[int, int]
    pip: str | None


def main(mode: str, *, with_spark: bool) -> int:
    with (ROOT / "pyproject.toml").open() as only_one_at_a_time:
        fcntl.flock(only_one_at_a_time, fcntl.LOCK_EX)
        if mode == "demo":
            prepare_demo(with_spark=with_spark)
        else:
            prepare("dev")
    if mode == "test":
        return subprocess.run([PYTHON, "-m", "tests.peers"], cwd=ROOT, check=False).returncode
    return 0


def prepare_demo(*, with_spark: bool) -> None:
    if with_spark:
        try:
            prepare("demo-spark")
        except SetupFailed as error:
            reasons = [line for line in str(error).splitlines() if line.startswith("ERROR:")]
            say(f"Spark cannot be installed here, so the demo runs without it ({reasons[-1] if reasons else error})")
        else:
            return
    prepare("demo")


def prepare(what: str) -> None:
    environment = look()
    if environment is None:
        create()
        environment = look()
        if environment is None:
            raise SetupFailed(f"{PYTHON} does not run although it was just made: remove .venv and try again.")
    stamp = expected_stamp(environment)
    if any(read(stamp_file(enough)) == stamp for enough in ENOUGH[what]):
        return
    for old in REQUIREMENTS:
        stamp_file(old).unlink(missing_ok=True)
    if environment.pip != pinned("pip"):
        say(f"installing pip {pinned('pip')}")
        run([PYTHON, "-m", "pip", "install", "--upgrade", "--constraint", PINS, "pip"])
    say(f"installing keylane{WITH[what]}")
    pins = ["--constraint", PINS, "--build-constraint", PINS]
    run([PYTHON, "-m", "pip", "install", "--progress-bar", "raw", *pins, *REQUIREMENTS[what]])
    stamp_file(what).write_text(stamp)


def look() -> Environment | None:
    """What `.venv` is, or None where it is absent, broken, moved here, or not the Python it was made with."""
    made_with = re.search(r"^version = (\d+)\.(\d+)", read(VENV / "pyvenv.cfg"), re.MULTILINE)
    if made_with is None or any(place != str(VENV) for place in recorded_places()):
        return None
    try:
        answer = subprocess.run([PYTHON, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
        facts = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    python = (facts["python"][0], facts["python"][1])
    if python != (int(made_with[1]), int(made_with[2])) or python < (3, 11):
        return None
    if os.environ.get("PYTHON") and python != sys.version_info[:2]:
        return None
    return Environment(python, facts["pip"])


def create() -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    say(f"making .venv with Python {version} ({sys.executable})")
    shutil.rmtree(VENV, ignore_errors=True)
    if importlib.util.find_spec("ensurepip") is not None:
        made = subprocess.run([sys.executable, "-m", "venv", VENV], capture_output=True, check=False)
        if made.returncode == 0:
            return
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", "--without-pip", VENV], capture_output=True, check=False
    )
    if made.returncode == 0:
        for pip in pips_of_the_machine():
            say("  this Python brings no pip: using the machine's")
            run([*pip, "--python", PYTHON, "install", "--constraint", PINS, "pip"])
            return
    shutil.rmtree(VENV, ignore_errors=True)
    raise SetupFailed(
        f"Python {version} has no pip to fill a virtual environment with: "
        "install it (Debian: apt install python3-venv) and run this again."
    )


def pips_of_the_machine() -> Iterator[list[str]]:
    """Every pip outside the environment that can install into another Python (22.3 and newer)."""
    commands = [
        [sys.executable, "-m", "pip"],
        *([found] for found in map(shutil.which, ("pip3", "pip")) if found),
    ]
    for command in commands:
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        version = re.match(r"pip (\d+)\.(\d+)", answer.stdout)
        if version is not None and (int(version[1]), int(version[2])) >= (22, 3):
            yield command


def run(command: list[str | Path]) -> None:
    """Runs pip, shows its progress in short lines, and all of its last words if it fails."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    quarters = 0
    with process:
        assert process.stdout is not None
        for line in map(str.strip, process.stdout):
            if progress := re.fullmatch(r"Progress (\d+) of (\d+)", line):
                done, total = int(progress[1]), int(progress[2])
                if total > LARGE_BYTES and 4 * done // total > quarters:
                    quarters = 4 * done // total
                    say(f"    {25 * quarters} %")
                continue
            lines.append(line)
            if line.startswith("Downloading "):
                quarters = 0
            if short := shortened(line):
                say(f"  {short}")
    if process.returncode != 0:
        raise SetupFailed("\n".join([*lines[-25:], "pip failed: see above."]))


def shortened(line: str) -> str:
    """What of a line of pip's is worth showing; empty for most."""
    if download := re.match(r"Downloading (?:\S*/)?([^-/]+)-([^-/]+?)(?:-\S*|\.tar\.gz) \(([\d.]+ [MG]B)\)", line):
        return f"downloading {download[1]} {download[2]}, {download[3]}"
    if building := re.match(r"Building wheel for (\S+) .*: started", line):
        return f"building {building[1]}"
    if line.startswith("Installing collected packages:"):
        return f"installing {line.count(',') + 1} packages"
    return line if line.startswith(("WARNING:", "ERROR:")) else ""


def expected_stamp(environment: Environment) -> str:
    digest = hashlib.sha256()
    for name in ("pyproject.toml", PINS):
        digest.update((ROOT / name).read_bytes())
    return json.dumps({"venv": str(VENV), "python": environment.python, "inputs": digest.hexdigest()})


def recorded_places() -> list[str]:
    """Where the environment stood when it was filled: a moved one still points to its old place."""
    return [json.loads(text)["venv"] for what in REQUIREMENTS if (text := read(stamp_file(what)))]


def stamp_file(what: str) -> Path:
    return VENV / f"keylane-{what}.stamp"


def pinned(package: str) -> str:
    found = re.search(rf"^{package}==(\S+)", read(ROOT / PINS), re.MULTILINE)
    if found is None:
        raise SetupFailed(f"{PINS} pins no {package}: run `make lock`.")
    return found[1]


def read(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] not in (["demo"], ["demo", "--without-spark"], ["dev"], ["test"]):
        sys.exit("usage: setup.py demo [--without-spark]|dev|test")
    try:
        sys.exit(main(sys.argv[1], with_spark="--without-spark" not in sys.argv))
    except SetupFailed as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted: run the same command again to go on.")
