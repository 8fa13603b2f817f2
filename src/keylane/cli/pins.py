"""The pin of a consumer: which client holds it, and which one gets it next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keylane.jetstream import ConsumerInfo, PriorityGroupState
    from keylane.priority import Pinned, Unpinned

NEXT_PIN_S = 1.0


def pin_of(info: ConsumerInfo) -> PriorityGroupState | None:
    """The state of the pin, or None if the policy has no pin."""
    if info.config.priority_policy != "pinned_client" or not info.priority_groups:
        return None
    return info.priority_groups[0]


async def next_pin(events: AsyncIterator[Pinned | Unpinned]) -> str | None:
    """The id that the server pins next, or None if that takes longer than `NEXT_PIN_S`."""
    from keylane.priority import Pinned

    try:
        async with asyncio.timeout(NEXT_PIN_S):
            async for event in events:
                if isinstance(event, Pinned):
                    return event.pin_id
    except TimeoutError:
        return None
    return None
