"""A lake's table on disk: its layout, its state, and changes that a kill at any moment leaves whole.

    <table>/partition=3/day=2026-05-01/1-50000.parquet      what readers see; the name says which sequences
    <table>/_keylane/state.json                             what the table is, what it holds, the change under way
    <table>/_keylane/staged/<change>/…                      files that are being written
    <table>/_keylane/lock, _keylane/checkpoint

Readers pass over what begins with `_` or `.`. Files are written below `_keylane` and moved to their place only after
the state says that they will be: that write of the state, one rename, is the moment at which a change happens. Whatever
stops the moving, the next process that opens the table finishes it. A file of a day is replaced only together with the
whole directory of that day, by exchanging two directories, which is one step for every reader.

Knows nothing of Spark or servers. One process changes a table at a time (`flock`).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keylane.core.sequence_ranges import Coverage, Span
from keylane.errors import InvalidInput, LakeBroken, LakeConflict
from keylane.spark.pipelines.work_directory import exchange, lock_of, sync, telling, write_whole

VERSION = 1
ROOM = "_keylane"
_SUFFIX = ".parquet"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which messages the table is of. Sequences of another selection would mean other messages."""

    stream: str
    created: str
    """When the stream was made, as the server tells it."""
    selection: dict[str, str]
    """The reader's options that choose messages or columns."""


@dataclass(frozen=True, slots=True)
class Move:
    """A staged file and its place, both relative to the table."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Pending:
    """A change that is decided. Doing it again, in whole or in part, changes nothing."""

    change: str
    moves: tuple[Move, ...] = ()
    exchanges: tuple[Move, ...] = ()
    """Directories: a staged one takes the place of the one that readers see."""


@dataclass(frozen=True, slots=True)
class State:
    identity: Identity
    coverage: Coverage = field(default_factory=Coverage)
    rows: int = 0
    commits: int = 0
    start: int | None = None
    """Behind which sequence the streaming query began: decided once, before its first batch."""
    pending: Pending | None = None


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that readers see. `directory` is relative to the table, such as `partition=3/day=2026-05-01`."""

    directory: str
    name: str
    bytes: int

    @property
    def path(self) -> str:
        return f"{self.directory}/{self.name}"

    @property
    def first(self) -> int:
        """The lowest sequence that it may hold."""
        return int(self.name.split("-", 1)[0])

    @property
    def last(self) -> int:
        return int(self.name.removesuffix(_SUFFIX).split("-", 1)[1].split(".", 1)[0])


