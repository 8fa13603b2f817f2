"""`keylane static prompt` and `keylane elastic prompt`: the same commands, one line after the other.

Owns the loop, the history and the completion. The commands of the shell parse each line, with the connection options
of the prompt.
"""

from __future__ import annotations

import asyncio
import glob
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from keylane.cli.command import ConnectionOptions, default_map
from keylane.cli.groups.snapshot import config_of
from keylane.errors import KeylaneError
from keylane.groups import list_groups
from keylane.groups.config import Kind
from keylane.jetstream import streams

try:
    import readline
except ImportError:  # some builds of Python lack it: no history and no completion
    readline = None  # type: ignore[assignment]

_KEPT_LINES = 1000
_PROMPT_WORDS = ("exit", "help", "static", "elastic")


class Prompt:
    """Reads lines and runs them until `exit` or the end of the input."""

    def __init__(self, kind: Kind, link: ConnectionOptions, *, as_json: bool) -> None:
        from keylane.cli.groups import elastic, static

        self.kind: Kind = kind
        self._link = link
        self._commands: dict[Kind, Any] = {
            "static": typer.main.get_command(static.app),
            "elastic": typer.main.get_command(elastic.app),
        }
        given = {name: value for name, value in asdict(link).items() if value is not None}
        self._defaults = given | {"as_json": as_json}
        self._candidates: list[str] = []
        self._has_failed = False

    def run(self) -> None:
        """Until `exit` or the end of the input. Piped lines that failed give exit code 1."""
        at_terminal = sys.stdin.isatty()
        if at_terminal:
            typer.echo("help lists the commands, Tab completes, Ctrl-D ends")
        with _line_editing(self.complete):
            while True:
                try:
                    line = input(f"[{self.kind}]> " if at_terminal else "")
                except EOFError:
                    if at_terminal:
                        typer.echo()
                    break
                except KeyboardInterrupt:
                    typer.echo()
                    continue
                if not self._execute(line):
                    break
        if self._has_failed and not at_terminal:
            raise typer.Exit(1)

    def _execute(self, line: str) -> bool:
        """Run one line; False at the end."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            typer.echo(f"keylane: {error} in the line", err=True)
            self._has_failed = True
            return True
        _add_to_history(line)
        match words:
            case []:
                return True
            case ["exit" | "quit"]:
                return False
            case ["static" | "elastic" as kind]:
                self.kind = kind
            case ["help" | "?", *about]:
                self._run(self.kind, [*about, "--help"])
            case ["prompt", *_]:
                typer.echo("keylane: this is the prompt already", err=True)
            case ["static" | "elastic" as kind, *rest]:
                self._run(kind, rest)
            case _:
                self._run(self.kind, words)
        return True

    def _run(self, kind: Kind, words: list[str]) -> None:
        command = self._commands[kind]
        try:
            command.main(words, prog_name=kind, default_map=default_map(command, self._defaults))
        except SystemExit as ended:  # every command ends with it, after it printed its answer
            self._has_failed |= bool(ended.code)
        except KeylaneError as error:
            self._has_failed = True
            typer.echo(f"keylane: {' '.join(str(error).split())}", err=True)

    # ---- completion ---------------------------------------------------------------------------------

    def complete(self, text: str, state: int) -> str | None:
        """For readline: the next candidate for the word under the cursor."""
        if state == 0:
            before = readline.get_line_buffer()[: readline.get_begidx()].split()
            self._candidates = sorted({one for one in self.candidates(before, text) if one.startswith(text)})
            if len(self._candidates) == 1:
                self._candidates = [f"{self._candidates[0]} "]
        return self._candidates[state] if state < len(self._candidates) else None

    def candidates(self, before: list[str], text: str) -> list[str]:
        """The words that may follow those before. May contain words that do not start with `text`."""
        kind: Kind = self.kind
        if before and before[0] in ("static", "elastic"):
            kind, before = before[0], before[1:]  # type: ignore[assignment]
        command, words = self._commands[kind], list(before)
        while words and (subcommands := getattr(command, "commands", None)):
            if words[0] not in subcommands:
                return []
            command = subcommands[words.pop(0)]
        if subcommands := getattr(command, "commands", None):
            names = [name for name, one in subcommands.items() if not one.hidden]
            return names if before else [*names, *_PROMPT_WORDS]
        return self._arguments(kind, command, words, text)

    def _arguments(self, kind: Kind, command: Any, words: list[str], text: str) -> list[str]:
        options = {name: one for one in command.params for name in one.opts if name.startswith("-")}
        given: list[str] = []
        awaiting = None
        for word in words:
            if awaiting is not None:
                awaiting = None
            elif word in options:
                awaiting = None if options[word].is_flag else options[word]
            else:
                given.append(word)
        if awaiting is not None:
            return list(getattr(awaiting.type, "choices", ()))
        if text.startswith("-"):
            return [name for name in options if name.startswith("--")]
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        if not arguments or (len(given) >= len(arguments) and arguments[-1].nargs != -1):
            return []
        name = arguments[min(len(given), len(arguments) - 1)].name
        if name == "file":
            return glob.glob(f"{glob.escape(text)}*")
        try:
            return asyncio.run(self._names(kind, name, given))
        except KeylaneError:
            return []  # without a server there are no names to complete

    async def _names(self, kind: Kind, name: str, given: list[str]) -> list[str]:
        if name not in ("stream", "group", "member", "members"):
            return []
        async with self._link.open() as connection:
            if name == "stream":
                return [one for one in await streams.names(connection) if not one.startswith("KV_")]
            if name == "group":
                return [one.group for one in await list_groups(connection, given[0]) if one.kind == kind]
            return list((await config_of(connection, kind, given[0], given[1])).plan.members)


# ---- line editing and history -------------------------------------------------------------------------


def _add_to_history(line: str) -> None:
    """Keep the line unless it has a password. Answers to questions never get here."""
    if readline is not None and line.strip() and "--password" not in line:
        readline.add_history(line)


@contextmanager
def _line_editing(complete: Any) -> Iterator[None]:
    if readline is None or not sys.stdin.isatty():
        yield
        return
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    readline.set_completer_delims(" \t\n")
    readline.set_completer(complete)
    readline.set_auto_history(False)
    path = _history_path()
    if path.exists():
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_completer(None)
        readline.set_history_length(_KEPT_LINES)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
        except OSError as error:
            typer.echo(f"keylane: the history was not kept in {path}: {error.strerror}", err=True)


def _history_path() -> Path:
    configured = os.environ.get("XDG_STATE_HOME", "")
    home = Path(configured) if os.path.isabs(configured) else Path.home() / ".local" / "state"
    return home / "keylane" / "prompt_history"
