"""Parked keys: which of them a partition has while one owner handles it, and the subjects that they are stored under.

A key is parked when one of its messages had all its tries. From then on its messages are stored behind that one, in
order, until somebody releases the key. `ParkedKeys` answers for each message whether it runs, is stored behind others,
or was already handled; and when a key that is being released has nothing left and may go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from hashlib import blake2b
from typing import Literal, get_args

from keylane.errors import InvalidInput

_TOKEN_BYTES = 16


def key_token(key: str) -> str:
    """A key as one token of a subject. Keys may hold anything and be long, so it is a digest."""
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=_TOKEN_BYTES).hexdigest()


def parked_subject(stream: str, group: str, token: str) -> str:
    """Of the parked messages of a key; `*` for those of all keys."""
    return f"keylane.dlq.{stream}.{group}.parked.{token}"


def release_subject(stream: str, group: str, token: str) -> str:
    """Of the wish that a key be released."""
    return f"keylane.dlq.{stream}.{group}.release.{token}"


def fence_subject(stream: str, group: str, partition: str) -> str:
    """Of the record of the newest owner of a partition: nobody else may park its keys."""
    return f"keylane.dlq.{stream}.{group}.fence.{partition}"


class KeyGate(Enum):
    """What becomes of a message before its handler is called."""

    RUN = auto()
    PARK = auto()
    """Its key is parked: store it behind the others."""
    SKIP = auto()
    """It was handled when its key was released."""


AfterTries = Literal["dead_letter", "park"]
"""What becomes of a message that had all its tries."""


def check_after_tries(after_tries: str, *, max_tries: int | None, order: str, manual_ack: bool) -> None:
    if after_tries not in get_args(AfterTries):
        raise InvalidInput(f"after_tries is {after_tries!r}: use one of {', '.join(get_args(AfterTries))}")
    if after_tries != "park":
        return
    if max_tries is None:
        raise InvalidInput("after_tries='park' needs max_tries: without it a message is tried for ever")
    if order != "key" or manual_ack:
        raise InvalidInput("after_tries='park' needs order='key' and no manual_ack: a key is parked, in its order")


class ParkedKeys:
    """The parked keys of one partition, by their tokens."""

    __slots__ = ("_behind", "_handled", "_newest", "_stores")

    def __init__(self, tokens: Iterable[str]) -> None:
        self._newest: dict[str, int | None] = dict.fromkeys(tokens)
        """The newest sequence that is stored for each parked key; None: not read yet."""
        self._behind: dict[str, int] = {}
        """How many messages are on their way to be stored behind a parked key."""
        self._stores: dict[str, int] = {}
        self._handled: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<ParkedKeys {len(self._newest)} parked>"

    def __len__(self) -> int:
        return len(self._newest)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._newest))

    def __contains__(self, token: str) -> bool:
        return token in self._newest

    @property
    def is_plain(self) -> bool:
        """Whether every message may run: nothing is parked here, and nothing was released."""
        return not self._newest and not self._handled

    def gate(self, token: str, sequence: int) -> KeyGate:
        """What becomes of the next message of a key. For `PARK` call `stored` when it is."""
        if sequence <= self._handled.get(token, 0):
            return KeyGate.SKIP
        if token not in self._newest:
            return KeyGate.RUN
        self._behind[token] = self._behind.get(token, 0) + 1
        return KeyGate.PARK

    def newest(self, token: str) -> int | None:
        """The newest stored sequence of a key: 0 if it is not parked, None if it was not read yet."""
        return self._newest.get(token, 0)

    def stored(self, token: str, sequence: int, *, behind: bool) -> None:
        """A message of the key is stored: the key is parked."""
        self._newest[token] = max(sequence, self._newest.get(token) or 0)
        self._stores[token] = self._stores.get(token, 0) + 1
        if behind and self._behind.get(token):
            self._behind[token] -= 1

    def stores(self, token: str) -> int:
        """How often something was stored for the key: read it before you look what is stored."""
        return self._stores.get(token, 0)

    def handled(self, token: str, sequence: int) -> None:
        """A released message was handled: if it is delivered again, it does not run again."""
        self._handled[token] = max(sequence, self._handled.get(token, 0))

    def found_empty(self, token: str, stores: int) -> bool:
        """Nothing was stored for the key any more, by a look that began at this number of `stores`.

        Returns whether its messages run again: not while one is on its way to be stored.
        """
        if self._behind.get(token) or stores != self.stores(token):
            return False
        self._newest.pop(token, None)
        self._behind.pop(token, None)
        return True
