"""Delayed retries: when a failed message is tried again off its lane, how often, and the subjects that it waits on.

A message waits as a schedule of the server. Of a subject the server keeps one schedule, so every try of every message
has a subject of its own; what is due comes on one subject for each partition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from keylane.errors import InvalidInput

_LONGEST_S = 365 * 86_400.0


def checked_delays(retry_delays: Sequence[float] | None) -> tuple[float, ...] | None:
    """The delays as numbers; None for none.

    >>> checked_delays([5, 60, 600])
    (5.0, 60.0, 600.0)
    """
    if retry_delays is None:
        return None
    if isinstance(retry_delays, str | bytes) or not isinstance(retry_delays, Sequence) or not retry_delays:
        raise InvalidInput(f"retry_delays is {retry_delays!r}: give seconds, one for each retry, such as (5, 60, 600)")
    for one in retry_delays:
        is_number = isinstance(one, int | float) and not isinstance(one, bool)
        if not is_number or not math.isfinite(one) or not 0 < one <= _LONGEST_S:
            raise InvalidInput(f"retry_delays has {one!r}: give seconds above 0, and at most a year")
    return tuple(float(one) for one in retry_delays)


def total_tries(delays: Sequence[float], max_tries: int | None) -> int:
    """How often a message is tried in all: once for each delay after the first try, or as `max_tries` says."""
    if max_tries is None:
        return len(delays) + 1
    if max_tries <= len(delays):
        raise InvalidInput(
            f"max_tries is {max_tries}, and retry_delays has {len(delays)} delays for the retries after the first try: "
            f"leave out max_tries, or give at least {len(delays) + 1}; then the last delay counts for all others"
        )
    return max_tries


def delay_after(delays: Sequence[float], tries: int) -> float:
    """The seconds before the next try, after so many; the last delay counts for all others."""
    return delays[min(tries, len(delays)) - 1]


def check_retry_delays(*, after_tries: str, order: str, manual_ack: bool, acks: bool, needs_order: bool) -> None:
    """Refuse what promises more order than delayed retries keep, and what leaves them nothing to decide."""
    if after_tries == "park":
        raise InvalidInput(
            "retry_delays lets later messages of a key pass a failed one, and after_tries='park' lets none pass: "
            "choose one of them"
        )
    if needs_order:
        raise InvalidInput(
            "this handler needs each key's messages in order, and retry_delays lets later ones pass a failed one: "
            "leave out retry_delays, and it is tried again in its place"
        )
    if order == "strict":
        raise InvalidInput("retry_delays lets later messages pass a failed one, and order='strict' none: choose one")
    if manual_ack or not acks:
        raise InvalidInput(
            "retry_delays needs messages that are acked when their handler returns: leave out manual_ack"
        )


def retry_subjects(stream: str, group: str) -> str:
    """Everything that waits for a retry, or is due, of one group; of all groups with `*`."""
    return f"keylane.retry.{stream}.{group}.>"


def waiting_subject(stream: str, group: str, sequence: int, stored_ns: int, tries: int) -> str:
    """Where a message waits after so many tries. A stream that is created again counts from 1: the time tells."""
    return f"keylane.retry.{stream}.{group}.waiting.{sequence}.{stored_ns}.{tries}"


def due_subject(stream: str, group: str, partition: int | str) -> str:
    """Where it comes when its time has come."""
    return f"keylane.retry.{stream}.{group}.due.{partition}"
