"""Directories that pipelines write: results are put in place by one rename."""

from __future__ import annotations

import errno
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keylane.errors import InvalidInput
from keylane.spark.pipelines.spark_jobs import plain_error

_BUILDING = ".building-"


def check_work(work: str | None, name: str = "work") -> None:
    if work is not None and "://" in work and not work.startswith("file://"):
        raise InvalidInput(
            f"{name} is {work!r}: findings are put in place by renaming; give a path that driver and executors share"
        )


@contextmanager
def working(work: str | None, name: str) -> Iterator[Path]:
    """The directory that was asked for, or one for this run only."""
    try:
        if work is not None:
            yield _made(Path(work.removeprefix("file://")).expanduser().absolute(), work)
        else:
            with tempfile.TemporaryDirectory(prefix=f"keylane-{name}-") as temporary:
                yield Path(temporary)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise plain_error("No space left on device") from error


def _made(directory: Path, work: str) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"work is {work!r}: {error.strerror}; give a directory to write to") from error
    return directory


@contextmanager
def building(directory: Path) -> Iterator[Path]:
    """A directory beside the results, removed in the end: what is not moved out of it never counts."""
    temporary = directory / f"{_BUILDING}{uuid.uuid4().hex[:12]}"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(new: Path, place: Path) -> None:
    """A finished directory takes the place of an older one, which ends up beside where the new one was."""
    if place.exists():
        place.rename(new.with_name("old"))
    new.rename(place)
