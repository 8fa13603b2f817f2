"""The objects and commands of deploy/: manifests, the chart as Helm renders it, systemd units, the Dockerfile."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.peers import go

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "keylane"
_ARRAY = re.compile(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", re.MULTILINE)

Manifest = dict[str, Any]


def written() -> list[Manifest]:
    """Of deploy/kubernetes."""
    found: list[Manifest] = []
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        if path.name != "kustomization.yaml":
            found += [one for one in yaml.safe_load_all(path.read_text()) if one]
    return found


def rendered(**values: object) -> list[Manifest]:
    """Of the chart, with these values instead of its own."""
    command = [str(go.program("helm-render")), str(CHART), json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in ("Deployment", "StatefulSet")]


def containers(workload: Manifest) -> list[Manifest]:
    found: list[Manifest] = workload["spec"]["template"]["spec"]["containers"]
    return found


def commands(manifests: list[Manifest]) -> Iterator[tuple[str, str]]:
    """Where it is, and the command line that a container runs."""
    for workload in workloads(manifests):
        for one in containers(workload):
            yield f"{workload['kind']} {workload['metadata']['name']}", shlex.join(["keylane", *one["args"]])


def unit_commands() -> Iterator[tuple[str, str]]:
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        line = next(line for line in path.read_text().splitlines() if line.startswith("ExecStart="))
        yield path.name, line.partition("=")[2].replace("/opt/shop/venv/bin/", "")


def image_command() -> str:
    """What the image runs without arguments."""
    words = [
        word for found in _ARRAY.findall((DEPLOY / "docker" / "Dockerfile").read_text()) for word in json.loads(found)
    ]
    return shlex.join(words)
