"""The programs and commands that README and docs show fit the code of today: in seconds, and also what cannot be run.

A command line is parsed as the shell and keylane would parse it, and nothing is run. Of a Python block, every name that
it takes from keylane must exist, and every keyword that it passes must be one that is taken. What the blocks do and
print is the business of tests/integration/docs, which runs them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.core import TyperCommand

from keylane.cli import main as command_line
from tests.integration.docs.pages import PAGES, ROOT, Block, blocks

BLOCKS = [block for page in PAGES for block in blocks(page)]
_MORE_THAN_ONE = re.compile(r" (?:\||&&?|>|<) ?")
_PROMPT = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?(keylane .*)$")


def commands() -> Iterator[tuple[str, str]]:
    for block in BLOCKS:
        if block.language not in ("sh", "console"):
            continue
        for number, line in enumerate(block.text.replace("\\\n", " ").splitlines()):
            if (shown := _PROMPT.match(line)) is not None and not shown[1].startswith("keylane-"):
                yield f"{block.page}:{block.line + number}", shown[1]


MISSING = object()
COMMANDS = list(commands())
PYTHON = [block for block in BLOCKS if block.language == "python"]


def refusal(line: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Why keylane refuses a command line. It is parsed down to its last sub-command, which is not run."""
    monkeypatch.setattr(TyperCommand, "invoke", lambda *_: None)
    words = shlex.split(_MORE_THAN_ONE.split(line)[0], comments=True)[1:]
    try:
        command_line._app()(words, standalone_mode=False)
    except typer.Exit:  # --help, --version
        return None
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return str(error.format_message())
    return None


@pytest.mark.parametrize(("where", "line"), COMMANDS, ids=[where for where, _ in COMMANDS])
def test_a_command_that_a_page_shows_is_one(where: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(line, monkeypatch) is None, f"{where}: {line}"


def test_pages_show_commands_and_programs() -> None:
    assert len(COMMANDS) > 50
    assert len(PYTHON) > 30


def test_a_wrong_command_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("keylane elastic info ORDERS billing --colour", monkeypatch)
    assert refusal("keylane elastik ls", monkeypatch)
    assert refusal("keylane elastic info ORDERS billing --json  # all of it", monkeypatch) is None


# ---- Python -----------------------------------------------------------------------------------------------


def problems(block: Block) -> Iterator[str]:
    if block.excerpt is not None:
        yield from _not_in(ROOT / block.excerpt, block.text.splitlines()[1:])
        return
    tree = compile(block.text, block.page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    nodes = list(ast.walk(tree))
    known = {name: value for node in nodes for name, value in imported(node)}
    yield from (f"{name} is missing" for name, value in known.items() if value is MISSING)
    for node in nodes:
        if isinstance(node, ast.Attribute) and inspect.ismodule(owner := _value_of(node.value, known)):
            if not hasattr(owner, node.attr):
                yield f"{owner.__name__} has no {node.attr}"
        elif isinstance(node, ast.Call):
            yield from _wrong_keywords(node, _value_of(node.func, known))


def _not_in(example: Path, lines: list[str]) -> Iterator[str]:
    there = set(example.read_text().splitlines())
    yield from (f"{example.name} has no line {line!r}" for line in lines if line not in {*there, "..."})


def imported(node: ast.AST) -> Iterator[tuple[str, object]]:
    """What an import of keylane's brings, by the name that the program gives it."""
    if isinstance(node, ast.Import):
        for one in node.names:
            if one.name.split(".")[0] == "keylane":
                module = importlib.import_module(one.name)
                yield (one.asname, module) if one.asname else ("keylane", sys.modules["keylane"])
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "keylane":
        for one in node.names:
            yield one.asname or one.name, _member(importlib.import_module(node.module or ""), one.name)


def _member(module: ModuleType, name: str) -> object:
    try:
        return getattr(module, name, None) or importlib.import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:
        return MISSING


def _value_of(node: ast.expr, known: dict[str, object]) -> object | None:
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, known)
        return getattr(owner, node.attr, None) if inspect.ismodule(owner) or inspect.isclass(owner) else None
    return None


def _wrong_keywords(call: ast.Call, function: object | None) -> Iterator[str]:
    if function is None or not callable(function):
        return
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in taken:
            yield f"{getattr(function, '__name__', function)} takes no {keyword.arg}"


@pytest.mark.parametrize("block", PYTHON, ids=[f"{one.page}:{one.line}" for one in PYTHON])
def test_a_program_that_a_page_shows_fits_the_code(block: Block) -> None:
    assert list(problems(block)) == []


def test_wrong_programs_are_noticed() -> None:
    wrong = "from keylane import groups, groop\nawait groups.join(c, 's', 'g', 'm', h, max_trys=3)\ngroups.jion()\n"
    found = sorted(problems(Block("x.md", 1, "python", "", wrong)))
    assert found == ["groop is missing", "join takes no max_trys", "keylane.groups has no jion"]
