"""Groups as tables and panels.

Pure: takes a snapshot and the time, returns text and rich renderables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keylane.cli.command import pin_of
from keylane.cli.consumer.render import NOBODY
from keylane.cli.display import facts_panel
from keylane.cli.formatting import age, retry_line
from keylane.cli.groups.snapshot import GroupSnapshot, ListedGroup, MemberSnapshot
from keylane.core.plans import Plan, ranges
from keylane.errors import BrokenGroupRecord
from keylane.groups import ElasticConfig, StaticConfig

SOURCING_PAUSES = "when full, the server pauses sourcing for about two seconds"
_STYLES = {"active": "green", "waiting": "yellow", "absent": "red", "leaving": "magenta"}
# The width from which the table has a column "for".
_FOR_FROM_WIDTH = 92


def group_table(found: Mapping[tuple[str, str], ListedGroup], *, with_streams: bool = False) -> Table:
    """One row for each group."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if with_streams:
        table.add_column("stream", no_wrap=True)
    table.add_column("group", no_wrap=True)
    table.add_column("partitions", justify="right")
    table.add_column("filters", overflow="fold")
    table.add_column("members", overflow="fold")
    for (stream, group), config in found.items():
        names = [Text(stream), Text(group)] if with_streams else [Text(group)]
        if isinstance(config, BrokenGroupRecord):
            table.add_row(*names, "-", Text("broken", style="red"), Text(str(config), style="red"))
        else:
            table.add_row(*names, f"{config.partitions:,}", Text("\n".join(_filters(config))), Text(_owners(config)))
    return table


def render_group(snapshot: GroupSnapshot, now: datetime, *, width: int) -> RenderableType:
    """Who owns what, who is pinned, how far behind each member is, and how full the queue is."""
    panel = facts_panel(f"{snapshot.stream} / {snapshot.group}", _group_facts(snapshot))
    return Group(panel, _member_table(snapshot, now, width)) if snapshot.members else panel


def member_panel(snapshot: GroupSnapshot, one: MemberSnapshot, now: datetime) -> Panel:
    """One member in full."""
    return facts_panel(f"{snapshot.stream} / {snapshot.group} / {one.member}", _member_facts(one, now))


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


def _group_facts(snapshot: GroupSnapshot) -> list[tuple[str, Text | str]]:
    config = snapshot.config
    how = "mapped to" if config.mappings is not None else "balanced over"
    count = len(config.plan.members)
    facts: list[tuple[str, Text | str]] = [
        (config.kind, f"{config.partitions:,} partitions, {how} {count:,} member{'' if count == 1 else 's'}"),
        ("filters", "\n".join(_filters(config))),
    ]
    if config.dialect != "present":
        facts.append(("dialect", config.dialect))
    if snapshot.unowned:
        facts.append(("unowned", Text(f"{ranges(snapshot.unowned)}: nobody gets their messages", style="red")))
    if config.overloaded:
        facts.append(("too large", Text(config.too_many_filters(config.overloaded[0]) or "", style="red")))
    if isinstance(config, ElasticConfig):
        facts += _queue_facts(snapshot)
    elif not snapshot.stream_exists:
        facts.append(("stream", Text(f"{snapshot.stream} does not exist", style="red")))
    if snapshot.retries is not None:
        facts.append(("retries", retry_line(snapshot.retries)))
    return facts


def _queue_facts(snapshot: GroupSnapshot) -> list[tuple[str, Text | str]]:
    queue = snapshot.queue
    if queue is None:
        gone = f"{snapshot.stream}-{snapshot.group} does not exist: delete the group and create it again"
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
        facts.append(("behind", f"about {queue.source_lag:,} messages of {snapshot.stream} are not copied yet"))
    return facts


def _member_table(snapshot: GroupSnapshot, now: datetime, width: int) -> Table:
    infos = [one.info for one in snapshot.members if one.info is not None]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_footer=len(snapshot.members) > 1)
    table.add_column("member", "total", no_wrap=True, overflow="ellipsis", min_width=6, max_width=24)
    table.add_column("partitions", overflow="fold", min_width=10)
    table.add_column("state", no_wrap=True)
    table.add_column("instance", no_wrap=True)
    if width >= _FOR_FROM_WIDTH:
        table.add_column("for", no_wrap=True, justify="right")
    table.add_column(
        "pending", f"{sum(one.num_pending for one in infos):,}" if infos else "-", no_wrap=True, justify="right"
    )
    table.add_column(
        "ack pending", f"{sum(one.num_ack_pending for one in infos):,}" if infos else "-", no_wrap=True, justify="right"
    )
    for one in snapshot.members:
        info = one.info
        pinned, since = _pinned(one, now)
        cells: list[Text | str] = [Text(one.member), _partitions(one), Text(one.state, _STYLES[one.state]), pinned]
        if width >= _FOR_FROM_WIDTH:
            cells.append(since)
        table.add_row(*cells, f"{info.num_pending:,}" if info else "-", f"{info.num_ack_pending:,}" if info else "-")
    return table


def _partitions(one: MemberSnapshot) -> Text:
    text = Text(ranges(one.partitions))
    if one.covered is not None and one.covered != one.partitions:
        text.append(f" (still reads {ranges(one.covered)})", style="yellow")
    return text


def _pinned(one: MemberSnapshot, now: datetime) -> tuple[Text, str]:
    """The pinned instance, by its host and process if it told them, else by its pin; and for how long."""
    pin = pin_of(one.info) if one.info is not None else None
    if pin is None or pin.pinned_client_id is None:
        return Text(NOBODY, style="dim"), "-"
    name = pin.pinned_client_id if one.instance is None else f"{one.instance.host} pid {one.instance.pid}"
    return Text(name), age(pin.pinned_since, now) if pin.pinned_since else "-"


def _pin(one: MemberSnapshot) -> str | None:
    """The pin of an instance that is shown by its host and process."""
    pin = pin_of(one.info) if one.info is not None and one.instance is not None else None
    return pin.pinned_client_id if pin is not None else None


_STATE_TEXTS = {
    "active": "active: an instance is pinned and gets the messages",
    "waiting": "waiting: instances pull, and the next message pins one of them",
    "absent": "absent: no instance is running",
    "leaving": "leaving: not in the group any more",
}


def _member_facts(one: MemberSnapshot, now: datetime) -> list[tuple[str, Text | str]]:
    pinned, since = _pinned(one, now)
    facts: list[tuple[str, Text | str]] = [
        ("partitions", _partitions(one)),
        ("state", Text(_STATE_TEXTS[one.state], style=_STYLES[one.state])),
    ]
    info = one.info
    if info is None:
        return facts
    limit = info.config.max_ack_pending
    return [
        *facts,
        ("consumer", Text(f"{info.name} on stream {info.stream}")),
        ("instance", pinned.append("" if since == "-" else f" for {since}")),
        *([("pin", Text(pin))] if (pin := _pin(one)) else []),
        ("pending", f"{info.num_pending:,}"),
        ("ack pending", f"{info.num_ack_pending:,}" + (f" of {limit:,}" if limit and limit > 0 else "")),
        ("redelivered", f"{info.num_redelivered:,}"),
        ("waiting pulls", f"{info.num_waiting:,}"),
        ("ack wait", f"{info.config.ack_wait_s:g} s"),
    ]
