"""A plan as text for a terminal and as a JSON object. Pure; only `plan_text` loads rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keylane.core.configuration_difference import ConfigurationPlan, FieldChange
from keylane.core.plans import ranges
from keylane.core.quantities import duration_text

if TYPE_CHECKING:
    from rich.text import Text

_MARKS = {"create": ("+", "green"), "change": ("~", "yellow"), "delete": ("-", "red")}


def plan_as_wire(plan: ConfigurationPlan) -> dict[str, Any]:
    """The plan as a JSON object."""
    return {
        "id": plan.digest if plan.steps else None,
        "steps": [
            {
                "action": step.action,
                "kind": step.key.kind,
                "stream": step.key.stream,
                "name": step.key.name or None,
                "changes": [_change_as_wire(one) for one in step.changes],
                "notes": list(step.notes),
            }
            for step in plan.steps
        ],
        "refused": [
            {
                "kind": one.key.kind,
                "stream": one.key.stream,
                "name": one.key.name or None,
                "changes": [_change_as_wire(each) for each in one.changes],
                "reason": one.reason,
                "command": one.command,
            }
            for one in plan.refused
        ],
    }


def plan_text(plan: ConfigurationPlan) -> Text:
    """The plan as a person reads it: `+` is made, `~` is changed, `-` is deleted, `✗` is refused."""
    from rich.text import Text

    text = Text()
    for step in plan.steps:
        mark, style = _MARKS[step.action]
        text.append(f"{mark} {step.key}\n", style=f"bold {style}")
        for change in step.changes:
            if step.action == "create" and change.after in (None, ()):
                continue
            if step.action == "create":
                text.append(f"    {change.name} = {_shown(change.name, change.after)}\n")
            else:
                text.append(f"    {change.name}: {_shown(change.name, change.before)} → ")
                text.append(f"{_shown(change.name, change.after)}\n", style=style)
        for note in step.notes:
            text.append(f"    {note}\n", style="italic red" if step.action == "delete" else "italic")
    for refused in plan.refused:
        text.append(f"✗ {refused.key}: refused\n", style="bold red")
        for change in refused.changes:
            before, after = _shown(change.name, change.before), _shown(change.name, change.after)
            text.append(f"    {change.name}: {before} → {after}\n")
        text.append(f"    {refused.reason}\n", style="dim")
        text.append(f"    → {refused.command}\n", style="green")
    if plan.is_empty:
        return text.append("nothing to do: the server is as the file says", style="bold green")
    counts = [f"{sum(1 for step in plan.steps if step.action == action)} to {action}" for action in _MARKS]
    text.append("\n")
    if plan.refused:
        return text.append(f"{len(plan.refused)} refused: nothing is changed until the file is", style="bold red")
    return text.append(f"plan {plan.digest}: {', '.join(one for one in counts if one[0] != '0')}", style="bold")


def _change_as_wire(change: FieldChange) -> dict[str, Any]:
    return {"field": change.name, "before": _plain(change.before), "after": _plain(change.after)}


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _shown(name: str, value: Any) -> str:
    """A value as a person reads it."""
    if value is None or value == () or (name.startswith("max_") and not value):
        return "none"
    match value:
        case tuple():
            return ", ".join(_item(name, one) for one in value)
        case int() | float() if name in ("max_age", "duplicate_window"):
            return duration_text(value)
        case int() | float():
            return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return str(value)


def _item(name: str, value: Any) -> str:
    if name == "mapping":
        return f"{value[0]}: {ranges(value[1])}"
    if name == "partition_by":
        return f"{value[0]} (key {', '.join(map(str, value[1])) or 'the whole subject'})"
    return str(value)
