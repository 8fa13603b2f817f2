"""keylane: every key its own ordered lane, on NATS JetStream.

Public names are loaded when they are first used: `import keylane` alone must not cost the import of the
NATS client, which takes longer than everything else a command line needs to answer `--help`.
"""

from __future__ import annotations

from keylane.lazy import loader, public_names

TYPE_CHECKING = False  # that of `typing` costs its import, which takes longer than Python's start
if TYPE_CHECKING:
    from keylane import (
        app,
        dead_letters,
        errors,
        exactly_once,
        fleet,
        groups,
        jetstream,
        journal,
        kafka,
        marshal,
        metrics,
        priority,
        server,
        spark,
        testing,
    )
    from keylane.app import App, Message, PartitionBy
    from keylane.jetstream import Connection, Publisher, connect, publish, streams
    from keylane.loop import run

__version__ = "0.1.0"

__all__ = [
    "App",
    "Connection",
    "Message",
    "PartitionBy",
    "Publisher",
    "__version__",
    "app",
    "connect",
    "dead_letters",
    "errors",
    "exactly_once",
    "fleet",
    "groups",
    "jetstream",
    "journal",
    "kafka",
    "marshal",
    "metrics",
    "priority",
    "publish",
    "run",
    "server",
    "spark",
    "streams",
    "testing",
]

_HOMES = {
    **dict.fromkeys(__all__, __name__),
    **dict.fromkeys(("App", "Message", "PartitionBy"), "keylane.app"),
    **dict.fromkeys(("Connection", "Publisher", "connect", "publish", "streams"), "keylane.jetstream"),
    "run": "keylane.loop",
}


if not TYPE_CHECKING:  # a type checker that saw this would take every misspelt name for good
    __getattr__ = loader(__name__, _HOMES)

__dir__ = public_names(__all__)
