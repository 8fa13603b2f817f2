"""Tells when one key has come to hold half of all that may be in flight: soon nothing else is delivered."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

from keylane.core.lanes import Lanes
from keylane.groups.handler_options import Crowded
from keylane.groups.message import GroupMessage

_log = logging.getLogger("keylane.groups")

_LOOK_EVERY_S = 0.1


class CrowdedLanes:
    """Looks for lanes that hold at least `crowd` messages, and tells of each once, until it does not any more."""

    def __init__(self, crowd: int, on_crowded: Crowded | None) -> None:
        self._crowd = crowd
        self._on_crowded = on_crowded
        self._known: dict[Hashable, int] = {}
        self._looked_at = 0.0

    def look_soon(self, lanes: Lanes[GroupMessage]) -> None:
        """For whoever calls often."""
        if len(lanes) >= self._crowd and time.monotonic() > self._looked_at + _LOOK_EVERY_S:
            self.look(lanes)

    def look(self, lanes: Lanes[GroupMessage]) -> None:
        if len(lanes) < self._crowd:
            return
        self._looked_at = time.monotonic()
        before = self._known
        self._known = {key: length for key, length in lanes.lengths().items() if length >= self._crowd}
        for key, length in self._known.items():
            if key not in before:
                self._tell(next(entry.item for entry in lanes if entry.key == key), length)

    def _tell(self, message: GroupMessage, length: int) -> None:
        _log.warning(
            "%d messages of key %r wait in one lane, half of all that may be in flight: soon nothing else is "
            "delivered. Raise max_ack_pending, or make its handler quicker",
            length,
            message.key,
        )
        if self._on_crowded is not None:
            try:
                self._on_crowded(message, length)
            except Exception:  # noqa: BLE001 - a hook may raise anything
                _log.exception("the hook on_crowded failed")
