"""What one task reads: a range of one stream, whole or through a filter. Travels from the driver to an executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyspark.sql.datasource import InputPartition

from keylane.core.partitions import Partitioning
from keylane.spark.address import Address

Way = Literal["consumer", "direct"]
"""An ordered consumer without acks, or batch direct get: a work queue allows only the latter."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What all splits of a batch have in common."""

    address: Address
    stream: str
    way: Way
    numbered: bool
    """Stored subjects begin with a partition number, which rows show as `partition` and not in `subject`."""
    partitioning: tuple[Partitioning, ...] = ()
    """Tells the key of a subject without its number; where not `numbered`, its partition too. Empty: no keys."""
    with_headers: bool = False
    with_data: bool = True
    """False: payloads are left out, at the server where it can, and the column `data` is null."""


class Split(InputPartition):
    """The messages of (after, upto] that match `subject_filter`, in order of their sequence."""

    def __init__(
        self,
        reading: Reading,
        after: int,
        upto: int,
        subject_filter: str | None,
        last: int,
        *,
        created: str | None = None,
        head_may_go: bool = False,
    ) -> None:
        self.reading = reading
        self.after = after
        self.upto = upto
        self.subject_filter = subject_filter
        self.last = last
        """What the stream's leader named as the newest message of this filter when the split was planned.

        Up to `upto` the reader must see it; beyond, it must see something beyond. Otherwise the replica that answered
        lags behind, or the message was deleted meanwhile, which only the leader can say.
        """
        self.created = created
        """When the stream was made that the split was planned for, as the server tells it; None: not compared."""
        self.head_may_go = head_may_go
        """The read starts with whatever the stream begins with: nothing is lost if that is trimmed meanwhile."""

    def __repr__(self) -> str:
        return f"<Split {self.reading.stream} ({self.after}, {self.upto}] {self.subject_filter or 'whole'}>"
