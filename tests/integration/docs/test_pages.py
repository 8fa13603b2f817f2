"""README and every page of docs, done from top to bottom as a reader would: it runs and prints what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.docs.pages import PAGES, Command, Step, WrongPage, blocks, steps, steps_of
from tests.integration.docs.reader import PageFailed, reader

MANY = 10
NOT_YET = {page for page in PAGES if page.startswith(("docs/spark", "docs/pipelines", "docs/tutorial"))}
pytestmark = pytest.mark.timeout(300)


def parameter(page: str) -> Any:
    """A page with many commands takes as long as they take to start."""
    commands = [step for step in steps(page) if isinstance(step, Command)]
    marks = [pytest.mark.long(f"runs {len(commands)} commands")] if len(commands) > MANY else []
    return pytest.param(page, marks=marks)


def do(todo: list[Step], directory: Path) -> None:
    with reader(directory) as person:
        for step in todo:
            person.take(step)
        person.finish()


@pytest.mark.parametrize("page", [parameter(page) for page in PAGES if page not in NOT_YET])
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    do(steps(page), tmp_path)


# ---- what is not run ----------------------------------------------------------------------------------------------


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    found = [(page, block.no_run) for page in PAGES if page not in NOT_YET for block in blocks(page) if block.no_run]
    assert found == NOT_RUN


NOT_RUN = [
    ("CONTRIBUTING.md", "sets itself up, and takes minutes"),
    ("README.md", "sets itself up, and takes minutes; tests/integration/cli/test_demo.py runs the demo"),
    ("README.md", "installs into your environment"),
    ("docs/autoscaling.md", "takes a lag that grows for minutes"),
    ("docs/autoscaling.md", "a part of deploy/kubernetes/keda.yaml"),
    ("docs/chaos.md", "takes minutes; tests/integration/chaos runs short ones"),
    ("docs/doctor.md", "what it takes"),
    ("docs/marshal.md", "needs a Kafka broker; tests/integration/kafka runs the same calls"),
    ("docs/marshal.md", "needs a Kafka broker; tests/integration/kafka runs the same calls"),
    ("docs/marshal.md", "needs a Kafka broker; tests/integration/kafka/test_kafka_cli.py runs the same commands"),
    ("docs/migrating/cg.md", "needs a group with members in Go"),
    ("docs/migrating/kafka.md", "needs a Kafka broker"),
    ("docs/priority/index.md", "the last screen of the watch above"),
]


# ---- the reader itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```console\n$ echo one; echo two\none\n```\n", "+two"),
        ("```console\n$ echo 1 message\n2 messages\n```\n", "-2 messages"),
        ("```sh\nexit 3\n```\n", "ended with 3"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "-2"),
        ("```python\nawait nothing()\n```\n", "NameError"),
        ("```python\n# a.py\nraise SystemExit(4)\n```\n\n```sh\npython a.py\n```\n", "ended with 4"),
        ("```console\n$ echo ready\nready\nsteady\n^C\n```\n", "-steady"),
    ],
)
def test_what_is_wrong_on_a_page_is_found(page: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PageFailed) as failure:
        do(steps_of("a.md", page), tmp_path)
    assert said in str(failure.value)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```\nkeylane run\n```\n", "what would a reader do"),
        ("```sh\npip install keylane\n```\n", "changes more than the reader's directory"),
        ("<!-- sometimes -->\n```sh\nls\n```\n", "nobody knows"),
        ("```sh\nls\n", "or no end"),
        ("```sh no-run: why\nls\n```\n", "notes go above it"),
        ("```python\nopen('/data/orders', 'w')\n```\n", "changes more than the reader's directory"),
        ("```sh\nls /data/orders\n```\n", "changes more than the reader's directory"),
    ],
)
def test_a_block_that_nobody_could_do_is_refused(page: str, said: str) -> None:
    with pytest.raises(WrongPage, match=said):
        steps_of("a.md", page)


def test_a_page_goes_through_files_commands_sessions_questions_and_interrupts(tmp_path: Path) -> None:
    page = """
```python
# wait.py
import time

print("ready at", time.strftime("%H:%M:%S"), flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("bye")
```

```console
$ python wait.py              # in a terminal of its own
ready at 10:00:00
$ python wait.py
ready at 11:11:11
^C
…bye
$ read -p 'Sure? [y/N] ' answer; echo "you said $answer"
Sure? [y/N] y
you said y
$ seq 1 5
1
…
5
```

```python
import asyncio

await asyncio.sleep(0)
number = 41
```

```python
print(number + 1, "took 3 ms")
```

```text
42 took 17 ms
```
"""
    do(steps_of("a.md", page), tmp_path)