class Table:
    """A directory that holds a table, or will.

    >>> table = Table(Path("/lake/orders"))  # doctest: +SKIP
    >>> state = table.open(Identity("ORDERS", "2026-05-01T00:00:00Z", {}))  # doctest: +SKIP
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.room = self.path / ROOM

    def __repr__(self) -> str:
        return f"<Table {self.path}>"

    @property
    def checkpoint(self) -> Path:
        return self.room / "checkpoint"

    @property
    def exists(self) -> bool:
        return (self.room / "state.json").is_file()

    # ---- life ---------------------------------------------------------------------------------------

    def open(self, identity: Identity) -> State:
        """Make the table, or check that it is of these messages; finishes what a killed process had decided."""
        with telling(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise InvalidInput(f"table {str(self.path)!r} is a file: name a directory")
            if not self.exists and self.path.is_dir() and any(self.path.iterdir()) and not self.room.is_dir():
                raise InvalidInput(
                    f"table {str(self.path)!r} is a directory with other things in it: name a new or empty one"
                )
            self.room.mkdir(parents=True, exist_ok=True)
        with self.locked():
            if not self.exists:
                self._write(State(identity))
            state = self._settled()
            self._check(identity, state.identity)
            return state

    def state(self) -> State:
        """What the table holds; finishes what a killed process had decided."""
        with self.locked():
            return self._settled()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with the table. Others wait; a killed process lets go."""
        if not self.room.is_dir():
            raise InvalidInput(f"{str(self.path)!r} holds no table of `keylane pipeline run lake`")
        with telling(self.path), (self.room / "lock").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _check(self, wanted: Identity, found: Identity) -> None:
        if wanted.stream != found.stream or wanted.selection != found.selection:
            raise LakeConflict(
                f"table {str(self.path)!r} is of {_told(found)}, and this run reads {_told(wanted)}: use another table"
            )
        if wanted.created != found.created:
            raise LakeConflict(
                f"table {str(self.path)!r} is of the stream {found.stream!r} made at {found.created}, and the stream "
                f"was made anew at {wanted.created}: its sequences name other messages now; use another table"
            )

    # ---- state --------------------------------------------------------------------------------------

    def _read(self) -> State:
        path = self.room / "state.json"
        try:
            wire = json.loads(path.read_text(encoding="utf-8"))
            if wire["version"] != VERSION:
                raise LakeBroken(
                    f"{str(path)!r} has version {wire['version']}: this keylane reads {VERSION}; use a newer one"
                )
            return _state_from_wire(wire)
        except FileNotFoundError:
            raise InvalidInput(f"{str(self.path)!r} holds no table of `keylane pipeline run lake`") from None
        except (ValueError, KeyError, TypeError) as error:
            raise LakeBroken(f"{str(path)!r} cannot be read ({error!r}): restore it from a backup") from error

    def _write(self, state: State) -> None:
        with telling(self.path):
            write_whole(self.room / "state.json", json.dumps(_state_to_wire(state), indent=1))

    def _settled(self) -> State:
        """The state after everything decided is done. Under the lock."""
        state = self._read()
        if state.pending is not None:
            with telling(self.path):
                self._carry_out(state.pending)
            state = replace(state, pending=None)
            self._write(state)
        return state

    def begin(self, after: int) -> State:
        """Write down where the streaming query begins, unless that is decided already."""
        with self.locked():
            state = self._settled()
            if state.start is None:
                state = replace(state, start=after)
                self._write(state)
            return state

    # ---- changes ------------------------------------------------------------------------------------

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A place to write the files of one change, removed at the end. Its lock says that its writer lives."""
        place = self.room / "staged" / uuid.uuid4().hex
        with self.locked():
            place.parent.mkdir(exist_ok=True)
            lock = lock_of(place).open("a")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with lock:
            try:
                yield place
            finally:
                shutil.rmtree(place, ignore_errors=True)
                lock_of(place).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what killed processes left behind; what others are writing stays."""
        with self.locked():
            self._settled()
            for lock in (self.room / "staged").glob("*.lock"):
                with suppress(BlockingIOError, FileNotFoundError), lock.open() as handle:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                    lock.unlink(missing_ok=True)

    def add(self, staging: Path, span: Span, rows: int, *, seen: Coverage) -> State | None:
        """Make staged files part of the table, and the range covered. None, and nothing done, if the range was
        covered meanwhile: `seen` is the coverage by which the rows were chosen.

        Staged files lie in `<staging>/<directory>/*.parquet`.
        """
        moves = list(self._moves(staging, span))
        with telling(self.path):
            for move in moves:
                sync(self.path / move.source)
        with self.locked():
            state = self._settled()
            if state.coverage.missing(span) != seen.missing(span):
                return None
            decided = replace(
                state,
                coverage=state.coverage.with_span(span),
                rows=state.rows + rows,
                commits=state.commits + 1,
                pending=Pending(staging.name, moves=tuple(moves)) if moves else None,
            )
            self._write(decided)
            return self._settled()

    def replace(self, staging: Path, directory: str, old: Iterable[str], new: Iterable[str]) -> bool:
        """Put `new` files, staged in `<staging>/<directory>`, in the place of `old` ones, in one step for readers.

        False, and nothing done, if one of the old files is gone: somebody else replaced it.
        """
        target, staged = self.path / directory, staging / directory
        gone = set(old)
        with self.locked():
            state = self._settled()
            with telling(self.path):
                present = {entry.name for entry in target.iterdir()}
                if not gone <= present:
                    return False
                for name in new:
                    sync(staged / name)
                for name in present - gone:
                    os.link(target / name, staged / name)
                sync(staged)
            swap = Move(str(staged.relative_to(self.path)), directory)
            self._write(replace(state, commits=state.commits + 1, pending=Pending(staging.name, exchanges=(swap,))))
            self._settled()
        return True

    def _moves(self, staging: Path, span: Span) -> Iterator[Move]:
        """Where each staged file goes. Files of one directory and one range are told apart by a number."""
        counts: dict[str, int] = {}
        for source in sorted(staging.glob(f"partition=*/day=*/*{_SUFFIX}")):
            directory = str(source.parent.relative_to(staging))
            number = counts[directory] = counts.get(directory, -1) + 1
            name = f"{span[0] + 1}-{span[1]}{f'.{number}' if number else ''}{_SUFFIX}"
            yield Move(str(source.relative_to(self.path)), f"{directory}/{name}")

    def _carry_out(self, pending: Pending) -> None:
        for move in pending.moves:
            source, target = self.path / move.source, self.path / move.target
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                source.replace(target)
            except FileNotFoundError:
                if not target.is_file():
                    raise LakeBroken(
                        f"{str(source)!r} was decided to become {str(target)!r}, and neither is there: somebody "
                        "removed it; restore it, or fill another table from the stream"
                    ) from None
        for move in pending.exchanges:
            staged = self.path / move.source
            mark = staged / f".{pending.change}"
            # The mark travels with the old directory: where it lies tells on which side of the exchange we are.
            if staged.is_dir() and not mark.exists():
                (self.path / move.target / mark.name).touch()
                exchange(staged, self.path / move.target)
        day_directories = {Path(move.target).parent for move in (*pending.moves, *pending.exchanges)}
        for directory in {one for day in day_directories for one in (day, *day.parents)}:
            sync(self.path / directory)

    # ---- looking ------------------------------------------------------------------------------------

    def files(self) -> list[DataFile]:
        """What readers see, by directory and sequence. Under the lock it cannot change meanwhile."""
        found = [
            DataFile(str(path.parent.relative_to(self.path)), path.name, path.stat().st_size)
            for path in self.path.glob(f"partition=*/day=*/*{_SUFFIX}")
            if not path.name.startswith((".", "_"))
        ]
        return sorted(found, key=lambda one: (one.directory, one.first, one.name))


