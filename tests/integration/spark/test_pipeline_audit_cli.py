"""`keylane pipeline run audit`: options from a file and the command line, JSON and words, exit codes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from keylane import Connection
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import here
from tests.integration.spark import journal_rig as rig
from tests.integration.spark.journal_rig import GROUP, Past
from tests.integration.spark.planted import findings_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

MESSAGES, CLEAN_UP_TO = 600, 300


@pytest.fixture
async def stream(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    async with rig.named(connection, unique("orders")) as name:
        yield name


async def test_what_it_prints_and_how_it_ends(
    spark: SparkSession, connection: Connection, nats_server: NatsServer, stream: str, tmp_path: Path
) -> None:
    """It runs in the session that is there, as it does when it is submitted."""
    past = Past.clean(MESSAGES, 6)
    lost = past.of("k0")[70].sequence
    past.lose(lost)
    await rig.stage(connection, stream, past)
    config = tmp_path / "audit.toml"
    config.write_text(
        f'stream = "{stream}"\ngroup = "{GROUP}"\nserver = "{nats_server.url}"\nto = {CLEAN_UP_TO}\nsettle = 0\n'
        "tolerance = 0.1\nquiet = true\n"
    )
    asked = ("pipeline", "run", "audit", "--config", str(config))

    clean = await here(*asked, "--json")
    assert (clean.returncode, clean.stderr) == (0, "")
    said = json.loads(clean.stdout)
    assert (said["pipeline"], said["verdict"], said["stopped"]) == ("audit", "clean", False)
    assert (said["first"], said["last"], said["facts"]["handled"]) == (1, CLEAN_UP_TO, CLEAN_UP_TO)
    assert not any({**said["violations"], **said["unproven"]}.values())
    assert said["evidence"] == {}

    work = tmp_path / "work"
    faulty = await here(*asked, "--to", "latest", "--work", str(work))
    assert (faulty.returncode, faulty.stderr) == (3, "")
    assert faulty.stdout.splitlines()[0] == f"{stream}/{GROUP}: 1 lost"
    assert f"{lost} of key k0" in faulty.stdout
    assert faulty.stdout.endswith(f"all findings: {work / 'findings'}\n")
    assert [json.loads(row)["sequence"] for row in findings_in(work)] == [lost]

    nothing = await here(*asked, "--from", str(MESSAGES + 1), "--to", "latest", "--json")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert nothing.stderr.startswith("keylane: there is nothing to audit: ")
    assert nothing.stderr.count("\n") == 1
