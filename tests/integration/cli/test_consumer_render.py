"""How consumers are shown: ages, and what a small screen leaves out. No server."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from keylane.cli.consumer.render import consumer_table
from keylane.cli.formatting import age
from keylane.jetstream import ConsumerInfo

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def info(name: str) -> ConsumerInfo:
    return ConsumerInfo.from_wire(
        {
            "stream_name": "JOBS",
            "name": name,
            "created": "2030-01-01T00:00:00Z",
            "config": {"name": name, "priority_groups": ["jobs"], "priority_policy": "pinned_client"},
            "delivered": {"stream_seq": 5, "consumer_seq": 5},
            "ack_floor": {"stream_seq": 3, "consumer_seq": 3},
            "num_pending": 1234567,
            "priority_groups": [
                {"group": "jobs", "pinned_client_id": "wCco5tqZIK4GjyzhDEFv3d", "pinned_ts": "2030-01-02T03:04:00Z"}
            ],
        }
    )


def table_lines(names: list[str], width: int, rows: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(consumer_table([info(name) for name in names], NOW, width=width, rows=rows, stale=False))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 s"),
        (0.9, "0 s"),
        (59, "59 s"),
        (61, "1 min 1 s"),
        (3599, "59 min 59 s"),
        (3660, "1 h 1 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_age(seconds: float, words: str) -> None:
    assert age(NOW - timedelta(seconds=seconds), NOW) == words


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (120, "consumer policy pinned for pending ack pending waiting"),
        (80, "consumer pinned for pending ack pending waiting"),
        (70, "consumer pinned for pending ack pending"),
        (48, "consumer pinned pending"),
    ],
)
def test_a_narrow_board_leaves_columns_out_and_cuts_none(width: int, columns: str) -> None:
    lines = table_lines(["workers"], width, rows=5)
    assert " ".join(lines[1].split()) == columns
    assert "workers" in lines[3]
    assert "wCco5tqZIK4GjyzhDEFv3d" in lines[3]
    assert "1,234,567" in lines[3]
    assert "…" not in lines[3]


def test_a_low_board_says_how_many_more_there_are() -> None:
    lines = [line.split() for line in table_lines([f"c{number}" for number in range(9)], 100, rows=4)]
    assert [words[0] for words in lines[3:6]] == ["c0", "c1", "c2"]
    assert lines[6] == ["and", "6", "more"]
