"""``PrometheusMetrics``: what an event source measures, as metrics of Prometheus, with probes beside them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from streams.event_source import EventSource
from streams.metrics import Measurement
from streams.observability import catalogue
from streams.observability.catalogue import INSTRUMENTS, Instrument, Kind, Labels, Sample, figures, readings
from streams.observability.health import SCRAPE_SECONDS, SourceHealth
from streams.observability.http_server import HttpServer, Verdict, metrics_application

_SUPERVISORS: Final = (catalogue.WORKER_UP, catalogue.WORKER_STARTS)


class PrometheusMetrics:
    """The metrics of one or more event sources of this process, and their probes.

    ``registry`` is a registry of their own, for ``serve`` and for servers of the application
    (``prometheus_client.make_asgi_app(metrics.registry)``). Make it before the sources start. Each metric has the label
    ``group``. Measurements are added up on the loop as they come; a scrape, on a thread of the server's, has each
    source look once at its own state.
    """

    def __init__(self, *sources: EventSource[Any]) -> None:
        self.registry = CollectorRegistry()
        self._sources = [_Observed(source) for source in sources]
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def serve(self, address: str) -> HttpServer:
        """Serve ``/metrics``, ``/live`` and ``/ready`` at ``host:port`` (or ``port``: all addresses of the machine; 0:
        a free one) on threads of its own, until the server that is returned is closed.

        Raises ``ConfigError`` when the address is none, or taken.
        """
        return HttpServer(address, metrics_application(self.registry), {"/live": self.live, "/ready": self.ready})

    def live(self, query: dict[str, str]) -> Verdict:
        """Check that the event loops go on, as far as it matters: see ``SourceHealth``."""
        return Verdict.of([observed.health.live() for observed in self._sources])

    def ready(self, query: dict[str, str]) -> Verdict:
        """Check that the sources are joined and restored, and no further behind than ``max_lag`` records (of the query;
        no bound unless given)."""
        max_lag = int(query["max_lag"]) if "max_lag" in query else None
        return Verdict.of([observed.health.ready(max_lag) for observed in self._sources])

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for the registry. Any thread; on the loop of a source itself, without the ends of its
        partitions (and so without their lag)."""
        found = [(observed.group, observed.samples()) for observed in self._sources]
        for instrument in INSTRUMENTS:
            if instrument not in _SUPERVISORS:
                family = _family(instrument)
                for group, samples in found:
                    for labels, value in samples[instrument].items():
                        _add(family, instrument, (group, *labels), value)
                yield family


class _Observed:
    """One source: what its measurements add up to, and a look at its statistics."""

    def __init__(self, source: EventSource[Any]) -> None:
        self.group = source.config.group_id
        self.health = SourceHealth(source)
        self._source = source
        # Written on the source's loop only, so it has no lock; read by copies, which are made in one step.
        self._sums: dict[tuple[Instrument, Labels], Any] = {
            (instrument, labels): [0.0] * (len(instrument.buckets) + 2) if instrument.buckets else 0.0
            for instrument in INSTRUMENTS
            for labels in instrument.at_start
            if instrument not in _SUPERVISORS
        }
        source.add_metrics_handler(self._measured)

    def _measured(self, measurement: Measurement) -> None:
        sums = self._sums
        for instrument, value, labels in readings(measurement):
            place = instrument, labels
            if instrument.kind is Kind.COUNTER:
                sums[place] = sums.get(place, 0.0) + value
            elif instrument.kind is Kind.GAUGE:
                sums[place] = value
            else:  # counts of the buckets, of what is above them, and the sum
                counts = sums.get(place)
                if counts is None:
                    counts = sums[place] = [0.0] * (len(instrument.buckets) + 2)
                counts[bisect_left(instrument.buckets, value)] += 1
                counts[-1] += value

    def samples(self) -> dict[Instrument, dict[Labels, Any]]:
        """Return the present values by instrument and labels."""
        found: dict[Instrument, dict[Labels, Any]] = defaultdict(dict)
        for (instrument, labels), value in self._sums.copy().items():
            found[instrument][labels] = value.copy() if isinstance(value, list) else value
        for instrument, value, labels in self._present():
            found[instrument][labels] = float(value)
        return found

    def _present(self) -> Iterable[Sample]:
        statistics = self.health.look(SCRAPE_SECONDS)
        yield catalogue.LOOP_ANSWERED, statistics is not None, ()
        if statistics is not None:
            yield catalogue.INFO, 1, (self._source.config.topic, statistics.instance_id)
            yield from figures(statistics)


def _family(instrument: Instrument) -> Any:
    kinds = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily, Kind.HISTOGRAM: HistogramMetricFamily}
    return kinds[instrument.kind](instrument.name, instrument.help, labels=["group", *instrument.labels])


def _add(family: Any, instrument: Instrument, labels: Labels, value: Any) -> None:
    if instrument.kind is Kind.HISTOGRAM:
        bounds = [*map(str, instrument.buckets), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(value[:-1]), strict=True)), value[-1])
    else:
        family.add_metric(labels, value)
