"""Directories that pipelines write: results are put in place by one rename, steps happen as a whole or not at all.

Also what the errors of a file system mean for a table.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keylane.errors import InvalidInput, LakeBroken
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


# ---- steps on a table --------------------------------------------------------------------------------------------

_EXCHANGE = 2
"""Linux' RENAME_EXCHANGE and macOS' RENAME_SWAP."""
_HERE = -100


def exchange(one: Path, other: Path) -> None:
    """Let two directories change places in one step. Raises OSError where the file system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        done = library.renamex_np(os.fsencode(one), os.fsencode(other), _EXCHANGE)
    else:
        done = library.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def can_exchange(directory: Path) -> bool:
    """Whether the file system below a directory can exchange two directories."""
    one, other = directory / f".{uuid.uuid4().hex}", directory / f".{uuid.uuid4().hex}"
    one.mkdir()
    other.mkdir()
    try:
        exchange(one, other)
    except (OSError, AttributeError):
        return False
    finally:
        one.rmdir()
        other.rmdir()
    return True


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, and not before its bytes are on the disk."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_of(staging: Path) -> Path:
    return staging.with_name(f"{staging.name}.lock")


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """Say what is wrong with the disk in one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise InvalidInput(f"table {str(path)!r} cannot be written: {error.strerror} ({error.filename})") from error
        raise LakeBroken(
            f"table {str(path)!r} could not be changed: {error.strerror} ({error.filename}); what was there before is "
            "whole, and the next run goes on from it"
        ) from error
