"""Plan files: which member owns which partitions, as JSON.

`keylane elastic plan` and the skew pipeline write them, `keylane elastic apply-plan` reads them.

Checks the form only. Whether a plan fits a group is checked when it is applied.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from keylane.core.plans import Plan
from keylane.core.subjects import shown
from keylane.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan, and the group that it was made for if the file names one."""

    plan: Plan
    stream: str | None = None
    group: str | None = None


def write_plan_file(path: Path, stream: str, group: str, plan: Plan) -> None:
    """Write a plan and the group that it is for. Raises `InvalidInput` if the file cannot be written."""
    mappings = [{"member": member, "partitions": partitions} for member, partitions in plan.mappings()]
    wire = {"stream": stream, "group": group, "member_mappings": mappings}
    try:
        path.write_text(json.dumps(wire, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"plan file {str(path)!r} cannot be written: {error.strerror}") from error


def read_plan_file(path: Path, stdin: TextIO) -> PlanFile:
    """`{"member_mappings": [{"member", "partitions"}]}`, or that list alone, or `{"a": [0, 1], "b": [2]}`.

    The first form, in which a group is also stored, may name `stream` and `group`. `-` reads `stdin`.
    """
    where = "the plan on standard input" if str(path) == "-" else f"plan file {str(path)!r}"
    try:
        text = stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        wire = json.loads(text)
    except OSError as error:
        raise InvalidInput(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"{where} is not JSON: {error}") from error
    named = wire if isinstance(wire, dict) and "member_mappings" in wire else {}
    listed = named.get("member_mappings", wire)
    try:
        pairs = (
            list(listed.items()) if isinstance(listed, dict) else [(one["member"], one["partitions"]) for one in listed]
        )
        plan = Plan.from_mappings((member, _numbers(partitions)) for member, partitions in pairs)
    except (KeyError, TypeError) as error:
        raise InvalidInput(
            f'{where} has no mapping of members to partitions: give {{"member_mappings": '
            '[{"member": "a", "partitions": [0, 1]}]}'
        ) from error
    if not plan.members:
        raise InvalidInput(f"{where} names no member: `keylane elastic delete-mapping` takes a mapping away")
    return PlanFile(plan, _text(named, "stream", where), _text(named, "group", where))


def _numbers(partitions: Any) -> list[int]:
    if not isinstance(partitions, list):
        raise TypeError(partitions)
    return partitions


def _text(named: dict[str, Any], key: str, where: str) -> str | None:
    value = named.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"{where} has {key} {shown(value)}: it must be a name")
    return value
