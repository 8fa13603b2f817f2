"""`keylane exactly-once`: accepting what was restored, forgetting what a stream that is gone had done."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from keylane.errors import TokenWentBack
from keylane.exactly_once import ExactlyOnce
from tests.integration.cli.groups_rig import here, run
from tests.integration.exactly_once.rig import Database, Instance, write


@pytest.fixture
async def ledger(tmp_path: Path) -> Database:
    """What a group did with revision 9 of its record."""
    made = Database("sqlite", str(tmp_path / "once.db"))
    made.make_effects()
    await ExactlyOnce(made.engine()).handler(write)(Instance(9, 100).message(1))
    return made


@pytest.mark.parametrize("kind", ["sqlite", "sqlite+aiosqlite"])
async def test_a_restored_bucket_is_accepted(ledger: Database, kind: str) -> None:
    once = ExactlyOnce(ledger.engine())
    with pytest.raises(TokenWentBack) as told:
        await once.handler(write)(Instance(5, 200, member="m2").message(2))
    words = str(told.value).partition("accept it: keylane ")[2].replace("URL", f"{kind}:///{ledger.path}").split()
    no = await run(*words, stdin="n\n")
    assert (no.returncode, no.stdout) == (1, "")
    assert (
        "Does no instance of group 'billing' of stream 'ORDERS' work with the state from before any more?" in no.stderr
    )
    assert "nothing was accepted" in no.stderr
    with pytest.raises(TokenWentBack):
        await once.handler(write)(Instance(5, 200, member="m3").message(2))
    yes = await run(*words, stdin="y\n")
    assert (yes.returncode, yes.stdout) == (0, "accepted: group 'billing' goes on\n")
    await once.handler(write)(Instance(5, 200, member="m4").message(2))
    await ledger.dispose()


async def test_a_group_is_forgotten(ledger: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYLANE_DATABASE", f"sqlite:///{ledger.path}")
    no = await here("exactly-once", "forget", "ORDERS", "billing")
    assert no.returncode == 1
    done = await here("exactly-once", "forget", "ORDERS", "billing", "--force", "--json")
    assert done.json == {"stream": "ORDERS", "group": "billing", "keys": 1}
    again = await here("exactly-once", "forget", "ORDERS", "billing", "--force")
    assert again.stdout == "forgot 0 keys of group 'billing' of stream 'ORDERS'\n"
    await ledger.dispose()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("accept", "ORDERS", "nosuch"), "the database has no record of group 'nosuch' of stream 'ORDERS'"),
        (("accept", "OR DERS", "g"), "stream name 'OR DERS'"),
    ],
)
async def test_wrong_names(ledger: Database, arguments: tuple[str, ...], reason: str) -> None:
    done = await here("exactly-once", *arguments, "--force", "--database", f"sqlite:///{ledger.path}")
    assert reason in done.refusal
    await ledger.dispose()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite:////nosuch/once.db", "there is no file '/nosuch/once.db'"),
        ("postgresql+psycopg://alice:secret@127.0.0.1:1/x", "--database cannot be used: connection failed"),
        ("garbage", "--database cannot be used: Could not parse SQLAlchemy URL"),
        ("mysql+nosuch://x", "--database cannot be used: Can't load plugin"),
    ],
)
async def test_wrong_databases(url: str, reason: str) -> None:
    done = await here("exactly-once", "accept", "ORDERS", "g", "--force", "--database", url)
    assert reason in done.refusal
    assert "secret" not in done.stderr


async def test_tables_that_are_not_ours(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/other.db")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE keylane_epoch (x INTEGER PRIMARY KEY)"))
    engine.dispose()
    done = await here("exactly-once", "accept", "S", "g", "--force", "--database", f"sqlite:///{tmp_path}/other.db")
    assert "table 'keylane_epoch' has the columns x" in done.refusal
