"""A Python environment in one archive, for the executors of a Spark cluster: `--archives env.tar.gz#environment`.

Owns the archive's layout, its `bin/python` and the note that says what is inside. The packages are copied as they are
installed here, so workers need the same kind of machine; and the same Python, unless the archive brings it along.
Spark itself is not inside: an executor has the cluster's.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shlex
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from keylane.errors import InvalidInput
from keylane.spark.cluster.packages import choose

ENDINGS = (".tar.gz", ".tgz")
NOTE = "keylane-environment.json"
_LEVEL = 1
_NOTE_LIMIT = 100_000
_BUNDLED = "python"
_STDLIB_UNUSED = ("test/", "idlelib/", "lib2to3/", "tkinter/", "turtledemo/", "ensurepip/", "site-packages/", "config-")

_LAUNCHER = """\
#!/bin/sh
# Runs Python {python} with the packages of this environment. KEYLANE_PYTHON names one explicitly.
root=$(cd "$(dirname "$0")/.." && pwd) || exit 1
if [ "$(uname -sm)" != {machine} ]; then
    echo "keylane: this environment was packed on" {machine}", and this is $(uname -sm): pack it on such a machine" >&2
    exit 1
fi
{library}for python in {candidates}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != ({version}))' 2>/dev/null; then
        PYTHONPATH="$root/lib/site-packages${{PYTHONPATH:+:$PYTHONPATH}}"
        export PYTHONPATH
        exec "$python" "$@"
    fi
done
echo "keylane: $(uname -n) has no Python {python}, which this environment was packed with: install it there," \\
    "or set KEYLANE_PYTHON to one, or pack with --interpreter" >&2
exit 1
"""


@dataclass(frozen=True, slots=True)
class Note:
    """What an archive says of itself. `source` is a fingerprint of keylane's code."""

    keylane: str
    source: str
    python: str
    machine: str
    interpreter: bool
    packages: dict[str, str]


def pack(output: Path, *, extra: Sequence[str] = (), interpreter: bool = False) -> Note:
    """Write the archive; one that is there is replaced, and only by a whole one.

    `extra` names further installed packages, or paths to modules of your own. With `interpreter` the archive holds
    this machine's Python too, for workers that have another one or none.
    """
    if not output.name.endswith(ENDINGS):
        raise InvalidInput(f"{str(output)!r} must end in .tar.gz: Spark unpacks an archive by its name")
    if not output.parent.is_dir():
        raise InvalidInput(f"{str(output.parent)!r} is no directory: make it first, or write elsewhere")
    chosen = choose(extra)
    note = Note(
        keylane=chosen.versions["keylane"],
        source=source_fingerprint(),
        python=python_version(),
        machine=_machine(),
        interpreter=interpreter,
        packages=chosen.versions,
    )
    files = {f"lib/site-packages/{name}": file for name, file in chosen.files.items()}
    if interpreter:
        files |= {f"{_BUNDLED}/{name}": file for name, file in _interpreter_files()}
    try:
        _write(output, note, files)
    except OSError as error:
        raise InvalidInput(f"cannot pack into {str(output)!r}: {error}") from error
    return note


def _write(output: Path, note: Note, files: Mapping[str, Path]) -> None:
    handle, draft = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with (
            os.fdopen(handle, "wb") as raw,
            gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) as squeezed,
            tarfile.open(fileobj=squeezed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            _add_text(archive, NOTE, json.dumps(asdict(note)))  # first, so that reading it is quick
            _add_text(archive, "bin/python", _launcher(interpreter=note.interpreter), executable=True)
            _add_text(archive, "bin/python3", '#!/bin/sh\nexec "$(dirname "$0")/python" "$@"\n', executable=True)
            for name, file in files.items():
                _add_file(archive, name, file)
        Path(draft).chmod(0o644)
        Path(draft).replace(output)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def read_note(archive: Path) -> Note | None:
    """What an archive says of itself; None for one that `pack` did not write."""
    try:
        with tarfile.open(archive, "r|*") as members:
            first = members.next()
            if first is None or first.name != NOTE or first.size > _NOTE_LIMIT:
                return None
            text = members.extractfile(first)
            assert text is not None
            return Note(**json.load(text))
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as broken:
        raise InvalidInput(f"{str(archive)!r} is no archive that can be read ({broken}): pack it again") from broken


def python_version() -> str:
    """As far as it matters: compiled packages and Spark's workers need the same."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def source_fingerprint() -> str:
    """Tells one state of keylane's code from another, also where the version is the same."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _machine() -> str:
    system = os.uname()
    return f"{system.sysname} {system.machine}"


def _launcher(*, interpreter: bool) -> str:
    python = python_version()
    if interpreter:
        candidates = f'"$root/{_BUNDLED}/bin/python{python}"'
        library = (
            f'LD_LIBRARY_PATH="$root/{_BUNDLED}/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\nexport LD_LIBRARY_PATH\n'
        )
    else:
        base = shlex.quote(str(_base_python()))
        candidates = f'${{KEYLANE_PYTHON:+"$KEYLANE_PYTHON"}} python{python} {base} python3'
        library = ""
    return _LAUNCHER.format(
        python=python,
        version=python.replace(".", ", "),
        machine=shlex.quote(_machine()),
        candidates=candidates,
        library=library,
    )


def _base_python() -> Path:
    return Path(sys.base_prefix) / "bin" / f"python{python_version()}"


def _interpreter_files() -> Iterator[tuple[str, Path]]:
    """The Python that this virtual environment was made from, without its installed packages and its tests."""
    executable = _base_python()
    stdlib = Path(sysconfig.get_path("stdlib"))
    if not executable.is_file() or not stdlib.is_dir():
        raise InvalidInput(f"{executable} or {stdlib} is not there, so this Python cannot be packed: leave it out")
    yield f"bin/python{python_version()}", executable
    library = sysconfig.get_config_var("LDLIBRARY")
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and library:
        shared = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
        yield f"lib/{shared.name}", shared
    for file in sorted(stdlib.rglob("*")):
        name = file.relative_to(stdlib).as_posix()
        if file.is_file() and not name.startswith(_STDLIB_UNUSED) and "__pycache__/" not in name:
            yield f"lib/python{python_version()}/{name}", file


def _add_text(archive: tarfile.TarFile, name: str, text: str, *, executable: bool = False) -> None:
    content = text.encode()
    archive.addfile(_entry(name, len(content), executable=executable), io.BytesIO(content))


def _add_file(archive: tarfile.TarFile, name: str, file: Path) -> None:
    with file.open("rb") as content:
        facts = os.fstat(content.fileno())
        archive.addfile(_entry(name, facts.st_size, executable=bool(facts.st_mode & 0o100)), content)


def _entry(name: str, size: int, *, executable: bool) -> tarfile.TarInfo:
    """No owner and no time, so that the same content gives the same archive."""
    entry = tarfile.TarInfo(name)
    entry.size = size
    entry.mode = 0o755 if executable else 0o644
    return entry
