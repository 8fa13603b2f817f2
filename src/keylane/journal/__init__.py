"""The journal: what the members of a group did with every message, in a separate stream."""

from keylane.core.journal_record import (
    OUTCOMES,
    BatchHead,
    JournalBatch,
    JournalRecord,
    Outcome,
    PinTenure,
    in_sample,
    open_batch,
)
from keylane.journal.reader import open_stored, read_batches, read_journal
from keylane.journal.stream import DEFAULT_MAX_AGE_S, journal_stream, journal_subject
from keylane.journal.writer import Journal
from keylane.lazy import public_names

Tenure = PinTenure

__all__ = [
    "DEFAULT_MAX_AGE_S",
    "OUTCOMES",
    "BatchHead",
    "Journal",
    "JournalBatch",
    "JournalRecord",
    "Outcome",
    "PinTenure",
    "Tenure",
    "in_sample",
    "journal_stream",
    "journal_subject",
    "open_batch",
    "open_stored",
    "read_batches",
    "read_journal",
]

__dir__ = public_names(__all__)
