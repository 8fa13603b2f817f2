"""What deploy/ has is valid: for Kubernetes' own schemas, for Helm, for systemd, and for our command line."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from tests.core.test_docs_blocks import refusal
from tests.integration.deploy.manifests import (
    DEPLOY,
    ROOT,
    Manifest,
    commands,
    containers,
    image_command,
    rendered,
    unit_commands,
    workloads,
    written,
)

pytestmark = pytest.mark.timeout(900)  # the first one builds the renderer, unless `python -m tests.peers` did

KUBERNETES = "1.34"
OURS = ("keda.sh/v1alpha1",)
"""Kinds of which Kubernetes itself has no schema: `check_scaled_object` has ours."""


@pytest.fixture(params=["manifests", "chart"])
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return written() if request.param == "manifests" else rendered()


def test_every_object_is_valid_for_kubernetes(manifests: list[Manifest]) -> None:
    kinds = set()
    for one in manifests:
        kinds.add(one["kind"])
        if one["apiVersion"] in OURS:
            check_scaled_object(one)
        else:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
    assert kinds == {"Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "ScaledObject"}


def test_a_wrong_field_is_noticed() -> None:
    wrong = next(one for one in written() if one["kind"] == "Deployment")
    wrong["spec"]["replikas"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def check_scaled_object(one: Manifest) -> None:
    """By KEDA's documentation of ScaledObject and of the metrics-api scaler."""
    spec = one["spec"]
    assert set(spec) == {
        "scaleTargetRef",
        "minReplicaCount",
        "maxReplicaCount",
        "pollingInterval",
        "advanced",
        "triggers",
    }
    assert set(spec["scaleTargetRef"]) == {"name"}
    assert 0 < spec["minReplicaCount"] <= spec["maxReplicaCount"]
    (trigger,) = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("metrics-api", "AverageValue")
    assert set(trigger["metadata"]) == {"url", "valueLocation", "targetValue"}
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert trigger["metadata"]["url"].endswith(":9466/wanted")
    assert trigger["metadata"]["valueLocation"] == "wanted"
    horizontal = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    metric = {
        "type": "External",
        "external": {"metric": {"name": "s0"}, "target": {"type": "AverageValue", "averageValue": "1"}},
    }
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec["scaleTargetRef"]["name"]}
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "keda-hpa-shop"},
        "spec": {"scaleTargetRef": target, "maxReplicas": 2, "metrics": [metric], "behavior": horizontal},
    }
    kubernetes_validate.validate(autoscaler, KUBERNETES, strict=True)


def test_every_command_is_one(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [*commands(manifests), *unit_commands(), ("Dockerfile", image_command())]
    assert len(found) >= 9
    for where, line in found:
        assert refusal(line, monkeypatch) is None, f"{where}: {line}"


def test_pods_have_time_to_drain_probes_and_limits(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        for one in containers(workload):
            where = workload["metadata"]["name"]
            assert {"requests", "limits"} == set(one["resources"]), where
            assert one["securityContext"]["readOnlyRootFilesystem"] is True, where
            assert "livenessProbe" in one, where
            (port,) = one["ports"]
            served = next(word for word in one["args"] if word.startswith(("--port=", "--metrics-port=")))
            assert served.endswith(f"={port['containerPort']}"), where
            if one["args"][0] != "run":
                continue
            (stop_s,) = (float(word.partition("=")[2]) for word in one["args"] if word.startswith("--stop-timeout="))
            # A worker that does not end is killed 5 s after its time, and the supervisor needs a moment.
            assert pod["terminationGracePeriodSeconds"] >= stop_s + 10, where
            assert one["readinessProbe"]["httpGet"]["path"] == "/readyz", where
            assert "lifecycle" not in one, "SIGTERM drains: a preStop hook would only take time from it"


def test_services_and_budgets_select_pods(manifests: list[Manifest]) -> None:
    pods = [one["spec"]["template"]["metadata"]["labels"].items() for one in workloads(manifests)]
    for one in manifests:
        spec = one["spec"]
        if one["kind"] == "Service":
            wanted = spec["selector"]
        elif one["kind"] == "PodDisruptionBudget":
            wanted = spec["selector"]["matchLabels"]
        else:
            continue
        assert any(wanted.items() <= labels for labels in pods), one["metadata"]["name"]
    names = {one["metadata"]["name"] for one in manifests if one["kind"] == "Service"}
    for one in manifests:
        if one["kind"] == "ScaledObject":
            host = one["spec"]["triggers"][0]["metadata"]["url"].split("/")[2].split(":")[0].split(".")[0]
            assert host in names


def test_a_chart_without_its_options() -> None:
    off = {"enabled": False}
    found = rendered(exporter=off, web=off, keda=off, groups=[])
    assert {(one["kind"], one["metadata"]["name"]) for one in found} == {
        ("Deployment", "shop"),
        ("PodDisruptionBudget", "shop"),
        ("Deployment", "shop-autoscale"),
        ("Service", "shop-autoscale"),
    }
    shop = next(one for one in found if one["metadata"]["name"] == "shop" and one["kind"] == "Deployment")
    assert shop["spec"]["replicas"] == 3, "KEDA owns the number only where it scales"
    assert "replicas" not in next(one for one in rendered() if one["metadata"]["name"] == "shop")["spec"]


def test_the_image_is_small_and_runs_as_nobody_special() -> None:
    lines = (DEPLOY / "docker" / "Dockerfile").read_text().splitlines()
    stages = [line for line in lines if line.startswith("FROM ")]
    assert len(stages) == 2
    assert all("-slim" in line for line in stages)
    assert "USER 10001" in lines
    assert (ROOT / "examples" / "kubernetes" / "requirements.txt").read_text() == "keylane[fast,metrics,web]\n"


@pytest.mark.parametrize("name", ["keylane-shop.service", "keylane-exporter.service"])
def test_units_are_valid_for_systemd(name: str, tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not on PATH")
    unit = tmp_path / name
    text = (DEPLOY / "systemd" / name).read_text()
    # It looks whether the program and the user are there.
    unit.write_text(text.replace("/opt/shop/venv/bin/keylane", "/bin/true").replace("User=keylane", "User=root"))
    done = subprocess.run(
        [tool, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if name in line]) == (0, []), done.stderr


def test_a_unit_has_time_to_drain() -> None:
    text = (DEPLOY / "systemd" / "keylane-shop.service").read_text()
    assert "TimeoutStopSec=40" in text
    assert "--stop-timeout 25" in text
    assert "KillMode=mixed" in text
