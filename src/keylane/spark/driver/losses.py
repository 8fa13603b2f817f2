"""What happens when messages are gone that should have been read: the query fails, or goes on and keeps count."""

from __future__ import annotations

import logging

from keylane.errors import DataLost
from keylane.spark.driver.offsets import Loss

_log = logging.getLogger("keylane.spark")


class Losses:
    """The losses of one query. `fatal` is `failOnDataLoss`."""

    def __init__(self, *, fatal: bool) -> None:
        self.fatal = fatal
        self.count = 0
        """Messages lost so far, at most; those that nobody can count are not in it."""
        self._last: Loss | None = None

    def report(self, loss: Loss) -> None:
        """Raise `DataLost`, or log it once: the same loss is met again when the batch is planned."""
        if self.fatal:
            raise DataLost(told(loss))
        if loss == self._last:
            return
        self._last = loss
        self.count += loss.count or 0
        _log.warning("%s. The query goes on (failOnDataLoss=false); %d lost so far, at most", loss, self.count)


def told(loss: Loss) -> str:
    return (
        f"{loss}. The query has not read them. Set failOnDataLoss=false to go on with what there is, or start anew "
        "with another checkpoint directory"
    )