# ---- JSON -------------------------------------------------------------------------------------------------


def _state_to_wire(state: State) -> dict[str, Any]:
    pending = state.pending
    return {
        "version": VERSION,
        "stream": state.identity.stream,
        "created": state.identity.created,
        "selection": state.identity.selection,
        "covered": [[after + 1, upto] for after, upto in state.coverage.spans],
        "rows": state.rows,
        "commits": state.commits,
        "start": state.start,
        "pending": pending
        and {
            "change": pending.change,
            "moves": [[move.source, move.target] for move in pending.moves],
            "exchanges": [[move.source, move.target] for move in pending.exchanges],
        },
    }


def _state_from_wire(wire: dict[str, Any]) -> State:
    pending = wire["pending"]
    return State(
        identity=Identity(wire["stream"], wire["created"], dict(wire["selection"])),
        coverage=Coverage((int(first) - 1, int(last)) for first, last in wire["covered"]),
        rows=int(wire["rows"]),
        commits=int(wire["commits"]),
        start=wire["start"],
        pending=pending
        and Pending(
            pending["change"],
            tuple(Move(*one) for one in pending["moves"]),
            tuple(Move(*one) for one in pending["exchanges"]),
        ),
    )


def _told(identity: Identity) -> str:
    chosen = ", ".join(f"{name} {value!r}" for name, value in sorted(identity.selection.items()))
    return f"stream {identity.stream!r}" + (f" with {chosen}" if chosen else "")
