"""Streams as a table, a panel and a line. Pure; only the table and the panel load rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keylane.core.partitions import Partitioning, parse_transform
from keylane.errors import InvalidInput
from keylane.jetstream import StreamConfig, StreamInfo

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.table import Table

_RETENTIONS = {"limits": "limits", "interest": "interest", "workqueue": "work queue"}


def partitioning_of(config: StreamConfig) -> Partitioning | None:
    """How the stream numbers its subjects; None if it does not, or in a way that groups cannot use."""
    transform = config.subject_transform
    try:
        return None if transform is None else parse_transform(transform.src or ">", transform.dest or "")
    except InvalidInput:
        return None


def partitions_of(config: StreamConfig) -> int | None:
    found = partitioning_of(config)
    return None if found is None else found.partitions


def settings_line(config: StreamConfig) -> str:
    """The settings that matter, in one line."""
    return ", ".join([f"subjects {' '.join(config.subjects or ())}", *_settings(config)])


def stream_table(found: Sequence[StreamInfo]) -> Table:
    """One row for each stream."""
    from rich import box
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stream", no_wrap=True)
    table.add_column("subjects", overflow="fold")
    for name in ("partitions", "messages", "size", "consumers"):
        table.add_column(name, justify="right", no_wrap=True)
    for info in found:
        partitions = partitions_of(info.config)
        table.add_row(
            Text(str(info.config.name)),
            Text(", ".join(info.config.subjects or ()) or _origin(info.config)),
            "-" if partitions is None else f"{partitions:,}",
            f"{info.state.messages:,}",
            decimal(info.state.bytes),
            f"{info.state.consumer_count:,}",
        )
    return table


def stream_panel(info: StreamInfo, created: str, readers: Sequence[str]) -> Panel:
    """One stream in full."""
    from rich.filesize import decimal

    from keylane.cli.display import facts_panel

    config, state = info.config, info.state
    facts = [("subjects", ", ".join(config.subjects or ()) or _origin(config))]
    if config.description:
        facts.insert(0, ("for", config.description))
    facts.append(("settings", ", ".join(_settings(config))))
    messages = f"{state.messages:,}, {decimal(state.bytes)}"
    if state.messages:
        messages += f", sequences {state.first_seq:,} to {state.last_seq:,}"
    facts += [
        ("messages", messages),
        ("created", created.partition(".")[0].replace("T", " ").removesuffix("Z") + " UTC"),
        ("consumers", f"{state.consumer_count:,}"),
        ("read by", ", ".join(readers) or "no group and no fleet"),
    ]
    if info.cluster is not None and info.cluster.leader:
        facts.append(("leader", info.cluster.leader))
    return facts_panel(str(config.name), facts)


def _origin(config: StreamConfig) -> str:
    if config.mirror is not None:
        return f"a mirror of {config.mirror.name}"
    return f"from {', '.join(str(one.name) for one in config.sources or ())}" if config.sources else "-"


def _settings(config: StreamConfig) -> list[str]:
    from rich.filesize import decimal

    found = []
    if (partitioning := partitioning_of(config)) is not None:
        key = "the whole subject" if not partitioning.wildcards else f"* {', '.join(map(str, partitioning.wildcards))}"
        found.append(f"{partitioning.partitions:,} partitions by {partitioning.filter} (key: {key})")
    replicas = config.num_replicas or 1
    found += [
        f"retention {_RETENTIONS.get(str(config.retention), config.retention)}",
        f"storage {config.storage}",
        f"{replicas} replica{'' if replicas == 1 else 's'}",
    ]
    if config.max_age:
        found.append(f"at most {_duration(config.max_age)} old")
    if config.max_msgs and config.max_msgs > 0:
        found.append(f"at most {config.max_msgs:,} messages")
    if config.max_bytes and config.max_bytes > 0:
        found.append(f"at most {decimal(config.max_bytes)}")
    if config.max_msgs_per_subject > 0:
        found.append(f"at most {config.max_msgs_per_subject:,} of a subject")
    if config.max_msg_size and config.max_msg_size > 0:
        found.append(f"messages up to {decimal(config.max_msg_size)}")
    if str(config.discard) == "new":
        found.append("refuses new messages when full")
    return found


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"
