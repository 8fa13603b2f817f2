"""Reading a consumer that has a priority group: continuously, or a batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keylane.awaitable_context import awaitable_context
from keylane.errors import InvalidInput
from keylane.jetstream import (
    Connection,
    ConsumerInfo,
    Feed,
    FeedOptions,
    Message,
    Notice,
    PinOptions,
    consumers,
    open_feed,
)
from keylane.priority.consumers import only_group
from keylane.priority.rules import SERVER_PIN_TIMEOUT_S, check_expiry, check_group, check_terms

_DEFAULTS = FeedOptions()


@awaitable_context
async def consume(
    connection: Connection,
    stream: str,
    consumer: str,
    *,
    group: str | None = None,
    min_pending: int | None = None,
    min_ack_pending: int | None = None,
    priority: int | None = None,
    reset_on_takeover: bool | None = None,
    on_pinned: Callable[[str], None] | None = None,
    on_unpinned: Callable[[str], None] | None = None,
    max_messages: int = _DEFAULTS.max_messages,
    max_bytes: int = _DEFAULTS.max_bytes,
    expires_s: float | None = None,
    heartbeat_s: float | None = None,
    on_messages: Callable[[list[Message]], None] | None = None,
    on_notice: Callable[[Notice], None] | None = None,
    on_demand: bool = False,
) -> Feed:
    """A started feed on a consumer with a priority group. The policy comes from the consumer.

    - overflow: served only while `min_pending` or `min_ack_pending` is reached (one is enough); with neither, always.
    - prioritized: `priority` 0 is served before 9.
    - pinned_client: one reader is served, the others wait. `reset_on_takeover` (on if the server supports it, 2.14)
      makes a new pinned reader start with the oldest unacknowledged message. `close` hands the pin over at once.

    >>> async with consume(connection, "JOBS", "workers", min_pending=1000) as feed:
    ...     async for message in feed:
    ...         message.ack()
    """
    info = await consumers.info(connection, stream, consumer)
    own_group = only_group(info)
    if group is not None and check_group(group) != own_group:
        raise InvalidInput(f"consumer {consumer!r} has the priority group {own_group!r}, not {group!r}")
    pin_options = {"reset_on_takeover": reset_on_takeover, "on_pinned": on_pinned, "on_unpinned": on_unpinned}
    check_terms(
        info.config.priority_policy,
        min_pending=min_pending,
        min_ack_pending=min_ack_pending,
        priority=priority,
        pin_options=[name for name, value in pin_options.items() if value is not None],
    )
    fields: dict[str, Any] = {"group": own_group}
    terms = {"min_pending": min_pending, "min_ack_pending": min_ack_pending, "priority": priority}
    fields.update({name: value for name, value in terms.items() if value is not None})
    pin, longest_s = None, _DEFAULTS.expires_s
    if info.config.priority_policy == "pinned_client":
        timeout_s = info.config.priority_timeout_s or SERVER_PIN_TIMEOUT_S
        longest_s = min(longest_s, timeout_s / 2)
        if expires_s is not None:
            check_expiry(expires_s, timeout_s)
        pin = PinOptions(
            group=own_group,
            timeout_s=timeout_s,
            reset_on_takeover=_wants_reset(connection, reset_on_takeover),
            on_pinned=on_pinned,
            on_unpinned=on_unpinned,
        )
    expires_s = longest_s if expires_s is None else expires_s
    options = FeedOptions(
        max_messages=max_messages,
        max_bytes=max_bytes,
        expires_s=expires_s,
        heartbeat_s=min(_DEFAULTS.heartbeat_s, expires_s / 2) if heartbeat_s is None else heartbeat_s,
        pull_fields=fields,
        pin=pin,
        on_messages=on_messages,
        on_notice=on_notice,
        on_demand=on_demand,
    )
    return await open_feed(connection, stream, consumer, options)


@awaitable_context
async def open_fetcher(connection: Connection, stream: str, consumer: str, **terms: Any) -> Feed:
    """A reader that pulls only when its `fetch(batch, timeout_s)` is called. Terms as for `consume`.

    With pinned_client the first fetch that is served takes the pin, and the fetcher keeps it while it is open, also
    between fetches, as long as this process runs: an open, idle fetcher keeps every other reader waiting.

    >>> async with open_fetcher(connection, "JOBS", "workers") as fetcher:
    ...     for message in await fetcher.fetch(100, timeout_s=2):
    ...         message.ack()
    """
    return await consume(connection, stream, consumer, on_demand=True, **terms)


async def fetch(
    connection: Connection, stream: str, consumer: str, batch: int, *, timeout_s: float, **terms: Any
) -> list[Message]:
    """Fetch one batch, without keeping state. Not for pinned_client, whose pin must outlive the batch."""
    info: ConsumerInfo = await consumers.info(connection, stream, consumer)
    if info.config.priority_policy == "pinned_client":
        raise InvalidInput(
            f"consumer {consumer!r} is pinned_client: use open_fetcher, which keeps the pin while the batch is at work"
        )
    async with open_fetcher(connection, stream, consumer, **terms) as fetcher:
        return await fetcher.fetch(batch, timeout_s)


def _wants_reset(connection: Connection, asked: bool | None) -> bool:
    if asked:
        connection.require("consumer_reset")
    return connection.supports("consumer_reset") if asked is None else asked
