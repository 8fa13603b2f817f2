"""The command that is given to Spark, and what is refused: plain function calls."""

from __future__ import annotations

import shlex

import pytest

from keylane.errors import InvalidInput
from keylane.spark.cluster.submit import Command, Machine, Submission, build, is_elsewhere
from keylane.spark.pipelines.session import check_settings

HERE = Machine("/opt/spark", "/opt/java", "/home/me/.venv/bin/python")
ON_CLUSTER = Submission(app="app.py", master="spark://host:7077", env="env.tar.gz")


def conf_of(command: Command) -> dict[str, str]:
    arguments = list(command.arguments)
    values = [arguments[place + 1] for place, word in enumerate(arguments) if word == "--conf"]
    return dict(value.split("=", 1) for value in values)


def value_of(command: Command, option: str) -> str:
    return command.arguments[command.arguments.index(option) + 1]


def test_a_local_program_runs_on_this_python_and_java() -> None:
    command = build(Submission(app="jobs/app.py", arguments=("--master", "x y")), HERE)
    assert command.arguments[0] == "/opt/spark/bin/spark-submit"
    assert command.arguments[-3:] == ("jobs/app.py", "--master", "x y")
    assert (value_of(command, "--master"), value_of(command, "--name")) == ("local[*]", "app")
    assert command.environment == {"JAVA_HOME": "/opt/java", "SPARK_HOME": "/opt/spark"}
    assert conf_of(command) == {"spark.pyspark.python": HERE.python, "spark.pyspark.driver.python": HERE.python}
    assert command.stand_in is None


def test_executors_get_the_python_of_the_archive_and_the_driver_a_stand_in() -> None:
    command = build(ON_CLUSTER, HERE, environment="env-1")
    assert value_of(command, "--archives") == "env.tar.gz#env-1"
    assert conf_of(command)["spark.pyspark.python"] == "./env-1/bin/python"
    assert conf_of(command)["spark.pyspark.driver.python"] == HERE.python
    assert command.stand_in == ("./env-1/bin/python", f'#!/bin/sh\nexec {HERE.python} "$@"\n')


@pytest.mark.parametrize("master", ["yarn", "k8s://https://host:6443"])
def test_a_driver_in_the_cluster_runs_on_the_archive_too(master: str) -> None:
    asked = Submission(app="local:///opt/app.py", master=master, deploy_mode="cluster", env="hdfs:///env.tar.gz")
    command = build(asked, HERE)
    assert conf_of(command) == {"spark.pyspark.python": "./environment/bin/python"}
    assert command.stand_in is None


def test_settings_files_and_name_are_passed_on() -> None:
    asked = Submission(
        app="app.py", name="my orders", conf=("spark.a=b=c", "spark.executor.memory=1g"), files=("a.creds", "/b/ca.pem")
    )
    command = build(asked, HERE)
    assert value_of(command, "--files") == "a.creds,/b/ca.pem"
    assert value_of(command, "--name") == "my orders"
    assert conf_of(command)["spark.a"] == "b=c"
    assert conf_of(command)["spark.executor.memory"] == "1g"


def test_without_an_archive_executors_run_on_the_python_that_is_named() -> None:
    asked = Submission(app="app.py", master="yarn", conf=("spark.pyspark.python=/opt/py",))
    assert conf_of(build(asked, HERE)) == {"spark.pyspark.python": "/opt/py"}
    named = Machine("/opt/spark", "/opt/java", "/here/python", workers_python="/there/python")
    found = conf_of(build(Submission(app="app.py", master="yarn"), named))
    assert found == {"spark.pyspark.python": "/there/python", "spark.pyspark.driver.python": "/here/python"}
    clustered = conf_of(build(Submission(app="app.py", master="local-cluster[2,1,1024]"), HERE))
    assert clustered["spark.pyspark.python"] == HERE.python


