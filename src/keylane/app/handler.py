"""One handler of an app: what it was decorated with, checked, and the function that a group or a fleet calls for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from keylane.app.process_handler import ProcessHandler
from keylane.app.publishing import Results, SubjectTemplate
from keylane.app.signatures import HandlerSignature, payload_call
from keylane.core.fleet_names import check_fleet_name
from keylane.core.names import check_member_name, check_stream_name
from keylane.core.partitions import PartitionBy, check_partition_count
from keylane.core.retry_delays import check_retry_delays, total_tries
from keylane.dispatch import check_executor
from keylane.errors import InvalidInput
from keylane.processing.handler_hooks import HandlerHooks
from keylane.processing.handler_options import Handler
from keylane.processing.message import GroupMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class AppHandler:
    """A decorated handler."""

    stream: str
    group: str
    function: Callable[..., Any]
    signature: HandlerSignature
    partition_by: PartitionBy | None
    """None: as the stream's transform, or the group, says."""
    partitions: int | None
    member: str | None
    """A static or elastic group is joined as this member; None: a fleet, whose workers share by themselves."""
    publish: SubjectTemplate | None
    hooks: HandlerHooks = field(default_factory=HandlerHooks)
    options: dict[str, Any] = field(default_factory=dict)
    """Those of `fleet.join` and of `groups.join` alike."""

    @property
    def name(self) -> str:
        return f"{self.stream}/{self.group}"

    def check(self) -> None:
        check_stream_name(self.stream)
        check_fleet_name(self.group)
        if self.member is not None:
            check_member_name(self.member)
            if self.partition_by is not None or self.partitions is not None:
                raise InvalidInput(
                    f"member={self.member!r} joins a static or elastic group, which has its partitions already: leave "
                    "out partition_by and partitions, or leave out member for a fleet"
                )
        if self.partitions is not None:
            check_partition_count(self.partitions)
            if self.partition_by is None:
                raise InvalidInput(
                    f"partitions={self.partitions} says how many: say of what with partition_by='orders.*'"
                )
        if type(self.hooks) is not HandlerHooks:
            raise InvalidInput(f"hooks is {self.hooks!r}: give keylane.app.HandlerHooks(…)")
        if self.publish is not None and self.partition_by is not None:
            self.publish.check_against(self.partition_by)
        if (delays := self.options.get("retry_delays")) is not None:
            total_tries(delays, self.options.get("max_tries"))
            check_retry_delays(
                after_tries=self.options.get("after_tries", "dead_letter"),
                order="key",
                manual_ack=False,
                acks=True,
                needs_order=getattr(self.function, "needs_order", False),
            )
        self._check_executor()

    def _check_executor(self) -> None:
        in_process = self.options.get("executor") == "process"
        check_executor(self.options.get("executor", "thread"))
        if in_process and self.signature.is_async:
            raise InvalidInput(
                f"handler {self.signature.name} is async, and executor='process' is for plain functions: leave it out"
            )
        if in_process and "<locals>" in self.signature.name:
            raise InvalidInput(
                f"handler {self.signature.name} is defined in a function, where another process cannot import it: with "
                "executor='process', define it at the top level of a module"
            )
        if self.options.get("time_limit_s") is not None and not self.signature.is_async and not in_process:
            raise InvalidInput(
                "time_limit_s needs an async handler or executor='process': a plain one runs in a thread, which "
                "nothing can end"
            )

    def bound(self, results: Results | None, *, may_leave: bool = True) -> Handler:
        """The function of a message that is handed to `join`. `results`: for a handler that publishes.

        `may_leave`: with `executor="process"` it is one that can be sent to another process.
        """
        call = payload_call(self.function, self.signature)
        if may_leave and self.options.get("executor") == "process":
            return cast("Handler", ProcessHandler(self.function, call, results))  # what it returns is taken from it
        if results is None:
            return _async_call(call) if self.signature.is_async else call
        prepared = results.prepared
        if self.signature.is_async:

            async def run(message: GroupMessage) -> None:
                result = await call(message)
                if result is not None:
                    await prepared(message, result)

            return run

        def run_in_thread(message: GroupMessage) -> Any:
            result = call(message)
            return prepared(message, result) if result is not None else None

        return run_in_thread


def _async_call(call: Callable[[GroupMessage], Any]) -> Handler:
    async def run(message: GroupMessage) -> None:
        await call(message)

    return run
