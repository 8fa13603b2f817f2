"""Whether a coordination log's topic is still the one that was opened.

Owns: looking at it now and then, beside the reading, and the verdict. A topic that was deleted, made anew or given
partitions does not come back: whoever uses it is told from then on.
"""

from __future__ import annotations

import asyncio
import logging

from keylane.errors import BrokerUnavailable, KeylaneError, LogReplaced, NoSuchTopic
from keylane.kafka.client import KafkaLink
from keylane.kafka.topic import LogTopic, describe

_log = logging.getLogger("keylane.kafka")

_BELIEVED_GONE_S = 3.0
"""How long brokers must not know the topic before it counts as deleted: one that starts may not know it yet."""


class TopicWatch:
    """Looks at a topic at most every `between_s`, when it is used."""

    def __init__(self, link: KafkaLink, topic: LogTopic, between_s: float) -> None:
        self._link = link
        self._topic = topic
        self._between_s = between_s
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._looking: asyncio.Task[None] | None = None
        self._unknown_since: float | None = None
        self._verdict: str | None = None

    def check(self) -> None:
        """`LogReplaced` if it is known to be another one. Begins to look if it is time to; does not wait for that."""
        if self._verdict is not None:
            raise LogReplaced(self._verdict)
        if self._looking is None and self._loop.time() > self._began_at + self._between_s:
            self._begin()

    async def look(self) -> None:
        """Look now. `BrokerUnavailable` if the topic is not known, and that may pass."""
        await asyncio.shield(self._looking or self._begin())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    def _begin(self) -> asyncio.Task[None]:
        self._began_at = self._loop.time()
        looking = self._looking = asyncio.create_task(self._look())
        looking.add_done_callback(_told_elsewhere)
        return looking

    async def _look(self) -> None:
        try:
            self._compare(await describe(self._link, self._topic.name))
        except NoSuchTopic as error:
            self._is_unknown(error)
        finally:
            self._looking = None
        if self._verdict is not None:
            raise LogReplaced(self._verdict)

    def _compare(self, found: LogTopic) -> None:
        self._unknown_since = None
        if found.topic_id != self._topic.topic_id:
            self._verdict = (
                f"coordination log {found.name!r} was made anew: what was claimed in the old one is void; stop all its "
                "consumers and start them again"
            )
        elif found.partitions != self._topic.partitions:
            self._verdict = (
                f"coordination log {found.name!r} had {self._topic.partitions} partitions and has {found.partitions}: "
                "the number decides where claims are kept; stop all its consumers, and start them on a new topic"
            )

    def _is_unknown(self, error: NoSuchTopic) -> None:
        name, now = self._topic.name, self._loop.time()
        if self._unknown_since is None:
            self._unknown_since = now
        if now - self._unknown_since <= _BELIEVED_GONE_S:
            raise BrokerUnavailable(f"coordination log {name!r} is not known for the moment: {error}") from error
        self._verdict = f"coordination log {name!r} was deleted; stop all its consumers"


def _told_elsewhere(look: asyncio.Task[None]) -> None:
    """What a look found is kept, and trouble with the brokers shows in every other call as well."""
    if not look.cancelled() and (error := look.exception()) is not None:
        if not isinstance(error, KeylaneError):
            raise error
        _log.info("looking at the coordination log: %s", error)
