"""What a fault run plays on: the server, the instances, and how each fault is done to them.

It carries out what `faults` has decided and writes down when it really happened. It judges nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from chaos.causes import Trouble
from chaos.faults import Fault
from chaos.members import MemberProcess, Members, RunBroken
from chaos.worker import CRASHED
from keylane import groups
from keylane.errors import KeylaneError
from keylane.jetstream import Connection
from keylane.server import NatsServer
from tests.waiter import until

_STOP_TIMEOUT_S = 40.0
"""Longer than a member takes to stop at most: what is still there then hangs."""
_CHANGE_TIMEOUT_S = 60.0


class Stage:
    """Carries out faults. `troubles` and `log` have what came of them."""

    def __init__(
        self, server: NatsServer, connection: Connection, running: Members, say: Callable[[str], None]
    ) -> None:
        self.start_s = time.monotonic()
        self.troubles: list[Trouble] = []
        self.log: list[dict[str, Any]] = []
        self.surprises: list[str] = []
        """What nobody did to an instance: it ended by itself, or did not stop."""
        self.crashes = 0
        """How many members were ended by their handlers, on purpose."""
        self._server = server
        self._connection = connection
        self._running = running
        self._say = say
        self._instances: dict[str, MemberProcess] = {}
        self._born: dict[str, int] = defaultdict(int)
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def raise_instance(self, instance: str) -> MemberProcess:
        """Start an instance, or start it again. `a1` is an instance of member `a`."""
        number = self._born[instance]
        self._born[instance] += 1
        process = await self._running.start(instance.rstrip("0123456789"), name=f"{instance}#{number}")
        self._instances[instance] = process
        return process

    async def do(self, fault: Fault) -> None:
        """One fault, from its beginning to the end of its consequences. One at a time for each target."""
        async with self._turns[fault.target]:
            entry = {
                "at_s": round(time.monotonic() - self.start_s, 3),
                "kind": fault.kind,
                "target": fault.target,
                "how": fault.how,
                "lasts_s": round(fault.lasts_s, 2),
            }
            self.log.append(entry)
            self._say(f"{entry['at_s']:7.2f} s  {fault}")
            if fault.kind == "membership":
                await self._change(fault)
            elif fault.kind == "server":
                await self._restart_server(fault)
            else:
                await self._strike(fault)
            entry["over_s"] = round(time.monotonic() - self.start_s, 3)

    async def revive(self) -> None:
        """Start again what ended by itself, and write it down."""
        for instance, process in list(self._instances.items()):
            if process.ended_by_itself and not self._turns[instance].locked():
                at_s = time.monotonic() - self.start_s
                if process.exit_code == CRASHED:
                    self.crashes += 1
                    self._say(f"{at_s:7.2f} s  {process.name} was ended by its handler")
                    await self.raise_instance(instance)
                    continue
                self.surprises.append(f"{process.name} ended by itself at {at_s:.2f} s: {process.last_words[-600:]}")
                self._say(f"{at_s:7.2f} s  {process.name} ended by itself")
                await self.raise_instance(instance)

    async def _strike(self, fault: Fault) -> None:
        process = self._instances[fault.target]
        from_s = time.monotonic()
        if fault.kind == "freeze":
            process.freeze()
            await asyncio.sleep(fault.lasts_s)
            self.troubles.append(Trouble("freeze", process.name, from_s, time.monotonic()))
            process.thaw()
            return
        if fault.kind == "kill":
            await process.kill()
            self.troubles.append(Trouble("kill", process.name, from_s, time.monotonic()))
        elif not await process.stop(_STOP_TIMEOUT_S):
            self.troubles.append(Trouble("kill", process.name, time.monotonic() - 1, time.monotonic()))
            self.surprises.append(f"{process.name} did not stop within {_STOP_TIMEOUT_S:.0f} s and was killed")
        await asyncio.sleep(fault.lasts_s)
        await self.raise_instance(fault.target)

    async def _restart_server(self, fault: Fault) -> None:
        from_s = time.monotonic()
        if fault.how == "SIGKILL":
            await asyncio.to_thread(self._server.kill)
        else:
            os.kill(self._server.pid, signal.SIGTERM)
            await until(lambda: self._server.state == "ended")
        await asyncio.sleep(fault.lasts_s)
        await asyncio.to_thread(self._server.restart)
        self.troubles.append(Trouble("server", "server", from_s, time.monotonic()))

    async def _change(self, fault: Fault) -> None:
        """A server that is away for a moment is no reason not to change the membership: it is asked again."""
        act = groups.add_members if fault.how == "add" else groups.drop_members
        where = self._running.group
        deadline_s = time.monotonic() + _CHANGE_TIMEOUT_S
        while True:
            try:
                await act(self._connection, where.stream, where.group, [fault.target])
            except KeylaneError as error:
                if time.monotonic() > deadline_s:
                    raise RunBroken(f"{fault} was not possible: {error}") from error
                await asyncio.sleep(0.2)
            else:
                return
