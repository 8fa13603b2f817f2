"""Serves one partition from the win to the end: heartbeats and work side by side, then the release.

Owns: the order of things at the end. Asked to let go: read nothing more, let handlers at work finish while heartbeats
go on, then release at what is done. Lost: start nothing more, and end the handlers.
"""

from __future__ import annotations

import asyncio
import random

from keylane.marshal.claiming import Work
from keylane.marshal.crew import Crew
from keylane.marshal.heartbeats import Heartbeats
from keylane.marshal.source import Source
from keylane.marshal.tenure import Tenure
from keylane.marshal.terms import Terms
from keylane.marshal.trouble import Patience

LOST = "somebody else owns it now"


async def serve(tenure: Tenure, work: Work, source: Source, crew: Crew, *, patience: Patience, terms: Terms) -> str:
    """Returns why it ended. Raises what cannot pass; then nothing is written any more."""
    beats = Heartbeats(
        tenure,
        work,
        source,
        interval_s=terms.heartbeat_interval_s,
        fraction=random.random,
        release_when_behind=terms.release_when_behind,
    )
    beating = asyncio.create_task(beats.run())
    working = asyncio.create_task(
        work.run(tenure, source, crew, patience, batch_size=terms.batch_size, max_in_flight=terms.max_in_flight)
    )
    asked = asyncio.create_task(tenure.asked_to_end())
    try:
        await asyncio.wait({beating, working, asked}, return_when=asyncio.FIRST_COMPLETED)
        _raise_errors_of(beating, working)
        if not asked.done() or beating.done():
            return await _lose(tenure, crew, terms)
        stopping = asyncio.create_task(_let_go(tenure, work, working, crew, terms))
        try:
            await asyncio.wait({stopping, beating}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not stopping.done():
                stopping.cancel()
        _raise_errors_of(beating, stopping)
        if beating.done():
            return await _lose(tenure, crew, terms)
        beating.cancel()
        return await _write_the_end(tenure)
    finally:
        tenure.end()
        for task in (beating, working, asked):
            task.cancel()
        await asyncio.gather(beating, working, asked, return_exceptions=True)
        crew.drop(tenure)
        work.close()


def _raise_errors_of(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


async def _let_go(tenure: Tenure, work: Work, working: asyncio.Task[None], crew: Crew, terms: Terms) -> None:
    await work.stop(working, tenure, terms.grace_s)
    await crew.let_go(tenure, terms.grace_s)


async def _lose(tenure: Tenure, crew: Crew, terms: Terms) -> str:
    tenure.end()
    await crew.let_go(tenure, terms.grace_s)
    return LOST


async def _write_the_end(tenure: Tenure) -> str:
    assert tenure.asked is not None, tenure
    written = await tenure.release() if tenure.asked.release else await tenure.heartbeat()
    return tenure.asked.why if written else LOST
