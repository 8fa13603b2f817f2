"""A diagnosis as text for a terminal and as a JSON object. Pure; only `report` loads rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from keylane.core.diagnosis_facts import DoctorFacts, Finding

if TYPE_CHECKING:
    from rich.console import RenderableType

_MARKS = {"error": ("✗", "bold red"), "warning": ("!", "bold yellow"), "note": ("·", "bold cyan")}


def needs_action(found: Sequence[Finding]) -> bool:
    return any(one.severity != "note" for one in found)


def as_wire(server: str, facts: DoctorFacts, found: Sequence[Finding]) -> dict[str, Any]:
    """The diagnosis as a JSON object."""
    about = facts.server
    return {
        "server": {
            "url": server,
            "version": ".".join(map(str, about.version)),
            "clustered": about.is_clustered,
            "missing_features": list(about.missing_features),
            "clock_ahead_s": about.clock_ahead_s,
            "sync_s": dict(about.sync_s) if about.sync_s is not None else None,
        },
        "looked_at": _counts(facts),
        "findings": [asdict(one) for one in found],
        "unchecked": [asdict(one) for one in facts.unchecked],
    }


def report(server: str, facts: DoctorFacts, found: Sequence[Finding]) -> RenderableType:
    """The diagnosis as a person reads it: the server, each finding, what was not checked, and the verdict."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [_headline(server, facts), Text("")]
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in found:
        mark, style = _MARKS[one.severity]
        title = Text.assemble((one.where, "bold"), "  ", one.what)
        table.add_row(Text(mark, style=style), title)
        table.add_row("", Text(one.why, style="dim"))
        table.add_row("", Text.assemble(("→ ", "green"), (one.fix, "green")))
        if one.issue is not None:
            table.add_row("", Text(one.issue, style="dim underline"))
        table.add_row("", "")
    if found:
        parts.append(table)
    if facts.unchecked:
        parts.append(Text("not checked", style="bold"))
        parts += [Text.assemble(("? ", "bold magenta"), f"{one.what}: {one.why}") for one in facts.unchecked]
        parts.append(Text(""))
    parts.append(_verdict(facts, found))
    return Group(*parts)


def _headline(server: str, facts: DoctorFacts) -> RenderableType:
    from rich.text import Text

    about = facts.server
    words = [
        f"nats-server {'.'.join(map(str, about.version))}",
        "cluster" if about.is_clustered else "single server",
    ]
    if about.clock_ahead_s is not None:
        words.append(f"clock {about.clock_ahead_s * 1000:+.0f} ms")
    if about.sync_s:
        slowest = max(about.sync_s.values())
        words.append("every write synced" if slowest == 0 else f"synced every {slowest:g} s")
    counts = [
        f"{number:,} {name if number != 1 else name.removesuffix('s')}" for name, number in _counts(facts).items()
    ]
    return Text.assemble((server, "bold"), f"  {', '.join(words)}\n", (", ".join(counts), "dim"))


def _counts(facts: DoctorFacts) -> dict[str, int]:
    return {
        "streams": sum(1 for name in facts.streams if not name.startswith("KV_")),
        "groups": len(facts.groups),
        "fleets": len(facts.fleets),
        "consumers": sum(len(found) for found in facts.consumers.values()),
    }


def _verdict(facts: DoctorFacts, found: Sequence[Finding]) -> RenderableType:
    from rich.text import Text

    numbers = {kind: sum(1 for one in found if one.severity == kind) for kind in _MARKS}
    shown = [f"{number} {kind if number == 1 else kind + 's'}" for kind, number in numbers.items() if number]
    if facts.unchecked:
        shown.append(f"{len(facts.unchecked)} not checked")
    if needs_action(found):
        return Text(", ".join(shown), style="bold red" if numbers["error"] else "bold yellow")
    words = f"nothing to do ({', '.join(shown)})" if shown else "nothing to do: everything was checked and is fine"
    return Text.assemble(("✓ ", "bold green"), (words, "bold green"))
