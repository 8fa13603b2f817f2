"""Messages that are gone before a query has read them: the query fails, or goes on and counts them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from keylane.errors import DataLost


@dataclass(frozen=True, slots=True)
class Loss:
    """What should still have been read and is gone: `first` to `last`, or an unknown number from `first` on."""

    kind: Literal["trimmed", "recreated", "cut short"]
    why: str
    first: int
    last: int | None = None

    @property
    def count(self) -> int | None:
        """How many messages at most; None where it is unknown."""
        return None if self.last is None else self.last - self.first + 1

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.why}; what came after sequence {self.first - 1} in it is gone"
        return f"{self.why}; sequences {self.first} to {self.last}, at most {self.count} messages, are gone"


_log = logging.getLogger("keylane.spark")


class Losses:
    """The losses of one query. `fatal` is `failOnDataLoss`."""

    def __init__(self, *, fatal: bool) -> None:
        self.fatal = fatal
        self.count = 0
        """Messages lost so far, at most; unknown numbers are not included."""
        self._last: Loss | None = None

    def report(self, loss: Loss) -> None:
        """Raise `DataLost`, or log it once: planning the batch finds the same loss again."""
        if self.fatal:
            raise DataLost(told(loss))
        if loss == self._last:
            return
        self._last = loss
        self.count += loss.count or 0
        _log.warning("%s. The query goes on (failOnDataLoss=false); %d lost so far, at most", loss, self.count)


def told(loss: Loss) -> str:
    return (
        f"{loss}. The query has not read them. Set failOnDataLoss=false to go on with what there is, or start "
        "again with another checkpoint directory"
    )
