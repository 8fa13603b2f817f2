"""Each example runs by one command, on a server of its own, and says what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from keylane.cli.app.worker import load_app

EXAMPLES = Path(__file__).parents[3] / "examples"

pytestmark = pytest.mark.timeout(180)


def said_by(name: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    return ran.stdout.splitlines()


def test_the_ledger_parks_an_account_and_posts_everything_once() -> None:
    assert said_by("ledger.py") == [
        "30 postings for ann, bob, carol; carol is closed",
        "in the table: ann 10, bob 10, carol 0",
        "carol is open again: keylane dlq release LEDGER books carol",
        "released key 'carol' of LEDGER/books: 10 messages handled in order",
        "in the table: ann 10, bob 10, carol 10",
        "every posting once, each account in order: yes",
    ]


def test_hot_sensors_are_shown_and_stay_in_order() -> None:
    _, _, first, skew, workers, order = said_by("iot_hot_keys.py")
    assert first == "3000 readings of 60 sensors; the hottest, s0, s1, s2, sent 54%"
    found = re.fullmatch(r"the busiest partition, \d+, had (\d\.\d) times its even share", skew)
    assert found is not None, skew
    assert float(found[1]) > 2
    counts = re.fullmatch(r"workers: a (\d+), b (\d+)", workers)
    assert counts is not None, workers
    assert sum(map(int, counts.groups())) == 3000
    assert order == "each sensor in order: yes"


def test_the_web_shop_mails_receipts_in_order() -> None:
    assert said_by("web_shop.py")[2:] == ["ann: 10 receipts, in order: yes", "bob: 10 receipts, in order: yes"]


@pytest.mark.parametrize(("path", "handler"), [("shop:app", "ORDERS/shop"), ("billing:app", "ORDERS/billing")])
def test_the_apps_of_the_manifests_load(path: str, handler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "kubernetes"))
    monkeypatch.delitem(sys.modules, path.partition(":")[0], raising=False)
    monkeypatch.setenv("MEMBER", "billing-3")
    (found,) = load_app(path).handlers.values()
    assert found.name == handler
    assert found.member == ("billing-3" if handler == "ORDERS/billing" else None)
