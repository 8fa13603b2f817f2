"""Names of metrics: what is exported, what the page lists, and what alert rules ask for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keylane.errors import InvalidInput
from keylane.metrics import METRICS, MetricSpec, Reading, exposition
from keylane.metrics.alert_rules import ALERT_RULES, rules_file
from keylane.metrics.fleet_metrics import cause_of

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "keylane-fleet.rules.yml"
SEED = (
    *("consumer_messages_total", "consumer_redeliveries_total", "consumer_inflight", "consumer_subject_count"),
    *("consumer_update_duration_seconds", "consumer_update_failures_total", "consumer_update_skipped_total"),
    "handler_latency_seconds",
)


def reading(spec: MetricSpec) -> Reading:
    value = [[1] * (len(spec.bounds_s) + 1), 2.5] if spec.kind == "histogram" else 3
    return Reading(spec.name, dict.fromkeys(spec.labels, "x"), value)


def test_every_metric_is_exported_under_its_prefix() -> None:
    content, kind = exposition(map(reading, METRICS), "parti_")
    assert kind.startswith("text/plain")
    found = {family.name: family for family in text_string_to_metric_families(content.decode())}
    for spec in METRICS:
        family = found.pop(f"parti_{spec.name.removesuffix('_total')}")
        assert family.type == spec.kind
        assert family.documentation == spec.help
        assert {label for sample in family.samples for label in sample.labels} - {"le"} == set(spec.labels)
    assert not found
    assert set(SEED) <= {spec.name for spec in METRICS}


def test_buckets_are_cumulative() -> None:
    spec = next(one for one in METRICS if one.kind == "histogram")
    content = exposition([reading(spec)], "k_")[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(content)}
    samples = families[f"k_{spec.name}"].samples
    buckets = [one.value for one in samples if one.name.endswith("_bucket")]
    assert buckets == list(range(1, len(spec.bounds_s) + 2))
    assert next(one.value for one in samples if one.name.endswith("_count")) == len(spec.bounds_s) + 1
    assert next(one.value for one in samples if one.name.endswith("_sum")) == 2.5


def test_what_has_no_reading_is_not_there() -> None:
    content = exposition([], "k_")[0].decode()
    assert not content.strip()


def test_no_label_can_hold_a_key_or_a_subject() -> None:
    who = {"stream", "fleet", "worker", "group", "kind", "member", "partition", "process", "client"}
    allowed = who | {"outcome", "cause", "state"}
    assert {label for spec in METRICS for label in spec.labels} <= allowed


def test_a_wrong_prefix_is_refused() -> None:
    with pytest.raises(InvalidInput, match="metrics prefix 'my-app_': use letters, digits and '_'"):
        exposition([], "my-app_")


def test_the_page_lists_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z_]+)` \| (\w+) \| ([^|]*) \| (.+) \|$", page, re.MULTILINE)
    assert [(name, kind, labels) for name, kind, labels, _ in listed] == [
        (spec.name, spec.kind, ", ".join(f"`{label}`" for label in spec.labels)) for spec in METRICS
    ]
    assert [text for *_, text in listed] == [spec.help for spec in METRICS]


def test_the_rules_file_is_the_one_that_the_rules_make() -> None:
    assert RULES.read_text(encoding="utf-8") == rules_file()


@pytest.mark.parametrize("prefix", ["keylane_", "parti_"])
def test_every_metric_in_a_rule_is_exported(prefix: str) -> None:
    exported = {sample for spec in METRICS for sample in samples_of(spec, prefix)}
    asked = re.findall(rf"\b{prefix}\w+", "\n".join(re.findall(r"expr: (.*)", rules_file(prefix))))
    assert set(asked) <= exported
    assert len(asked) > len(ALERT_RULES)


def samples_of(spec: MetricSpec, prefix: str) -> list[str]:
    endings = ["_bucket", "_count", "_sum"] if spec.kind == "histogram" else [""]
    return [f"{prefix}{spec.name}{ending}" for ending in endings]


def test_the_rules_are_well_formed() -> None:
    for one in ALERT_RULES:
        assert re.fullmatch(r"[A-Z][A-Za-z]+", one.name)
        assert re.fullmatch(r"\d+[mhd]", one.lasts)
        assert one.severity in {"info", "warning", "critical"}
        assert one.expression.count("(") == one.expression.count(")")
    assert len({one.name for one in ALERT_RULES}) == len(ALERT_RULES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool on PATH")
def test_promtool_takes_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_causes_are_bounded() -> None:
    reasons = ["3 workers", "worker 3 joined", "workers 1,2 lost; worker 3 joined", "worker 4 leaving", "?"]
    assert [cause_of(one) for one in reasons] == ["start", "join", "crash", "leave", "other"]
    assert cause_of("12 partitions without a worker") == "partitions"
    assert cause_of("another leader, or a worker that came back") == "restore"
