"""`keylane pipeline run …`: its words, what it refuses before Spark starts, and where its options come from."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from keylane import Connection
from keylane.cli.command import ConnectionOptions
from keylane.cli.pipeline.options import OPTIONS, RUNNING, gather
from keylane.errors import InvalidInput
from keylane.extras import install_command
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import here, plain_stream

LINK = ConnectionOptions()
NOWHERE = ("-s", "nats://127.0.0.1:1")


@pytest.fixture
async def stream(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    async with plain_stream(connection, unique("PIPE")) as name:
        yield name


# ---- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", sorted(OPTIONS))
def test_every_setting_has_an_option_and_every_option_a_setting(pipeline: str) -> None:
    pytest.importorskip("pyspark")
    module = importlib.import_module(f"keylane.spark.pipelines.{pipeline}")
    settings = {field.name for field in dataclasses.fields(module.Settings)} - {"address"}
    assert {option.field for option in OPTIONS[pipeline]} == settings
    for option in OPTIONS[pipeline]:
        assert option.help.endswith("."), option


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "lake.toml"
    config.write_text(
        'stream = "ORDERS"\ntable = "/lake"\nfrom = 17\nto = 2026-05-01T12:00:00Z\navailable-now = true\nmax_rows = 5\n'
        'interval = 2\nmaster = "local[1]"\nconf = ["spark.driver.memory=2g"]\nserver = "nats://a"\ncreds = "x.creds"\n'
    )
    given = gather("lake", {"max_rows": 9, "available_now": False, "table": None}, None, config, LINK)
    assert given.settings == {
        "stream": "ORDERS",
        "table": "/lake",
        "start": "17",
        "end": "2026-05-01T12:00:00+00:00",
        "available_now": False,
        "max_rows": 9,
        "interval_s": 2.0,
    }
    assert given.running == {"master": "local[1]", "quiet": None, "json": None}
    assert given.conf == ("spark.driver.memory=2g",)
    assert (given.link.server, given.link.creds) == ("nats://a", Path("x.creds"))
    over = gather("lake", {"master": "local[2]"}, ["spark.x=1"], config, dataclasses.replace(LINK, server="nats://b"))
    assert (over.running["master"], over.conf, over.link.server) == ("local[2]", ("spark.x=1",), "nats://b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tabel = 'x'", "has 'tabel', which is no option of lake: give allow-loss, available-now,"),
        ("start = 'x'", "has 'start', which is no option of lake"),
        ("stream = true", "has stream = True: give a text"),
        ("max_rows = 'x'", "has max_rows = 'x': give a whole number"),
        ("max_rows = 1.5", "give a whole number"),
        ("interval = 'x'", "give a number"),
        ("compact = 1", "give true or false"),
        ("conf = 'x'", "give a list"),
        ("conf = 'spark.executorEnv.NATS_PASSWORD=hunter2'", "give a list"),
        ("password = ['hunter2']", "has password: give a text"),
        ("server = ['nats://a:hunter2@h']", "has server: give a text"),
        ("timeout = 'x'", "give a number"),
        ("x", "is no TOML"),
    ],
)
def test_a_file_that_makes_no_sense(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "lake.toml"
    config.write_text(text)
    with pytest.raises(InvalidInput, match=said) as caught:
        gather("lake", {}, None, config, LINK)
    assert "hunter2" not in str(caught.value)


def test_help_is_quick_and_names_every_option() -> None:
    code = (
        "import sys; from keylane.cli.main import main; sys.argv = ['keylane', 'pipeline', 'run', 'slo', '--help']\n"
        "try: main()\n"
        "finally: print('loaded', *({'pyspark', 'pyarrow', 'matplotlib', 'pandas'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "loaded"
    for option in (*OPTIONS["slo"], *RUNNING):
        assert f"--{option.name}" in done.stdout


def test_the_program_for_a_cluster_is_a_file() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keylane.cli.main", "pipeline", "program"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Path(done.stdout.strip()).name == "program.py"
    told = subprocess.run(
        [sys.executable, done.stdout.strip(), "run", "lake", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--table DIR" in told.stdout


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lake"], "--stream is missing: give it on the command line or in the file of --config"),
        (["lake", "--stream", "S"], "--table is missing"),
        (["skew", "--stream", "S"], "--group is missing"),
        (["slo", "--stream", "S"], "--group is missing"),
        (["audit", "--stream", "S"], "--group is missing"),
        (["lake", "--stream", "S", "--table", "t", "--to", "later"], "to is 'later'"),
        (["lake", "--stream", "S", "--table", "t", "--max-rows", "0"], "max_rows is 0"),
        (["lake", "--stream", "S", "--table", "t", "--format", "iceberg"], "give delta or parquet"),
        (
            ["lake", "--stream", "S", "--table", "t", "--jars", "/x/delta-spark_4.1_2.13-4.4.0.jar"],
            "Delta Lake 4.4.0 is made for Spark 4.1",
        ),
        (["lake", "--stream", "S", "--table", "t", "--partitions", "x"], "partitions"),
        (["lake", "--stream", "S", "--table", "t", "--conf", "memory"], "write spark.NAME=VALUE"),
        (
            ["lake", "--stream", "S", "--table", "t", "--conf", "spark.executorEnv.NATS_PASSWORD=ab@"],
            "spark.executorEnv.NATS_PASSWORD would show a secret",
        ),
        (
            ["parity", "--stream", "S", "--group", "g", "--other-group", "h", "--other-server", "a:b@h"],
            "option 'url' has a user or a password",
        ),
        (["skew", "--stream", "S", "--group", "g", "--by", "x"], "by is 'x'"),
        (["skew", "--stream", "S", "--group", "g", "--chart", "x.gif"], "give a name that ends in .png"),
        (["skew", "--stream", "S", "--group", "g", "--chart", "/none/x.png"], "there is no directory '/none'"),
        (["skew", "--stream", "S", "--group", "g", "--plan", "/none/x.json"], "there is no directory '/none'"),
        (["slo", "--stream", "S", "--group", "g", "--window", "0"], "window_s is 0"),
        (["slo", "--stream", "S", "--group", "g", "--config", "/none.toml"], "cannot be read: No such file"),
        (["slo", "--stream", "S", "--group", "g", "--from", "x"], "from is 'x'"),
        (["claims", "--at", "x"], "at is 'x': give an offset of the log, a time such as"),
        (["claims", "--at", "2026-05-01T12:00:00"], "without a time zone"),
        (["claims", "--at", "1:2,1:3"], "it names a partition twice"),
        (["claims", "--from", "0:2"], "from is '0:2': give one offset, a time"),
        (["claims", "--interval", "0"], "interval_s is 0"),
        (["claims", "--gap", "-1"], "gap_s is -1.0: give seconds, 0 or more"),
        (["claims", "--placing", "x"], "placing is 'x'"),
        (["claims", "--group", "a/b"], "a slash separates the fields"),
        (["claims", "--out", "s3://x"], "out is 's3://x'"),
        (["claims", "--kafka", "127.0.0.1:1", "-s", "nats://a"], "--server is for NATS and --kafka for Kafka"),
        (
            ["slo", "--stream", "S", "--group", "g", "--master", "spark://h:1", "--user", "a", "--password", "b"],
            "NATS_PASSWORD, NATS_USER would have to reach the executors",
        ),
        (
            ["slo", "--stream", "S", "--group", "g", "--master", "spark://h:1", "-s", "nats://a:b@h"],
            "NATS_URL would have to reach the executors",
        ),
    ],
)
async def test_wrong_input_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    pytest.importorskip("pyspark")
    done = await here("pipeline", "run", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.startswith("keylane: ")
    assert done.stderr.count("\n") == 1
    assert "b@" not in done.stderr


async def test_words_that_no_option_has() -> None:
    for arguments, said in (
        (["lake", "--tabel", "x"], "No such option: --tabel"),
        (["lakes"], "No such command 'lakes'"),
        (["lake", "--max-rows", "x"], "Invalid value for '--max-rows'"),
    ):
        done = await here("pipeline", "run", *arguments)
        assert done.returncode == 2
        assert said in done.stderr


async def test_a_server_or_a_stream_that_is_not_there_is_told_before_spark_starts(nats_server: NatsServer) -> None:
    pytest.importorskip("pyspark")
    done = await here("pipeline", "run", "lake", *NOWHERE, "--stream", "S", "--table", "t", "--timeout", "0.5")
    assert "127.0.0.1:1" in done.refusal
    done = await here("pipeline", "run", "skew", "-s", nats_server.url, "--stream", "NONE", "--group", "g")
    assert "there is no stream" in done.refusal
    assert "Spark" not in done.refusal
    done = await here("pipeline", "run", "claims", "-s", nats_server.url, "--log", "nowhere")
    assert "there is no coordination log 'nowhere': name it with --log" in done.refusal
    assert "Spark" not in done.refusal


def test_without_pyspark_one_line_says_what_to_install() -> None:
    code = (
        "import sys, importlib.util; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'pyspark' else real(name, *more)\n"
        "from keylane.cli.main import main; sys.argv = ['keylane', 'pipeline', 'run', 'lake']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith(f"pyspark is not installed: {install_command('spark')}")
    assert done.stderr.count("\n") == 1


# ---- a whole run in a process -----------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.timeout(600)
async def test_a_run_from_a_file_with_its_own_spark(
    connection: Connection, nats_server: NatsServer, stream: str, tmp_path: Path
) -> None:
    """As a user runs it: Java, Python and quiet are found by the command itself."""
    for number in range(20):
        await connection.jetstream.publish(f"{stream}.k{number % 3}", b"%d" % number)
    config = tmp_path / "lake.toml"
    config.write_text(
        f'stream = "{stream}"\ntable = "{tmp_path / "lake"}"\nmaster = "local[1]"\navailable-now = true\n'
        'format = "parquet"\n'
    )
    command = [sys.executable, "-m", "keylane.cli.main", "pipeline", "run", "lake", "--config", str(config), "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, "--server", nats_server.url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(300):
        stdout, stderr = (text.decode() for text in await process.communicate())
    assert process.returncode == 0, stderr
    told = json.loads(stdout)
    assert (told["rows"], told["last"], told["stopped"]) == (20, 20, False)
    for line in stderr.splitlines():
        assert "WARN" not in line
        assert "log level" not in line
    assert "starting Spark" in stderr


@pytest.mark.spark
@pytest.mark.timeout(600)
async def test_ctrl_c_ends_a_streaming_run_and_says_how_to_go_on(
    connection: Connection, nats_server: NatsServer, stream: str, tmp_path: Path
) -> None:
    for number in range(30):
        await connection.jetstream.publish(f"{stream}.k{number % 3}", b"%d" % number)
    committed = tmp_path / "lake" / "_spark_metadata" / "0"
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "keylane.cli.main",
            "pipeline",
            "run",
            "lake",
            "--master",
            "local[1]",
            "--interval",
            "1",
            "--format",
            "parquet",
        ),
        *("--stream", stream, "--table", str(tmp_path / "lake"), "--server", nats_server.url, "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(300):
            while not committed.is_file():
                assert process.returncode is None
                await asyncio.sleep(0.1)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everything that the command started
            stdout, stderr = (text.decode() for text in await process.communicate())
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
    assert process.returncode == 0, stderr
    told = json.loads(stdout)
    assert (told["stopped"], told["rows"]) == (True, 30)
    assert "stopping; what is being written is finished first" in stderr
    assert stderr.endswith("stopped; run the same command to go on where it was\n")
