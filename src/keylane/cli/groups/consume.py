"""`consume`: join a group as a member and print every message.

The first Ctrl-C or SIGTERM drains and ends with success, the second ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from keylane import groups
from keylane.cli.command import ConnectionOptions
from keylane.cli.event_lines import EventLines, wait_for_end
from keylane.cli.formatting import excerpt, payload_fields, printable
from keylane.cli.groups.snapshot import config_of
from keylane.cli.metrics_port import MetricsOptions, metrics_port
from keylane.core.member_state import in_words
from keylane.core.plans import ranges
from keylane.groups.config import Kind
from keylane.groups.member import Order
from keylane.jetstream import ConnectionHooks, ConsumerConfig
from keylane.metrics import MemberMetrics

AT_WORK = (groups.MemberState.READY, groups.MemberState.STANDBY, groups.MemberState.ACTIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConsumeOptions:
    """Which member joins, and how it handles messages."""

    kind: Kind
    stream: str
    group: str
    member: str
    sleep_s: float
    order: Order
    concurrency: int
    max_ack_pending: int
    ack_wait_s: float | None


class _MemberLines(EventLines):
    """The events of a member."""

    def state(self, state: groups.MemberState, waiting_for: str | None) -> None:
        """What the member waits for. As text it goes to stderr, because it is not a message."""
        if waiting_for is None or state is groups.MemberState.STOPPING:
            return
        if self.as_json:
            self.write("state", "", state=state.value, waiting_for=waiting_for)
        else:
            print(f"keylane: {printable(in_words(state, waiting_for))}", file=sys.stderr, flush=True)

    def message(self, message: groups.GroupMessage) -> None:
        where = f"partition {message.partition}  seq {message.sequence}"
        again = f"  delivery {message.delivered_count}" if message.delivered_count > 1 else ""
        self.write(
            "message",
            f"{printable(message.subject)}  {where}{again}  {excerpt(message.data)}",
            subject=message.subject,
            partition=message.partition,
            key=message.key,
            sequence=message.sequence,
            delivery_sequence=message.delivery_sequence,
            delivered_count=message.delivered_count,
            pinned_id=message.headers.get("Nats-Pin-Id"),
            **payload_fields(message.data),
        )


async def consume(
    options: GroupConsumeOptions, metrics: MetricsOptions, link: ConnectionOptions, *, as_json: bool
) -> None:
    """Until a signal, or until the group ends. Raises the error if one ended it."""
    lines = _MemberLines(as_json=as_json)

    async def handler(message: groups.GroupMessage) -> None:
        if options.sleep_s:
            await asyncio.sleep(options.sleep_s)
        lines.message(message)
        if lines.failure is not None:
            raise lines.failure  # not acked, because it was not printed

    link_hooks = ConnectionHooks(
        on_disconnect=lambda why: lines.write("disconnected", f"reconnecting ({why})", reason=why),
        on_reconnect=lambda server: lines.write("connected", f"connected to {server}", server=server),
    )
    with _print_warnings(lines):
        async with link.open(link_hooks) as connection:
            config = await config_of(connection, options.kind, options.stream, options.group)
            hooks, counts = _hooks(lines, options, config), MemberMetrics()
            member = await groups.join(
                connection,
                options.stream,
                options.group,
                options.member,
                handler,
                order=options.order,
                concurrency=options.concurrency,
                max_ack_pending=options.max_ack_pending,
                settings=ConsumerConfig(ack_wait_s=options.ack_wait_s),
                hooks=hooks if metrics.metrics_port is None else counts.hooks(hooks),
                kind=options.kind,
            )
            counts.watch(member)
            async with metrics_port(metrics, counts.readings, lambda: member.state in AT_WORK, lines):
                await wait_for_end(lines, member.wait(), member.stop)
    if lines.failure is not None:
        raise lines.failure


def _hooks(
    lines: _MemberLines, options: GroupConsumeOptions, config: groups.StaticConfig | groups.ElasticConfig
) -> groups.MemberHooks:
    listed = config.has_member(options.member)

    def joined() -> None:
        lines.write("joined", f"joined {options.group} as {options.member}", member=options.member, listed=listed)

    def rebalanced(before: tuple[int, ...], after: tuple[int, ...]) -> None:
        text = f"partitions {ranges(after)} (before: {ranges(before)})"
        lines.write("rebalanced", text, before=list(before), after=list(after))

    return groups.MemberHooks(
        on_joined=joined,
        on_activated=lambda: lines.write("active", "active: this instance is pinned"),
        on_deactivated=lambda: lines.write("inactive", "inactive: this instance is not pinned any more"),
        on_partitions=rebalanced,
        on_state=lines.state,
        on_ended=lambda reason: lines.write("ended", f"ended: {reason}", reason=reason),
        on_failure=lambda *_: None,  # only a closed pipe fails, and that ends the command
    )


class _WarningLines(logging.Handler):
    """Prints warnings of the library. States have a hook of their own."""

    def __init__(self, lines: _MemberLines) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "keylane.groups.state":
            return
        self._lines.write("warning", f"warning: {record.getMessage()}", text=record.getMessage())


@contextmanager
def _print_warnings(lines: _MemberLines) -> Iterator[None]:
    log, handler = logging.getLogger("keylane.groups"), _WarningLines(lines)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
