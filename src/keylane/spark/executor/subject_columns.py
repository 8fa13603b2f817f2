"""Subject, partition and key of every row, worked out once for each distinct subject."""

from __future__ import annotations

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.core.partitions import strip_partition
from keylane.errors import InvalidInput
from keylane.spark.executor.slices import numbers, texts
from keylane.spark.executor.split import Reading

_MOST_KEPT = 100_000

Place = tuple[str, int | None, str | None]
"""Subject without its number, partition, key."""


class SubjectColumns:
    """Knows the subjects of one split."""

    def __init__(self, reading: Reading) -> None:
        self._numbered = reading.numbered
        self._partitioning = reading.partitioning
        self._places: dict[bytes, Place] = {}

    def __call__(self, stored: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
        """The columns subject, partition and key."""
        encoded = stored.dictionary_encode()
        known = self._places
        if len(known) > _MOST_KEPT:
            known.clear()
        places = [known.get(one) or self._place(one) for one in encoded.dictionary.to_pylist()]
        subjects, partitions, keys = zip(*places, strict=True)
        numbered = np.fromiter((-1 if one is None else one for one in partitions), np.int32, len(places))
        rows = encoded.indices
        return (
            texts(subjects).take(rows),
            numbers(numbered, numbered >= 0).take(rows),
            texts(keys).take(rows),
        )

    def _place(self, stored: bytes) -> Place:
        subject, partition, key = self._look_up(stored.decode("utf-8", "surrogateescape"))
        self._places[stored] = place = (_shown(subject), partition, None if key is None else _shown(key))
        return place

    def _look_up(self, stored: str) -> Place:
        """Subjects that no partitioning knows have no key and no partition: they are data, not mistakes."""
        subject, partition = stored, None
        if self._numbered:
            try:
                partition, subject = strip_partition(stored)
            except InvalidInput:
                return stored, None, None
        for one in self._partitioning:
            try:
                key = one.key(subject)
            except InvalidInput:
                continue
            return subject, one.partition(subject) if partition is None else partition, key
        return subject, partition, None


def _shown(text: str) -> str:
    """Text for a column: what is not UTF-8 is written with backslashes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
