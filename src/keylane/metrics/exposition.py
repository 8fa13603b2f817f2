"""Readings in the formats of Prometheus, through prometheus-client.

Several processes are one answer: each brings readings with its worker as a label, so that they never collide. That is
simpler than the multiprocess mode of prometheus-client, which writes every count through files that a crash leaves
behind, and no process needs a port of its own. A process that is replaced begins its counters at 0, as `rate` and
`increase` expect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from keylane.errors import InvalidInput
from keylane.extras import extra_missing
from keylane.metrics.catalogue import DEFAULT_PREFIX, METRICS, MetricSpec, Reading

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_PREFIX = re.compile(r"(?:[a-zA-Z_][a-zA-Z0-9_]*)?")


def check_prefix(prefix: str) -> str:
    """Return the prefix of metric names unchanged, or raise `InvalidInput`."""
    if not _PREFIX.fullmatch(prefix):
        raise InvalidInput(f"metrics prefix {prefix!r}: use letters, digits and '_', such as {DEFAULT_PREFIX!r}")
    return prefix


def require_client() -> None:
    """Raise `ExtraMissing` if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401, PLC0415 - an extra: only who wants metrics needs it
    except ImportError:
        raise extra_missing("metrics need prometheus-client", "metrics") from None


class ReadingsCollector:
    """A collector for a registry of prometheus-client.

    >>> prometheus_client.REGISTRY.register(ReadingsCollector(metrics.readings))
    """

    def __init__(self, readings: Callable[[], Iterable[Reading]], prefix: str = DEFAULT_PREFIX) -> None:
        require_client()
        self._readings = readings
        self._prefix = check_prefix(prefix)

    def collect(self) -> Iterator[Metric]:
        """Every metric that has a reading, in the order of the catalogue."""
        by_name: dict[str, list[Reading]] = {}
        for one in self._readings():
            by_name.setdefault(one.name, []).append(one)
        for spec in METRICS:
            if spec.name in by_name:
                yield _family(self._prefix, spec, by_name[spec.name])

    def describe(self) -> list[Metric]:
        return []


def exposition(readings: Iterable[Reading], prefix: str, accept: str = "") -> tuple[bytes, str]:
    """The answer to a scrape, and its content type, as the client accepts it."""
    require_client()
    from prometheus_client import CollectorRegistry  # noqa: PLC0415
    from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

    found = list(readings)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReadingsCollector(lambda: found, prefix))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _family(prefix: str, spec: MetricSpec, readings: list[Reading]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily  # noqa: PLC0415

    name = prefix + spec.name
    if spec.kind == "histogram":
        histogram = HistogramMetricFamily(name, spec.help, labels=spec.labels)
        for one in readings:
            counts, total = one.value
            bounds = [*map(str, spec.bounds_s), "+Inf"]
            buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
            histogram.add_metric([one.labels[label] for label in spec.labels], buckets, total)
        return histogram
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = kind(name, spec.help, labels=spec.labels)
    for one in readings:
        family.add_metric([one.labels[label] for label in spec.labels], one.value)
    return family
