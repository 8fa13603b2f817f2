"""README and every page of docs, done from top to bottom as a reader would: it runs and prints what is shown."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.docs.pages import PAGES, Command, Step, WrongPage, blocks, steps, steps_of
from tests.integration.docs.reader import PageFailed, Reader, Session, reader, reader_environment

MANY = 7
ON_SPARK = [page for page in PAGES if page.startswith(("docs/spark", "docs/pipelines", "docs/tutorial"))]
pytestmark = pytest.mark.timeout(300)


def parameter(page: str) -> Any:
    """A page with many commands takes as long as they take to start."""
    commands = [step for step in steps(page) if isinstance(step, Command)]
    marks = [pytest.mark.long(f"runs {len(commands)} commands")] if len(commands) > MANY else []
    return pytest.param(page, marks=marks)


def do(todo: list[Step], person: Reader) -> None:
    for step in todo:
        person.take(step)
    person.finish()


@pytest.mark.parametrize("page", [parameter(page) for page in PAGES if page not in ON_SPARK])
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    with reader(tmp_path) as person:
        do(steps(page), person)


@pytest.mark.spark
@pytest.mark.timeout(1200)
@pytest.mark.long("all pages on Spark, one after the other, in one session")
def test_pages_on_spark_do_what_they_say(tmp_path: Path) -> None:
    from tests.peers.spark import find_spark, spark_environment  # noqa: PLC0415 - not without Spark

    # Spark shuffles into 200 parts unless it is told otherwise: minutes, for six orders.
    few = "--conf spark.sql.shuffle.partitions=2 --conf spark.ui.enabled=false pyspark-shell"
    more = spark_environment(find_spark()) | {"PYSPARK_SUBMIT_ARGS": few}
    session = Session(tmp_path, reader_environment(tmp_path) | more)
    failures = []
    try:
        for page in ON_SPARK:
            try:
                with reader(tmp_path, more, session) as person:
                    do(steps(page), person)
            except PageFailed as failure:
                failures.append(str(failure))
    finally:
        session.close()
    assert not failures, "\n\n".join(failures)


# ---- what is not run ----------------------------------------------------------------------------------------------


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    found = Counter((page, block.no_run) for page in PAGES for block in blocks(page) if block.no_run)
    assert found == NOT_RUN


NOT_RUN = {
    ("CONTRIBUTING.md", "sets itself up, and takes minutes"): 1,
    ("README.md", "sets itself up, and takes minutes; tests/integration/cli/test_demo.py runs the demo"): 1,
    ("README.md", "installs into your environment"): 1,
    ("docs/autoscaling.md", "takes a lag that grows for minutes"): 1,
    ("docs/autoscaling.md", "a part of deploy/kubernetes/keda.yaml"): 1,
    ("docs/chaos.md", "takes minutes; tests/integration/chaos runs short ones"): 1,
    ("docs/deploy.md", "needs a Docker engine and a cluster"): 1,
    ("docs/doctor.md", "what it takes"): 1,
    ("docs/marshal.md", "needs a Kafka broker; tests/integration/kafka runs the same calls"): 2,
    ("docs/marshal.md", "needs a Kafka broker; tests/integration/kafka/test_kafka_cli.py runs the same commands"): 1,
    ("docs/migrating/cg.md", "needs a group with members in Go"): 1,
    ("docs/migrating/kafka.md", "needs a Kafka broker"): 1,
    (
        "docs/pipelines/README.md",
        "needs a group with a journal; tests/integration/cli/test_pipeline_cli.py runs the commands",
    ): 4,
    ("docs/pipelines/audit.md", "needs a long history; tests/integration/spark/test_pipeline_audit.py makes one"): 4,
    ("docs/pipelines/claims.md", "needs a long history; tests/integration/spark/test_pipeline_claims.py makes one"): 4,
    ("docs/pipelines/lake.md", "needs a long history; tests/integration/spark/test_pipeline_lake.py makes one"): 2,
    ("docs/pipelines/parity.md", "needs a long history; tests/integration/spark/test_pipeline_parity.py makes one"): 2,
    ("docs/pipelines/skew.md", "needs a long history; tests/integration/spark/test_pipeline_skew.py makes one"): 1,
    ("docs/pipelines/slo.md", "needs a long history; tests/integration/spark/test_pipeline_slo.py makes one"): 1,
    ("docs/priority/index.md", "the last screen of the watch above"): 1,
    ("docs/spark-cluster.md", "needs a cluster; tests/integration/spark/test_cluster_standalone.py has one"): 8,
    ("docs/spark-standby.md", "needs a second driver; tests/integration/spark/test_hot_standby.py has two"): 1,
    ("docs/spark.md", "installs packages"): 1,
    ("docs/tutorial.md", "installs packages"): 1,
}


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
    with reader(tmp_path) as person, pytest.raises(PageFailed) as failure:
        do(steps_of("a.md", page), person)
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
    with reader(tmp_path) as person:
        do(steps_of("a.md", page), person)
