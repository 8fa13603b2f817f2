"""`App`: handlers by decoration, and everything that is needed to run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from keylane.app.handler import AppHandler
from keylane.app.publishing import SubjectTemplate
from keylane.app.running import HooksOf, Lifespan, RunningApp, called, start_handlers
from keylane.app.signatures import read_signature
from keylane.awaitable_context import awaitable_context
from keylane.core.parked_keys import AfterTries
from keylane.core.partitions import PartitionBy
from keylane.core.retry_delays import checked_delays
from keylane.dispatch import Executor
from keylane.errors import InvalidInput
from keylane.jetstream import Connection, check_seconds, connect
from keylane.loop import run
from keylane.processing.handler_hooks import HandlerHooks
from keylane.processing.joined import STOP_TIMEOUT_S

Function = TypeVar("Function", bound=Callable[..., Any])
LifespanFunction = TypeVar("LifespanFunction", bound=Lifespan)


class App:
    """Handlers of streams. Each copy of the program that runs shares the partitions with the others.

    >>> app = keylane.App("nats://127.0.0.1:4222")
    >>> @app.handler("ORDERS", group="billing", partition_by="orders.*", partitions=32)
    ... async def bill(order: Order, message: keylane.Message) -> None: ...
    >>> app.run()
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        create_streams: bool = False,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        **connection: Any,
    ) -> None:
        """`create_streams`: a stream that does not exist is created, with the partitions of its first handler. An
        existing one is never changed. `connection`: the other arguments of `keylane.connect`.
        """
        self.url = url
        self.create_streams = create_streams
        self.stop_timeout_s = check_seconds(stop_timeout_s, "stop_timeout_s")
        self.connection_options = connection
        self.handlers: dict[tuple[str, str], AppHandler] = {}
        """By stream and group."""
        self.starting: list[Lifespan] = []
        self.stopping: list[Lifespan] = []
        """What `on_start` and `on_stop` have added."""

    def __repr__(self) -> str:
        return f"<App {self.url or ''}: {', '.join(one.name for one in self.handlers.values()) or 'no handlers'}>"

    def handler(
        self,
        stream: str,
        *,
        group: str,
        partition_by: PartitionBy | str | None = None,
        partitions: int | None = None,
        member: str | None = None,
        publish: str | None = None,
        concurrency: int = 64,
        max_tries: int | None = None,
        retry_delays: Sequence[float] | None = None,
        after_tries: AfterTries = "dead_letter",
        time_limit_s: float | None = None,
        executor: Executor = "thread",
        max_ack_pending: int | None = None,
        hooks: HandlerHooks | None = None,
    ) -> Callable[[Function], Function]:
        """Let a function handle the messages of a stream, each key in its order.

        Its first parameter gets the payload, decoded as its annotation says: bytes, str, dict, a dataclass, a model of
        pydantic or msgspec. A second one, annotated as `keylane.Message`, gets the message. The function itself is
        returned unchanged.

        `partition_by`: the subjects and their key, "orders.*" or `PartitionBy("orders.*.*", key=[2])`; left out, as
        the stream's own transform says. `partitions`: how many the first worker makes; left out, as many as the stream
        numbers, or 32. `member`: join a static or elastic group as this member, not a fleet.

        `executor="process"`: a plain function that needs the CPU runs in a process of its own, where its payload is
        decoded too, one for each CPU at most. It must be at the top level of a module.

        `publish`: what the function returns is published there, such as "mailed.{key}", once for each message.

        `max_tries`: after so many failures it becomes a dead letter or, with `after_tries="park"`, stops its key;
        left out, it is tried for ever. A payload that cannot be decoded becomes one at once.

        `retry_delays`: for messages whose order does not matter: one that fails is tried again after so many seconds,
        such as (5, 60, 600), while later messages of its key go on. After the last retry it becomes a dead letter.

        `hooks`: functions that are called when something happens to it, such as `HandlerHooks(on_failure=…)`.
        """
        options = {
            "concurrency": concurrency,
            "max_tries": max_tries,
            "retry_delays": checked_delays(retry_delays),
            "after_tries": after_tries,
            "time_limit_s": time_limit_s,
            "executor": executor,
            "max_ack_pending": max_ack_pending,
        }

        def decorate(function: Function) -> Function:
            handler = AppHandler(
                stream=stream,
                group=group,
                function=function,
                signature=read_signature(function, publishes=publish is not None),
                partition_by=PartitionBy.of(partition_by) if partition_by is not None else None,
                partitions=partitions,
                member=member,
                publish=SubjectTemplate(publish) if publish is not None else None,
                hooks=hooks or HandlerHooks(),
                options={name: value for name, value in options.items() if value is not None},
            )
            handler.check()
            self._add(handler)
            return function

        return decorate

    def on_start(self, function: LifespanFunction) -> LifespanFunction:
        """Call this before the first message is handled."""
        self.starting.append(_checked(function, "on_start"))
        return function

    def on_stop(self, function: LifespanFunction) -> LifespanFunction:
        """Call this after the last message is handled; the last one that was added comes first."""
        self.stopping.append(_checked(function, "on_stop"))
        return function

    def run(self, *, name: str | None = None) -> None:
        """Run until SIGINT or SIGTERM. `name`: a name that a worker keeps over restarts, to get its partitions back."""
        run(self._main(name))

    async def _main(self, name: str | None) -> None:
        async with self.start(name=name) as running:
            await running.wait()

    @awaitable_context
    async def start(
        self, *, connection: Connection | None = None, name: str | None = None, hooks_of: HooksOf | None = None
    ) -> RunningApp:
        """Connect, call `on_start`, and join for every handler. `connection`: use this one, and leave it open.

        `hooks_of`: hooks for each handler, called after those that it was decorated with.

        >>> async with app.start() as running:
        ...     await running.wait()
        """
        if not self.handlers:
            raise InvalidInput("the app has no handlers: decorate functions with @app.handler(…) before it starts")
        async with AsyncExitStack() as stack:
            if connection is None:
                connection = await stack.enter_async_context(await connect(self.url, **self.connection_options))
            for call in self.starting:
                await called(call)
            for call in self.stopping:
                stack.push_async_callback(called, call)
            running = RunningApp(self.stop_timeout_s)
            running.workers = await start_handlers(
                self.handlers.values(),
                connection,
                name=name,
                create_streams=self.create_streams,
                stop_timeout_s=self.stop_timeout_s,
                hooks_of=hooks_of,
                stack=stack,
            )
            running.watch(stack.pop_all())
            return running

    def _add(self, handler: AppHandler) -> None:
        place = handler.stream, handler.group
        if (other := self.handlers.get(place)) is not None:
            raise InvalidInput(
                f"group {handler.group!r} of stream {handler.stream!r} has a handler already, {other.signature.name}: "
                f"a group handles each message once; give {handler.signature.name} a group of its own"
            )
        self.handlers[place] = handler


def _checked(function: LifespanFunction, what: str) -> LifespanFunction:
    if not callable(function):
        raise InvalidInput(f"{what} is {function!r}: decorate a function without parameters")
    return function
