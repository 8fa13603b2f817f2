"""How groups look: drawings. As JSON objects: `groups_told`.

Pure: takes what was seen and the time, gives text and rich renderables. Talks to nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from rich import box
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keylane.cli.consumer_told import pin_of
from keylane.cli.consumer_view import NOBODY, age
from keylane.cli.group_sight import GroupSight, MemberSight, kind_of
from keylane.core.plans import Plan, ranges
from keylane.errors import BrokenGroupRecord
from keylane.groups import ElasticConfig, StaticConfig

SOURCING_PAUSES = "when full, the server pauses sourcing for about two seconds"
_PIPE_WIDTH = 160
_STYLES = {"active": "green", "waiting": "yellow", "absent": "red", "leaving": "magenta"}
# Columns that only a wide screen has room for.
_FOR_FROM_WIDTH = 92


def console(*, stderr: bool = False) -> Console:
    """For drawings. In a pipe nobody knows the width, and cut names are of no use."""
    drawing = Console(stderr=stderr)
    return drawing if drawing.is_terminal else Console(stderr=stderr, width=_PIPE_WIDTH)


def group_table(found: Mapping[str, StaticConfig | ElasticConfig | BrokenGroupRecord]) -> Table:
    """One row for each group of a stream."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("group", no_wrap=True)
    table.add_column("partitions", justify="right")
    table.add_column("filters", overflow="fold")
    table.add_column("members", overflow="fold")
    for group, config in found.items():
        if isinstance(config, BrokenGroupRecord):
            table.add_row(Text(group), "-", Text("broken", style="red"), Text(str(config), style="red"))
        else:
            table.add_row(
                Text(group), f"{config.max_members:,}", Text("\n".join(_filters(config))), Text(_owners(config))
            )
    return table


def picture(sight: GroupSight, now: datetime, *, width: int) -> RenderableType:
    """Who owns what, who is pinned, how far behind each member is, and how full the queue is."""
    panel = facts_panel(f"{sight.stream} / {sight.group}", _group_facts(sight))
    return Group(panel, _member_table(sight, now, width)) if sight.members else panel


def member_panel(sight: GroupSight, one: MemberSight, now: datetime) -> Panel:
    """One member in full."""
    return facts_panel(f"{sight.stream} / {sight.group} / {one.member}", _member_facts(one, now))


def facts_panel(title: str, facts: Iterable[tuple[str, Text | str]]) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value if isinstance(value, Text) else Text(value))  # a name may look like markup
    heading = Text(title, style="bold")
    return Panel(table, title=heading, title_align="left", box=box.ROUNDED, expand=False, padding=(0, 1))


