"""One process that starts worker processes, watches them, starts them again, and ends them.

`supervisor` decides about all of them, `child_process` has one, `child` is what runs in it. What a worker does is its
target: an async function `module:function` that gets a `SupervisorLink` and its settings.
"""

from __future__ import annotations

from keylane.supervisor.child import SupervisorLink
from keylane.supervisor.child_process import ChildProcess
from keylane.supervisor.supervisor import Supervisor, SupervisorTarget

__all__ = ["ChildProcess", "Supervisor", "SupervisorLink", "SupervisorTarget"]
