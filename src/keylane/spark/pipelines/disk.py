"""Steps on a file system that happen as a whole or not at all, and what its errors mean for a table."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keylane.errors import InvalidInput, LakeBroken

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