@pytest.mark.parametrize(
    "master",
    ["local", "local[4]", "local[*]", "local[*,3]", "local-cluster[2, 1, 1024]", "spark://a:1,b:2", "yarn", "k8s://x"],
)
def test_forms_of_masters(master: str) -> None:
    python = ("spark.pyspark.python=python3",)
    assert value_of(build(Submission(app="a.py", master=master, conf=python), HERE), "--master") == master


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Submission(app="a.py", master="spark:/host"), "--master 'spark:/host' is not one of local, "),
        (Submission(app="a.py", master="local[x]"), "is not one of"),
        (Submission(app="a.py", master="spark://host"), "spark://HOST:PORT"),
        (Submission(app="a.py", deploy_mode="kluster"), "--deploy-mode 'kluster' must be client or cluster"),
        (Submission(app="a.py", deploy_mode="cluster"), "nothing that Spark can do for Python programs"),
        (Submission(app="a.py", master="spark://h:1", deploy_mode="cluster"), "use yarn or k8s://"),
        (Submission(app="a.py", env="e.tar.gz"), "with master local[*] there are none: leave it out"),
        (Submission(app="a.py", master="yarn"), "need a Python with keylane: give --env"),
        (Submission(app="a.py", conf=("spark.a",)), "--conf 'spark.a' must be of the form spark.NAME=VALUE"),
        (Submission(app="a.py", conf=("memory=1g",)), "--conf 'memory=…' must be of the form"),
        (Submission(app="a.py", files=("a,b",)), "--files 'a,b' has a comma"),
        (
            Submission(app="a.py", master="yarn", env="e.tar.gz", conf=("spark.pyspark.python=x",)),
            "--env decides which Python runs: leave out --conf spark.pyspark.python",
        ),
    ],
)
def test_what_cannot_work_is_refused(asked: Submission, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        build(asked, HERE)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "setting",
    [
        "spark.executorEnv.NATS_PASSWORD=sesame",
        "spark.yarn.appMasterEnv.NATS_TOKEN=sesame",
        "spark.kubernetes.driverEnv.NATS_USER=sesame",
        "spark.executor.extraJavaOptions=-Dnats_password=sesame",
        "spark.executorEnv.NATS_URL=nats://bob:sesame@host:4222",
        "spark.app.server=tls://sesame@host",
        "spark.executorEnv.NATS_URL=bob:sesame@host",
        "spark.executorEnv.NATS_URL=sesame@host",
        "spark.executorEnv.NATS_URL=nats://bob:sesame/x@host",
        "spark.app.server=nats://a,bob:sesame@host:4222",
        "spark.executorEnv.NATS_PASSWD=sesame",
        "spark.executorEnv.NATS_USER_TOKEN=sesame",
        "spark.executorEnv.NATS_NKEY=SUASESAME" + 50 * "A",
    ],
)
def test_secrets_are_refused_and_not_repeated(setting: str) -> None:
    with pytest.raises(InvalidInput, match="--files") as refused:
        build(Submission(app="a.py", conf=(setting,)), HERE)
    assert "sesame" not in str(refused.value).lower()
    with pytest.raises(InvalidInput) as refused:
        check_settings((setting,))
    assert "sesame" not in str(refused.value).lower()


@pytest.mark.parametrize(
    "arguments",
    [
        ("in", "nats://bob:sesame@host"),
        ("in", "bob:sesame@host:4222"),
        ("--server", "sesame@host"),
        ("in", "--server=sesame@host"),
        ("-s", "nats://a,bob:sesame@[::1]:4222"),
    ],
)
def test_a_login_in_an_argument_of_the_program_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput, match="argument 2 of the program") as refused:
        build(Submission(app="a.py", arguments=arguments), HERE)
    assert "sesame" not in str(refused.value)


def test_other_arguments_with_an_at_sign_are_taken() -> None:
    arguments = ("bob@example.org", "abfss://data@account/x", "image:1.0@sha256:0a1b", "--to=a@b")
    assert build(Submission(app="a.py", arguments=arguments), HERE).arguments[-len(arguments) :] == arguments


def test_a_pipelines_conf_is_never_repeated() -> None:
    with pytest.raises(InvalidInput, match="conf is 'NATS_PASSWORD=…'") as refused:
        check_settings(("NATS_PASSWORD=sesame",))
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize(
    "setting",
    [
        "spark.kubernetes.executor.secretKeyRef.NATS_PASSWORD=nats-login:password",
        "spark.executorEnv.NATS_CREDS=/etc/nats/app.creds",
        "spark.executorEnv.NATS_URL=nats://host:4222",
        "spark.executorEnv.NATS_NKEY=/etc/nats/app.nk",
        "spark.kubernetes.container.image=spark:4.3@sha256:0a1b2c",
        "spark.sql.warehouse.dir=abfss://data@account.dfs.core.windows.net/x",
    ],
)
def test_references_to_secrets_are_no_secrets(setting: str) -> None:
    name, value = setting.split("=", 1)
    assert conf_of(build(Submission(app="a.py", conf=(setting,)), HERE))[name] == value


def test_the_shell_form_says_the_same() -> None:
    asked = Submission(
        app="my app.py", arguments=("--since", "a 'b'"), master="spark://h:1", env="e.tar.gz", conf=("spark.x=a b",)
    )
    command = build(asked, HERE)
    assert command.shell().startswith("mkdir -p environment/bin\nprintf %s ")
    words = shlex.split(command.shell().replace("\\\n", ""))
    assert words[-len(command.arguments) :] == list(command.arguments)
    assert words[-len(command.arguments) - 2 : -len(command.arguments)] == [
        "JAVA_HOME=/opt/java",
        "SPARK_HOME=/opt/spark",
    ]


def test_addresses_are_told_from_paths() -> None:
    assert is_elsewhere("hdfs:///a.py")
    assert is_elsewhere("local:/opt/a.py")
    assert not is_elsewhere("/opt/a.py")
    assert not is_elsewhere("a:b.py")
