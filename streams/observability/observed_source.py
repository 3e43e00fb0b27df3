"""One source as exporters see it: what its measurements add up to, and a look at its statistics."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from streams.metrics import Measurement, OwnMeasured
from streams.observability import catalogue
from streams.observability.catalogue import OF_SOURCES, Instrument, Kind, Labels, Sample, figures, readings
from streams.observability.health import SCRAPE_SECONDS, SourceHealth
from streams.source.event_source import EventSource

Observe = Callable[[Instrument, float, Labels], None]


class ObservedSource:
    """Adds up the measurements of a source. ``observe`` takes the values of histograms, on the source's loop, where the
    exporter has its own; without it they are counted here."""

    def __init__(self, source: EventSource[Any], observe: Observe | None = None) -> None:
        self.group = source.config.group_id
        self.health = SourceHealth(source)
        self._source = source
        self._observe = observe
        # Written on the source's loop only, so it has no lock; read by copies, which are made in one step.
        self._sums: dict[tuple[Instrument, Labels], Any] = {
            (instrument, labels): [0.0] * (len(instrument.buckets) + 2) if instrument.buckets else 0.0
            for instrument in OF_SOURCES
            for labels in instrument.at_start
        }
        self._own: dict[str, Instrument] = {}
        source.add_metrics_handler(self._measured)

    def samples(self) -> dict[Instrument, dict[Labels, Any]]:
        """Return the present values by instrument and labels; of a histogram the counts of its buckets, of what is
        above them, and the sum. Any thread; waits for the source's loop, for ``SCRAPE_SECONDS`` at most."""
        found: dict[Instrument, dict[Labels, Any]] = defaultdict(dict)
        for (instrument, labels), value in self._sums.copy().items():
            found[instrument][labels] = value.copy() if isinstance(value, list) else value
        for instrument, value, labels in self._present():
            found[instrument][labels] = float(value)
        return found

    @property
    def own(self) -> dict[str, Instrument]:
        """The instruments of the metrics that the source has declared so far, by name."""
        for name, metric in self._source._declared.router.own_metrics.items():
            if name not in self._own:
                kind = Kind.COUNTER if metric.kind == "counter" else Kind.HISTOGRAM
                buckets = metric.buckets if kind is Kind.HISTOGRAM else ()
                self._own[name] = Instrument(name, kind, metric.help or name, metric.labels, (), buckets)
        return self._own

    def _measured(self, measurement: Measurement) -> None:
        sums, found = self._sums, readings(measurement)
        if isinstance(measurement, OwnMeasured):
            found = [(self.own[measurement.name], measurement.value, measurement.labels)]
        for instrument, value, labels in found:
            place = instrument, labels
            if instrument.kind is Kind.COUNTER:
                sums[place] = sums.get(place, 0.0) + value
            elif instrument.kind is Kind.GAUGE:
                sums[place] = value
            elif self._observe is not None:
                self._observe(instrument, value, labels)
            else:
                counts = sums.get(place)
                if counts is None:
                    counts = sums[place] = [0.0] * (len(instrument.buckets) + 2)
                counts[bisect_left(instrument.buckets, value)] += 1
                counts[-1] += value

    def _present(self) -> Iterable[Sample]:
        statistics = self.health.statistics(SCRAPE_SECONDS)
        yield catalogue.LOOP_ANSWERED, statistics is not None, ()
        if statistics is not None:
            yield catalogue.INFO, 1, (self._source.config.topic, statistics.instance_id)
            yield from figures(statistics)
