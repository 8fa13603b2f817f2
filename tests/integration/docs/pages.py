"""A page of README or docs as steps that a reader takes, top to bottom.

What a fence says:

| fence | the reader |
| --- | --- |
| `python` | types it into one Python session for the whole page, in which `await` works (`python -m asyncio`) |
| `text` right after `python` | sees this printed by the block before |
| any, first line `# shop.py` | saves it as this file |
| `python`, first line `# from examples/…` | reads lines of this example |
| `sh` | runs these commands: each must succeed, what they print is not shown |
| `console` | runs what follows `$ `, and sees the lines below it (`printed.py` says how they are compared) |
| any, below `<!-- no-run: REASON -->` | reads it: the commands and names are checked, nothing is run |

A command that ends with `&`, or with the comment `# in a terminal of its own`, stays until the page ends. `^C` below a
command is Ctrl-C, pressed when the lines above it are there. An answer shown behind `[y/N]` is typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = {
    str(page.relative_to(ROOT)): page
    for page in sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
    if page.name != "api.md"  # made of docstrings
}
_BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w/-]+\.(?:py|toml|ini))(?:: .*)?\n")
_EXCERPT = re.compile(r"# from (examples/\S+)\n")
_STAYS = re.compile(r"\s*(?:&\s*(?:#.*)?|# in a terminal of its own.*)$")
_CHANGES_THE_MACHINE = re.compile(
    r"(?:^|[;&|]\s*)(?:\S*/)?(?:pip3?|make|sudo|uv|kubectl|python3? -m (?:pip|venv))\b|(?:^|[\s=\"'])/\w"
)
"""Commands that would reach beyond the reader's directory, such as into the environment that the tests share."""
_ABSOLUTE = re.compile(r"[\"']/\w")
_NO_RUN = re.compile(r"no-run: (.+)")


class WrongPage(Exception):
    """A block that a reader would not know what to do with."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    note: str
    """What the comment above it says."""
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def no_run(self) -> str | None:
        """Why it is not run."""
        found = _NO_RUN.fullmatch(self.note)
        return None if found is None else found[1]

    @property
    def file(self) -> str | None:
        """The name that it is to be saved under."""
        found = _FILE.match(self.text)
        return None if found is None else found[1]

    @property
    def excerpt(self) -> str | None:
        """The example that its lines are from."""
        found = _EXCERPT.match(self.text)
        return None if found is None else found[1]


@dataclass(frozen=True)
class File:
    where: str
    name: str
    text: str


@dataclass(frozen=True)
class Program:
    where: str
    code: str
    shown: list[str] | None = None


@dataclass(frozen=True)
class Command:
    where: str
    text: str
    shown: list[str] | None = None
    """None: the page does not show what it prints."""
    stays: bool = False
    interrupted: bool = False
    after_interrupt: list[str] | None = None
    numbers_vary: bool = False

    @property
    def answers(self) -> list[str]:
        return re.findall(r"\[y/N\] (\w+)$", "\n".join(self.shown or ()), re.MULTILINE)


Step = File | Program | Command


def blocks(page: str) -> list[Block]:
    return _blocks(page, PAGES[page].read_text(encoding="utf-8"))


def steps(page: str) -> list[Step]:
    return list(_steps(blocks(page)))


def steps_of(name: str, text: str) -> list[Step]:
    """Those of a page that is no file."""
    return list(_steps(_blocks(name, text)))


def _blocks(page: str, text: str) -> list[Block]:
    found = [
        Block(page, text.count("\n", 0, one.start(3)) + 1, one[2], one[1] or "", one[3])
        for one in _BLOCK.finditer(text)
    ]
    if text.count("```") != 2 * len(found):
        raise WrongPage(
            f"{page} has a fence that is more than ``` and a language (notes go above it: <!-- … -->), or no end"
        )
    return found


def _steps(found: list[Block]) -> Iterator[Step]:
    program: Program | None = None
    for block in found:
        if program is not None:
            is_printed = block.language == "text" and not block.no_run
            yield Program(program.where, program.code, block.text.splitlines() if is_printed else None)
            program = None
            if is_printed:
                continue
        if block.no_run or block.excerpt:
            continue
        if block.language == "python" and _ABSOLUTE.search(block.text):
            raise WrongPage(f"{block.where}: an absolute path changes more than the reader's directory")
        if block.file:
            yield File(block.where, block.file, block.text)
        elif block.language == "python":
            program = Program(block.where, block.text)
        elif block.language in ("sh", "console"):
            yield from _commands(block)
        else:
            raise WrongPage(f"{block.where}: what would a reader do with this ```{block.language} block?")
    if program is not None:
        yield program


def _commands(block: Block) -> Iterator[Command]:
    lines = iter(enumerate(block.text.splitlines(), block.line))
    text, where, shown = "", "", list[str]()
    for number, line in lines:
        starts = line.startswith("$ ") if block.language == "console" else bool(line.strip()) and line[0] not in " #"
        if not starts:
            if block.language == "console" and not text:
                raise WrongPage(f"{block.page}:{number}: printed before any command")
            shown.append(line)
            continue
        if text:
            yield _command(block, where, text, shown)
        text, where, shown = line.removeprefix("$ "), f"{block.page}:{number}", []
        while text.endswith("\\"):
            text = text[:-1].rstrip() + " " + next(lines)[1].strip()
    if text:
        yield _command(block, where, text, shown)


def _command(block: Block, where: str, text: str, shown: list[str]) -> Command:
    stays = _STAYS.search(text) is not None
    text = _STAYS.sub("", text)
    numbers_vary = block.note == "numbers-vary"
    if block.note and not numbers_vary:
        raise WrongPage(f"{block.where}: nobody knows what <!-- {block.note} --> means")
    if _CHANGES_THE_MACHINE.search(text):
        raise WrongPage(
            f"{where}: `{text}` changes more than the reader's directory: put `<!-- no-run: REASON -->` above its block"
        )
    if block.language == "sh":
        return Command(where, text, stays=stays)
    interrupted = "^C" in shown
    at = shown.index("^C") if interrupted else len(shown)
    return Command(where, text, shown[:at], stays, interrupted, shown[at + 1 :], numbers_vary)
