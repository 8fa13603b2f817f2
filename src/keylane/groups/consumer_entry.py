"""Entering a member's consumer: it is created, or the one that is there is joined.

Instances of a member may have been started with different settings, or for an older membership. Whoever comes later
never rewrites a consumer that another instance reads. Reads no message.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from keylane.errors import ApiError, GroupConflict
from keylane.groups import consumer_spec
from keylane.groups.consumer_requests import NOT_CHANGEABLE, RemoteConsumer, StreamFacts, has_lost_its_files, pinned
from keylane.jetstream import ConsumerConfig, ConsumerInfo

_log = logging.getLogger("keylane.groups")

_EXISTS_DIFFERENTLY = 10148


@dataclass(frozen=True, slots=True)
class Entered:
    """The consumer may be read."""

    consumer: ConsumerInfo
    stream: StreamFacts
    stream_is_new: bool
    """The stream was deleted and made again since the last time: it counts from 1."""
    joined: bool = False
    """The consumer was there before, with filters of its own."""


@dataclass(frozen=True, slots=True)
class Later:
    """Not now: try again after the delay."""

    delay_s: float
    waiting_for: str | None = None


class ConsumerEntry:
    """The way of one instance to its member's consumer."""

    def __init__(self, consumer: RemoteConsumer, is_current: Callable[[], Awaitable[bool]]) -> None:
        """`is_current`: whether what is asked for is still what the group says."""
        self._consumer = consumer
        self._is_current = is_current
        self._stream: StreamFacts | None = None
        self._told_difference = ""

    async def enter(self, wanted: ConsumerConfig) -> Entered | Later:
        try:
            info = await self._consumer.create(wanted)
        except ApiError as error:
            if error.err_code == _EXISTS_DIFFERENTLY or has_lost_its_files(error):
                return await self._meet(wanted)
            raise
        entered = await self._entered(info)
        if entered.stream.clustered and wanted.durable_name is None and not await self._is_current():
            # A cluster lets two members make overlapping consumers at the same moment. One of the two is of an older
            # membership: that one goes before it has pulled anything.
            await self._consumer.delete_unless_in_use()
            return Later(0.0)
        return entered

    async def _entered(self, info: ConsumerInfo, *, joined: bool = False) -> Entered:
        before, self._stream = self._stream, await self._consumer.stream_facts()
        is_new = before is not None and before.made != self._stream.made
        if is_new:
            _log.warning("stream %s was made anew", self._consumer.stream)
        return Entered(info, self._stream, is_new, joined)

    async def _meet(self, wanted: ConsumerConfig) -> Entered | Later:
        """The consumer exists, made with other settings: of an older membership, or by an instance that differs."""
        info = await self._consumer.info()
        different = consumer_spec.difference(wanted, info.config)
        if different is None:
            return await self._entered(info, joined=True)
        if not info.num_waiting and not pinned(info):
            return await self._adopt(wanted, info, different)
        _log.log(
            logging.DEBUG if different == self._told_difference else logging.ERROR,
            "another instance runs on %s with other settings (%s); waiting until it is gone. Give all instances of a "
            "member the same settings",
            self._consumer,
            different,
        )
        self._told_difference = different
        return Later(_patience_s(wanted), f"another instance to end, which has other settings ({different})")

    async def _adopt(self, wanted: ConsumerConfig, info: ConsumerInfo, different: str) -> Later:
        """No instance reads the consumer any more: it gets our settings."""
        try:
            await self._consumer.update(replace(wanted, filter_subjects=info.config.filter_subjects))
        except ApiError as error:
            if error.err_code != NOT_CHANGEABLE:
                raise
            if wanted.durable_name is None:  # it goes away by itself
                return Later(
                    _patience_s(wanted),
                    f"the server to delete the old consumer, which has other settings ({different})",
                )
            raise GroupConflict(
                f"consumer {self._consumer.name!r} of stream {self._consumer.stream!r} was made with other settings "
                f"({different}), which the server cannot change: use those settings, or delete the consumer"
            ) from error
        _log.warning("%s has this instance's settings now; before, %s", self._consumer, different)
        return Later(0.0)


def _patience_s(wanted: ConsumerConfig) -> float:
    return wanted.priority_timeout_s or consumer_spec.DEFAULT_ACK_WAIT_S
