"""Metrics through OpenTelemetry: the names and numbers of Prometheus, one look at the source per collection."""

from __future__ import annotations

import importlib
import re
import sys
from itertools import accumulate
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader

from streams.metrics import OwnMeasured
from streams.observability import OpenTelemetryMetrics, PrometheusMetrics
from streams.observability.catalogue import OF_SOURCES, Kind
from tests.unit.cli_kit import forget_modules
from tests.unit.runtime_kit import Bench, nothing
from tests.unit.test_metrics_export import MEASURED, _FullSource, config_of, scraped

Points = dict[tuple[str, tuple[tuple[str, str], ...]], Any]


class Collected:
    """A provider whose metrics are collected into a dictionary."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])

    def points(self) -> Points:
        data = self.reader.get_metrics_data()
        assert data is not None
        return {
            (metric.name, tuple(sorted((point.attributes or {}).items()))): point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }


@pytest.fixture
def collected() -> Any:
    made = Collected()
    yield made
    made.provider.shutdown()


def test_the_names_and_numbers_are_those_of_prometheus(collected: Collected) -> None:
    source = _FullSource(config_of("g"))
    source.metric("orders", labels=("kind",))
    source.metric("cents", "histogram")
    prometheus = PrometheusMetrics(source)
    OpenTelemetryMetrics(source, meter=collected.provider.get_meter("the application's"))
    for measurement, _ in (*MEASURED, (OwnMeasured("cents", 2.5), {})):
        source._run.measured(source.config).metrics_handler(measurement)  # type: ignore[misc]
    points, samples = collected.points(), scraped(prometheus)
    seen = set()
    for (name, labels), point in points.items():
        seen.add(name)
        if isinstance(point, HistogramDataPoint):
            assert samples[f"{name}_count", labels] == point.count, name
            assert samples[f"{name}_sum", labels] == pytest.approx(point.sum), name
            for bound, count in zip(point.explicit_bounds, accumulate(point.bucket_counts), strict=False):
                assert samples[f"{name}_bucket", tuple(sorted((*labels, ("le", str(bound)))))] == count, name
        else:
            counted = f"{name}_total" if (f"{name}_total", labels) in samples else name
            assert samples[counted, labels] == point.value, name
    assert seen == {"orders", "cents", *(instrument.name for instrument in OF_SOURCES)}
    plain = {
        (re.sub("_total$", "", name), labels)
        for name, labels in samples
        if name.startswith(("kes_", "orders")) and not name.endswith(("_bucket", "_sum", "_count"))
    }
    assert plain == {place for place, point in points.items() if not isinstance(point, HistogramDataPoint)}


async def test_one_collection_looks_once_and_histograms_are_recorded(bench: Bench, collected: Collected) -> None:
    source = bench.make(nothing, partitions=2)
    clock = iter(float(number) for number in range(10_000))
    metrics = OpenTelemetryMetrics(source, meter_provider=collected.provider, now=lambda: next(clock) / 1000)
    looks = []
    (observed,) = metrics._sources
    samples = observed.samples
    observed.samples = lambda: looks.append(1) or samples()  # type: ignore[method-assign, func-returns-value]
    await bench.start("a", "b")
    await bench.committed()
    points = collected.points()
    group = ("group", "g")
    assert points["kes_events", (group,)].value == 2
    assert points["kes_partition_next_offset", (group, ("partition", "0"))].value == 2
    assert points["kes_transaction_commit_seconds", (group,)].count >= 1
    assert len(looks) == 1
    await bench.end()


def test_every_kind_of_instrument_is_there_before_anything_happened(collected: Collected) -> None:
    OpenTelemetryMetrics(_FullSource(config_of("g")), meter_provider=collected.provider)
    points = collected.points()
    assert points["kes_failed_events", (("group", "g"), ("response", "dead_letter"))].value == 0
    kinds = {each.name: each.kind for each in OF_SOURCES}
    assert {kinds[name] for name, _ in points} == {Kind.COUNTER, Kind.GAUGE}


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("opentelemetry.metrics", "OpenTelemetryMetrics", "otel"),
        ("prometheus_client", "PrometheusMetrics", "prometheus"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, package: str, name: str, extra: str) -> None:
    forget_modules(monkeypatch, "streams.observability")
    monkeypatch.setitem(sys.modules, package, None)
    fresh = importlib.import_module("streams.observability")
    with pytest.raises(ModuleNotFoundError, match=rf"{name} needs .*pip install 'kafka-event-source\[{extra}\]'"):
        getattr(fresh, name)
    with pytest.raises(AttributeError, match="has no attribute 'Statsd'"):
        getattr(fresh, "Statsd")  # noqa: B009
