"""`keylane.App`: the front door. Handlers by decoration, with typed payloads, on fleets or groups.

`app` has `App`; `handler` one decorated function, with its `signatures`, `payloads` and `publishing`; `running` joins.
"""

from __future__ import annotations

from keylane.app.app import App
from keylane.app.handler import AppHandler
from keylane.app.publishing import Publish, Results, SubjectTemplate, message_id
from keylane.app.running import RunningApp
from keylane.core.partitions import PartitionBy
from keylane.core.run_state import RunState
from keylane.lazy import public_names
from keylane.processing.handler_hooks import HandlerHooks
from keylane.processing.message import GroupMessage

Message = GroupMessage

__all__ = [
    "App",
    "AppHandler",
    "HandlerHooks",
    "Message",
    "PartitionBy",
    "Publish",
    "Results",
    "RunState",
    "RunningApp",
    "SubjectTemplate",
    "message_id",
]

__dir__ = public_names(__all__)
