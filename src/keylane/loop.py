"""`keylane.run`: asyncio.run, on uvloop where it is installed (`pip install keylane[fast]`).

With one message in flight every message costs a full turn of the event loop, and uvloop's turn is twice as quick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program's main coroutine.

    >>> keylane.run(main())
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
