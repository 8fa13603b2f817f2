"""What a run with a fleet plays on: servers, a proxy, processes of workers, and how each step is done to them.

It carries out what `fleet_faults` has decided and writes down when it really happened. It judges nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from chaos.causes import Trouble
from chaos.evidence import Handled, Log, StateChange, merged
from chaos.fleet_faults import FleetStep
from chaos.members import MemberProcess, deadline
from keylane.core.fleet_records import ASSIGNMENT
from keylane.fleet.store import FLEET_BUCKET
from keylane.jetstream import Bucket, Connection
from keylane.server import NatsCluster, NatsServer
from tests.integration.priority.proxy import LossyProxy
from tests.peers import tether
from tests.peers.store import REPOSITORY
from tests.waiter import until

Say = Callable[[str], None]

_STOP_TIMEOUT_S = 40.0
"""Longer than a worker takes to stop at most: what is still there then hangs."""
_ASSIGNMENT_WITHIN_S = 40.0
_LINKED_WITHIN_S = 5.0
_JOINED_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.05
_LEADING = "leading"
_AT_WORK = ("active", _LEADING)


class FleetStage:
    """Carries out steps. `troubles` and `log` have what came of them."""

    def __init__(
        self,
        servers: NatsServer | NatsCluster,
        connection: Connection,
        directory: Path,
        given: dict[str, Any],
        *,
        proxy: LossyProxy | None,
        say: Say,
    ) -> None:
        """`given`: what every process of workers is told, without its url and the names of its workers."""
        self.start_s = time.monotonic()
        self.troubles: list[Trouble] = []
        self.log: list[dict[str, Any]] = []
        self.surprises: list[str] = []
        """What nobody did to a process: it ended by itself, or did not stop."""
        self.stop_s: list[float] = []
        """How long each clean stop took."""
        self.kills: list[tuple[float, frozenset[str]]] = []
        """When workers were killed, and which."""
        self.started: list[MemberProcess] = []
        self._servers = servers
        self._connection = connection
        self._directory = directory
        self._given = given
        self._proxy = proxy
        self._say = say
        self._now: dict[str, MemberProcess] = {}
        self._workers: dict[str, int] = {}
        self._born: dict[str, int] = defaultdict(int)
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._names: dict[str, tuple[str, ...]] = {}
        self._logs: dict[str, Log] = {}
        self._behind_proxy: set[str] = set()

    # ---- processes ------------------------------------------------------------------------------------------

    async def start(self, target: str, workers: int | None = None, *, behind_proxy: bool = False) -> MemberProcess:
        """Start a process of so many workers, or start it again as it was."""
        if workers is not None:
            self._workers[target] = workers
        if behind_proxy and self._proxy is not None:
            self._behind_proxy.add(target)
        number = self._born[target]
        self._born[target] += 1
        each = [target if self._workers[target] == 1 else f"{target}.{one}" for one in range(self._workers[target])]
        names = {one: f"{one}#{number}" for one in each}
        name = f"{target}#{number}"
        evidence, errors = self._directory / f"{name}.evidence", self._directory / f"{name}.errors"
        given = {**self._given, "url": self._url(target), "workers": names}
        with evidence.open("wb") as out, errors.open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                sys.executable, tether.__file__, sys.executable, "-m", "chaos.fleet_worker", json.dumps(given),
                stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, cwd=REPOSITORY,
            )  # fmt: skip
        one = MemberProcess(target, name, process, evidence, errors)
        self.started.append(one)
        self._now[target] = one
        self._names[name] = tuple(names.values())
        self._logs[name] = Log(evidence, None, self._given["partitions"])
        return one

    async def end(self) -> None:
        """Stop all that runs, one second for nobody: a process that does not stop is a surprise."""
        await asyncio.gather(*(self._stop(one) for one in self._now.values() if one.returncode is None))

    async def kill(self) -> None:
        await asyncio.gather(*(one.kill() for one in self.started))

    def _url(self, target: str) -> str:
        if target in self._behind_proxy:
            assert self._proxy is not None
            return self._proxy.url
        return self._servers.url if isinstance(self._servers, NatsServer) else ",".join(self._servers.urls)

    # ---- evidence -------------------------------------------------------------------------------------------

    def read_on(self) -> None:
        for log in self._logs.values():
            log.read_on()

    @property
    def handled(self) -> list[Handled]:
        return merged(log.handled for log in self._logs.values())

    @property
    def sequences(self) -> set[int]:
        return {one.sequence for log in self._logs.values() for one in log.handled}

    @property
    def states(self) -> list[StateChange]:
        return sorted(one for log in self._logs.values() for one in log.states)

    @property
    def workers_now(self) -> list[str]:
        return [by for process in self._now.values() if process.returncode is None for by in self._names[process.name]]

    def at_work(self) -> set[str]:
        return {one.by for log in self._logs.values() for one in log.handled}

    def leader(self) -> str | None:
        """The process of the worker that leads, as far as the workers said."""
        latest = {one.by: one.state for one in self.states if one.state != "linked"}
        leading = [by for by in self.workers_now if latest.get(by) == _LEADING]
        return next(
            (target for target, one in self._now.items() if leading and leading[-1] in self._names[one.name]), None
        )

    # ---- steps ----------------------------------------------------------------------------------------------

    async def do(self, step: FleetStep) -> None:
        """One step, from its beginning to the end of its consequences. One at a time for each target."""
        async with self._turns[step.target]:
            entry = {"at_s": round(time.monotonic() - self.start_s, 3), "what": str(step)}
            self.log.append(entry)
            self._say(f"{entry['at_s']:7.2f} s  {step}")
            match step.action:
                case "start":
                    await self._joined(await self.start(step.target, 1))
                case "stop":
                    await self._stop(self._now[step.target])
                case "roll":
                    await self._stop(self._now[step.target])
                    await self._joined(await self.start(step.target))
                case "kill":
                    await self._kill(step.target, step.lasts_s)
                case "leader":
                    await self._kill_leader(step, entry)
                case "freeze":
                    await self._freeze(step)
                case "cut":
                    await self._cut(step)
                case "server":
                    await self._restart_server(step)
                case "node":
                    await self._restart_node(step)
            entry["over_s"] = round(time.monotonic() - self.start_s, 3)

    def ended_by_themselves(self) -> list[str]:
        """Processes that ended by themselves, each told once."""
        found = []
        for target, process in self._now.items():
            if process.ended_by_itself and not self._turns[target].locked():
                at_s = time.monotonic() - self.start_s
                self.surprises.append(f"{process.name} ended by itself at {at_s:.2f} s: {process.last_words[-800:]}")
                self._say(self.surprises[-1])
                found.append(target)
        return found

    async def _joined(self, process: MemberProcess) -> None:
        """Wait until its workers have their ids."""
        await process.ready()
        wanted = set(self._names[process.name])
        async with deadline(_JOINED_WITHIN_S, f"{process!r} did not join"):
            while not wanted <= {one.by for one in self._logs[process.name].states if one.state in _AT_WORK}:
                process.check()
                await asyncio.sleep(_LOOK_EVERY_S)
                self._logs[process.name].read_on()

    async def _stop(self, process: MemberProcess) -> None:
        begun_s = time.monotonic()
        if await process.stop(_STOP_TIMEOUT_S):
            self.stop_s.append(time.monotonic() - begun_s)
            if process.exit_code != 0:
                self.surprises.append(f"{process.name} ended with {process.exit_code}: {process.last_words[-800:]}")
        else:
            self._note("kill", process, begun_s)
            self.surprises.append(f"{process.name} did not stop within {_STOP_TIMEOUT_S:.0f} s and was killed")

    async def _kill(self, target: str, back_after_s: float) -> None:
        process, from_s = self._now[target], time.monotonic()
        await process.kill()
        self.kills.append((from_s, frozenset(self._names[process.name])))
        self._note("kill", process, from_s)
        await asyncio.sleep(back_after_s)
        await (await self.start(target)).ready()

    async def _kill_leader(self, step: FleetStep, entry: dict[str, Any]) -> None:
        """The leader dies the moment after it has written who is to own what."""
        bucket = Bucket(self._connection, FLEET_BUCKET)
        key = f"{self._given['stream']}.{self._given['fleet']}.{ASSIGNMENT}"

        async def revision() -> int:
            found = await bucket.get(key)
            return found.revision if found is not None else 0

        before = await revision()
        if step.how == "start":
            await self.start(step.target, 1)
            changing = None
        else:
            changing = asyncio.create_task(self._stop(self._now[step.target]))
        await until(revision, lambda now: now != before, _ASSIGNMENT_WITHIN_S)
        self.read_on()
        leader = self.leader()
        entry["leader"] = leader
        if leader is not None and not (changing is not None and leader == step.target):
            self._say(f"{time.monotonic() - self.start_s:7.2f} s  kill {leader}, which leads")
            async with self._turns[leader if leader != step.target else "the same"]:
                await self._kill(leader, step.lasts_s)
        if changing is not None:
            await changing

    async def _freeze(self, step: FleetStep) -> None:
        process, from_s = self._now[step.target], time.monotonic()
        process.freeze()
        await asyncio.sleep(step.lasts_s)
        self._note("freeze", process, from_s)
        process.thaw()

    async def _cut(self, step: FleetStep) -> None:
        assert self._proxy is not None
        from_s = time.monotonic()
        if step.how == "silent":
            self._proxy.swallow()
        else:
            self._proxy.cut(for_good=True)
        await asyncio.sleep(step.lasts_s)
        self._proxy.cut()
        self._proxy.mend()
        self._note_links("cut", self._behind_proxy, from_s, time.monotonic())

    async def _restart_server(self, step: FleetStep) -> None:
        assert isinstance(self._servers, NatsServer)
        from_s = time.monotonic()
        await self._end_server(self._servers, step.how)
        await asyncio.sleep(step.lasts_s)
        await asyncio.to_thread(self._servers.restart)
        self._note_links("server", self._now, from_s, time.monotonic())

    async def _restart_node(self, step: FleetStep) -> None:
        assert isinstance(self._servers, NatsCluster)
        node, from_s = self._servers.nodes[int(step.target)], time.monotonic()
        await self._end_server(node, step.how)
        await asyncio.sleep(step.lasts_s)
        await asyncio.to_thread(node.restart)
        await asyncio.to_thread(self._servers.wait_ready)
        self._note_links("server", self._now, from_s, time.monotonic())

    @staticmethod
    async def _end_server(server: NatsServer, how: str) -> None:
        if how == "SIGKILL":
            await asyncio.to_thread(server.kill)
        else:
            os.kill(server.pid, signal.SIGTERM)
            await until(lambda: server.state == "ended")

    # ---- what befell whom -------------------------------------------------------------------------------------

    def _note(self, kind: Any, process: MemberProcess, from_s: float) -> None:
        now_s = time.monotonic()
        self.troubles += [Trouble(kind, by, from_s, now_s) for by in self._names[process.name]]

    def _note_links(self, kind: Any, targets: Iterable[str], from_s: float, until_s: float) -> None:
        """Acks go nowhere until a worker has its link again: `settled_troubles` finds that moment."""
        for target in targets:
            if target in self._now:
                process = self._now[target]
                self.troubles += [Trouble(kind, by, from_s, until_s) for by in self._names[process.name]]

    @property
    def leases_lost(self) -> list[StateChange]:
        """Workers that found their lease lost. Their acks may not have got through while it ran out."""
        return [one for one in self.states if one.state == "fenced"]

    def settled_troubles(self) -> list[Trouble]:
        """Lost links last until the worker has a new one; a lost lease is a trouble of its own."""
        links: dict[str, list[float]] = defaultdict(list)
        for one in self.states:
            if one.state == "linked":
                links[one.by].append(one.at_s)

        def linked_s(one: Trouble) -> float:
            return next((at_s for at_s in links[one.by] if 0 < at_s - one.until_s < _LINKED_WITHIN_S), one.until_s)

        lease_s = self._given["options"]["lease_s"]
        lost = [Trouble("lease", one.by, one.at_s - 2 * lease_s, one.at_s) for one in self.leases_lost]
        known = [one._replace(until_s=linked_s(one)) if one.kind in ("cut", "server") else one for one in self.troubles]
        return [*known, *lost]