def plan_table(now: Plan, plans: Mapping[str, Plan]) -> Table:
    """What each member owns now and with each plan, and how many partitions it gains and loses."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("member", no_wrap=True)
    table.add_column("now", overflow="fold")
    for name in plans:
        table.add_column(name, overflow="fold")
    members = sorted({*now.members, *(member for plan in plans.values() for member in plan.members)})
    for member in members:
        before = now.partitions_of(member)
        table.add_row(
            Text(member), ranges(before), *(_change(before, plan.partitions_of(member)) for plan in plans.values())
        )
    return table


def moves_line(name: str, now: Plan, then: Plan, partitions: int) -> str:
    return f"{name}: {len(then.moves_from(now)):,} of {partitions:,} partitions change hands"


def _change(before: Sequence[int], after: Sequence[int]) -> Text:
    text = Text(ranges(after))
    gained, lost = len(set(after) - set(before)), len(set(before) - set(after))
    if gained:
        text.append(f" +{gained}", style="green")
    if lost:
        text.append(f" -{lost}", style="red")
    return text


def _filters(config: StaticConfig | ElasticConfig) -> list[str]:
    if isinstance(config, StaticConfig):
        return list(config.filters) or ["none (every subject)"]
    if not config.partitioning:
        return ["none (every subject, hashed whole)"]
    return [
        f"{one.filter}, key: "
        + (f"wildcard {', '.join(str(number) for number in one.wildcards)}" if one.wildcards else "the whole subject")
        for one in config.partitioning
    ]


def _owners(config: StaticConfig | ElasticConfig) -> str:
    how = "mapped" if config.mappings is not None else "balanced"
    names = config.plan.members
    return f"{len(names)} {how}: {', '.join(names)}" if names else "nobody"


def _group_facts(sight: GroupSight) -> list[tuple[str, Text | str]]:
    config = sight.config
    how = "mapped to" if config.mappings is not None else "balanced over"
    count = len(config.plan.members)
    facts: list[tuple[str, Text | str]] = [
        (
            kind_of(config),
            f"{config.max_members:,} partitions, {how} {count:,} member{'' if count == 1 else 's'}",
        ),
        ("filters", "\n".join(_filters(config))),
    ]
    if config.dialect != "present":
        facts.append(("dialect", config.dialect))
    if sight.unowned:
        facts.append(("unowned", Text(f"{ranges(sight.unowned)}: nobody gets their messages", style="red")))
    if config.overloaded:
        facts.append(("too large", Text(config.too_many_filters(config.overloaded[0]) or "", style="red")))
    if isinstance(config, ElasticConfig):
        facts += _queue_facts(sight)
    elif not sight.is_stream_there:
        facts.append(("stream", Text(f"{sight.stream} does not exist", style="red")))
    return facts


def _queue_facts(sight: GroupSight) -> list[tuple[str, Text | str]]:
    queue = sight.queue
    if queue is None:
        gone = f"{sight.stream}-{sight.group} does not exist: delete the group and create it again"
        return [("queue", Text(gone, style="red"))]
    facts: list[tuple[str, Text | str]] = [
        ("queue", f"{queue.messages:,} messages, {decimal(queue.bytes)} in stream {queue.stream}")
    ]
    if queue.fill is None:
        facts.append(("buffer", "no limit"))
    else:
        limits = []
        if queue.max_messages:
            limits.append(f"{queue.max_messages:,} messages")
        if queue.max_bytes:
            limits.append(decimal(queue.max_bytes))
        style = "red" if queue.fill >= 0.95 else "yellow" if queue.fill >= 0.8 else ""
        filled = Text(f"{queue.fill:.0%}", style=style)
        facts.append(("buffer", filled.append(f" of {' or '.join(limits)}; {SOURCING_PAUSES}", style="default")))
    if queue.source_lag:
        facts.append(("behind", f"about {queue.source_lag:,} messages of {sight.stream} are not copied yet"))
    return facts


def _member_table(sight: GroupSight, now: datetime, width: int) -> Table:
    infos = [one.info for one in sight.members if one.info is not None]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_footer=len(sight.members) > 1)
    table.add_column("member", "total", no_wrap=True, overflow="ellipsis", min_width=6, max_width=24)
    table.add_column("partitions", overflow="fold", min_width=10)
    table.add_column("state", no_wrap=True)
    table.add_column("pinned", no_wrap=True)
    if width >= _FOR_FROM_WIDTH:
        table.add_column("for", no_wrap=True, justify="right")
    table.add_column(
        "pending", f"{sum(one.num_pending for one in infos):,}" if infos else "-", no_wrap=True, justify="right"
    )
    table.add_column(
        "ack pending", f"{sum(one.num_ack_pending for one in infos):,}" if infos else "-", no_wrap=True, justify="right"
    )
    for one in sight.members:
        info = one.info
        pinned, since = _pinned(one, now)
        cells: list[Text | str] = [Text(one.member), _partitions(one), Text(one.state, _STYLES[one.state]), pinned]
        if width >= _FOR_FROM_WIDTH:
            cells.append(since)
        table.add_row(*cells, f"{info.num_pending:,}" if info else "-", f"{info.num_ack_pending:,}" if info else "-")
    return table


def _partitions(one: MemberSight) -> Text:
    text = Text(ranges(one.partitions))
    if one.covered is not None and one.covered != one.partitions:
        text.append(f" (still reads {ranges(one.covered)})", style="yellow")
    return text


def _pinned(one: MemberSight, now: datetime) -> tuple[Text, str]:
    pin = pin_of(one.info) if one.info is not None else None
    if pin is None or pin.pinned_client_id is None:
        return Text(NOBODY, style="dim"), "-"
    return Text(pin.pinned_client_id), age(pin.pinned_since, now) if pin.pinned_since else "-"


_STATE_WORDS = {
    "active": "active: an instance is pinned and gets the messages",
    "waiting": "waiting: instances pull, and the next message pins one of them",
    "absent": "absent: no instance is running",
    "leaving": "leaving: not in the group any more",
}


def _member_facts(one: MemberSight, now: datetime) -> list[tuple[str, Text | str]]:
    pinned, since = _pinned(one, now)
    facts: list[tuple[str, Text | str]] = [
        ("partitions", _partitions(one)),
        ("state", Text(_STATE_WORDS[one.state], style=_STYLES[one.state])),
    ]
    info = one.info
    if info is None:
        return facts
    limit = info.config.max_ack_pending
    return [
        *facts,
        ("consumer", Text(f"{info.name} on stream {info.stream}")),
        ("pinned", pinned.append("" if since == "-" else f" for {since}")),
        ("pending", f"{info.num_pending:,}"),
        ("ack pending", f"{info.num_ack_pending:,}" + (f" of {limit:,}" if limit and limit > 0 else "")),
        ("redelivered", f"{info.num_redelivered:,}"),
        ("waiting pulls", f"{info.num_waiting:,}"),
        ("ack wait", f"{info.config.ack_wait_s:g} s"),
    ]
