"""keylane: every key its own ordered lane, on NATS JetStream.

Public names are loaded when they are first used: `import keylane` alone must not cost the import of the
NATS client, which takes longer than everything else a command line needs to answer `--help`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.lazy import loader

if TYPE_CHECKING:
    from keylane.app import App, Message, PartitionBy
    from keylane.jetstream import Connection, connect
    from keylane.loop import run

__version__ = "0.1.0"

__all__ = ["App", "Connection", "Message", "PartitionBy", "__version__", "connect", "run"]

_HOMES = {
    "App": "keylane.app",
    "Connection": "keylane.jetstream",
    "Message": "keylane.app",
    "PartitionBy": "keylane.app",
    "connect": "keylane.jetstream",
    "run": "keylane.loop",
}


if not TYPE_CHECKING:  # a type checker that saw this would take every misspelt name for good
    __getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
