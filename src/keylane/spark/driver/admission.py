"""How much of what is there one micro-batch takes. Pure."""

from __future__ import annotations

from keylane.spark.driver.offsets import Stand


def admit(after: int, stand: Stand, *, max_offsets: int | None = None, max_bytes: int | None = None) -> int:
    """Where a batch that begins behind `after` ends: within both limits, but always one sequence further.

    Bytes are counted by the stream's average of bytes per sequence, so a batch of unusually large messages is larger
    than the limit.

    >>> stand = Stand("ORDERS", "", first=1, last=1000, messages=1000, bytes=100_000)
    >>> admit(10, stand, max_offsets=50), admit(10, stand, max_bytes=2_000), admit(990, stand, max_offsets=50)
    (60, 30, 1000)
    """
    end = stand.last
    if max_offsets is not None:
        end = min(end, after + max_offsets)
    if max_bytes is not None and stand.bytes:
        sequences = max_bytes * (stand.last - stand.first + 1) // stand.bytes
        end = min(end, after + max(1, sequences))
    return max(after, end)
