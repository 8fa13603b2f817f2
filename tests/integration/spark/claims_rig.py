"""What the tests of the pipeline `claims` share: a log of chosen records and times, and what one reader says of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from keylane.core.claim_facts import LogRecord, Tenure
from keylane.core.world import World
from keylane.marshal.log import MemoryLog
from keylane.spark.pipelines import claims
from keylane.spark.pipelines.claims_log import LogPart
from tests.core.claim_histories import told_claim


def chosen_log(records: list[LogRecord]) -> Callable[[claims.Settings], AbstractAsyncContextManager[LogPart]]:
    """`open_log` of records with times of our choosing, which no server would stamp."""

    @asynccontextmanager
    async def opened(_: claims.Settings) -> AsyncIterator[LogPart]:
        log = MemoryLog()
        for record in records:
            log.now_ms = record.time_ms
            log.write(record.value, 0)
        yield LogPart("chosen", log, {0: await log.bounds(0)})

    return opened


def told_by(report: claims.Report) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The world and the spans in a report that shows all of them."""
    spans = [
        {name: value for name, value in row.items() if name not in ("ended", "misplaced")}
        for row in report.evidence["spans"]
        if not row["misplaced"]
    ]
    return sorted(report.evidence["world"], key=_key), sorted(spans, key=_key)


def told_of(world: World) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same by one reader, with a history."""
    claims_told = [told_claim(claim, world.now_ms(claim.log_partition) or 0) for claim in world.claims()]
    return sorted(claims_told, key=_key), sorted(map(_told_tenure, world.tenures()), key=_key)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["group"], row["topic"], row["partition"], row.get("from_offset")


def _told_tenure(tenure: Tenure) -> dict[str, Any]:
    return {
        **tenure.key._asdict(),
        "log_partition": tenure.log_partition,
        **tenure.owner._asdict(),
        "from_offset": tenure.since,
        "from_ms": tenure.since_ms,
        "to_offset": tenure.until,
        "to_ms": tenure.until_ms,
        "token": tenure.token,
        "began": tenure.began.value,
    }
