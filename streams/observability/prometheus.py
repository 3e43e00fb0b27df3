"""``PrometheusMetrics``: what an event source measures, as metrics of Prometheus, with probes beside them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from streams.observability.catalogue import OF_SOURCES, Instrument, Kind, Labels
from streams.observability.health import Verdict
from streams.observability.http_server import HttpServer, Probe, metrics_application
from streams.observability.observed_source import ObservedSource
from streams.source.event_source import EventSource

_log = logging.getLogger(__name__)


class PrometheusMetrics:
    """The metrics of one or more event sources of this process, and their probes.

    ``registry`` is a registry of their own, for ``serve`` and for servers of the application
    (``prometheus_client.make_asgi_app(metrics.registry)``). Make it before the sources start. Each metric has the label
    ``group``. Measurements are added up on the loop as they come; a scrape, on a thread of the server's, has each
    source look once at its own state.
    """

    def __init__(self, *sources: EventSource[Any]) -> None:
        self.registry = CollectorRegistry()
        self._sources = [ObservedSource(source) for source in sources]
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def serve(self, address: str, further: Mapping[str, Probe] | None = None, secret: str = "") -> HttpServer:
        """Serve ``/metrics``, ``/live`` and ``/ready`` at ``host:port`` (or ``port``: all addresses of the machine; 0:
        a free one) on threads of its own, until the server that is returned is closed. ``further``: more probes.
        ``secret``: only requests with ``Authorization: Bearer SECRET`` are answered.

        Raises ``ConfigError`` when the address is none, or taken.
        """
        probes = {"/live": self.live, "/ready": self.ready, **(further or {})}
        return HttpServer(address, metrics_application(self.registry), probes, secret)

    def live(self, query: dict[str, str]) -> Verdict:
        """Check that the event loops go on, as far as it matters: see ``SourceHealth``."""
        return Verdict.of([observed.health.live() for observed in self._sources])

    def ready(self, query: dict[str, str]) -> Verdict:
        """Check that the sources are joined and restored, and no further behind than ``max_lag`` records, or
        ``max_lag_seconds`` (of the query; no bound unless given)."""
        max_lag = int(query["max_lag"]) if "max_lag" in query else None
        seconds = float(query["max_lag_seconds"]) if "max_lag_seconds" in query else None
        return Verdict.of([observed.health.ready(max_lag, seconds) for observed in self._sources])

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for the registry. Any thread; on the loop of a source itself, without the ends of its
        partitions (and so without their lag)."""
        found = [(observed.group, observed.samples()) for observed in self._sources]
        for instrument in OF_SOURCES:
            family = family_of(instrument)
            for group, samples in found:
                for labels, value in samples[instrument].items():
                    add_sample(family, instrument, (group, *labels), value)
            yield family
        yield from self._own(found)

    def _own(self, found: Sequence[tuple[str, Mapping[Instrument, Mapping[Labels, Any]]]]) -> Iterator[Metric]:
        """Yield the metrics that the sources have declared. Two sources may share one of the same kind and labels."""
        families: dict[str, tuple[Instrument, Any]] = {}
        for observed, (group, samples) in zip(self._sources, found, strict=True):
            for name, instrument in observed.own.items():
                first, family = families.setdefault(name, (instrument, family_of(instrument)))
                if (first.kind, first.labels, first.buckets) != (
                    instrument.kind,
                    instrument.labels,
                    instrument.buckets,
                ):
                    _log.warning("the metric %s of group %s is another one than that of a group before it", name, group)
                    continue
                for labels, value in samples.get(instrument, {}).items():
                    add_sample(family, instrument, (group, *labels), value)
        for _, family in families.values():
            yield family


def _shape(instrument: Instrument) -> tuple[Any, ...]:
    return instrument.kind, instrument.labels, instrument.buckets


def family_of(instrument: Instrument) -> Any:
    """Make the empty metric of an instrument."""
    kinds = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily, Kind.HISTOGRAM: HistogramMetricFamily}
    return kinds[instrument.kind](instrument.name, instrument.help, labels=["group", *instrument.labels])


def add_sample(family: Any, instrument: Instrument, labels: Labels, value: Any) -> None:
    """Add a value; ``labels`` begin with the group."""
    if instrument.kind is Kind.HISTOGRAM:
        bounds = [*map(str, instrument.buckets), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(value[:-1]), strict=True)), value[-1])
    else:
        family.add_metric(labels, value)
