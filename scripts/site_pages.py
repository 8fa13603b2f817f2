"""What the documentation site has beside docs/: home page, benchmarks, changelog, the reference of commands.

A hook of mkdocs (mkdocs.yml): these pages are read or made when the site is built, so nothing is written twice.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from keylane.cli.main import COMMANDS, load_command

ROOT = Path(__file__).resolve().parent.parent

OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/README.md": "benchmarks.md",
    "bench/audit.png": "images/bench-audit.png",
}
"""Pages and pictures that are elsewhere in the repository -> where the site has them."""
_FENCE = re.compile(r"^```(\w+) [^\n]+$", re.MULTILINE)
"""A fence that says more than its language, for whoever runs the pages (tests/integration/docs)."""
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_bytes()))
    files.append(File.generated(config, "commands.md", content=command_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links are written for whoever reads the repository: the same pages have other places in the site."""
    place = page.file.src_uri
    source = next((one for one, its in OUTSIDE.items() if its == place), f"docs/{place}")

    def in_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if target in OUTSIDE:
            found = OUTSIDE[target]
        elif target.startswith("docs/"):
            found = target.removeprefix("docs/")
        else:
            return link[1]
        if (ROOT / "docs" / found).is_dir():
            found = f"{found}/index.md"
        return posixpath.relpath(found, posixpath.dirname(place) or ".")

    return _LINK.sub(in_site, _FENCE.sub(r"```\1", markdown))


def command_reference() -> str:
    """Every command with its help, as the command itself prints it."""
    lines = ["# Commands", "", "Every command with its options, as `--help` shows them.", ""]
    for name in COMMANDS:
        lines += _commands(load_command(name), f"keylane {name}", 2)
    return "\n".join(lines)


def _commands(command: Any, name: str, level: int) -> list[str]:
    """`command`: of click, which typer may bring along under another name."""
    context = command.make_context(name, [], resilient_parsing=True)
    lines = [f"{'#' * min(level, 4)} `{name}`", "", "```text", _plain_help(command, context), "```", ""]
    for one in command.list_commands(context) if hasattr(command, "list_commands") else ():
        found = command.get_command(context, one)
        if found is not None and not found.hidden:
            lines += _commands(found, f"{name} {one}", level + 1)
    return lines


def _plain_help(command: Any, context: Any) -> str:
    """Without rich: its boxes are for terminals."""
    formatter = context.make_formatter()
    command.format_usage(context, formatter)
    command.format_help_text(context, formatter)
    command.format_options(context, formatter)
    return str(formatter.getvalue()).strip()
