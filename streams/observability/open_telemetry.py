"""``OpenTelemetryMetrics``: what an event source measures, as metrics of OpenTelemetry."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation, get_meter

from streams.observability.catalogue import OF_SOURCES, Instrument, Kind, Labels
from streams.observability.observed_source import ObservedSource
from streams.source.event_source import EventSource

FRESH_SECONDS: Final = 1.0
"""A look at the sources serves all instruments of one collection, which come one after the other."""


class OpenTelemetryMetrics:
    """The metrics of one or more event sources of this process, by the names that Prometheus has for them (exporters
    add ``_total`` themselves), with the attribute ``group``.

    They go to ``meter``, or a meter of ``meter_provider`` (default: the global one, which the application sets;
    without one they go nowhere). Make it before the sources start, and behind ``source.metric``. Counters and gauges
    are read when the provider collects, on its thread; the values of histograms are recorded on the loop, per
    transaction and per job.
    """

    def __init__(
        self,
        *sources: EventSource[Any],
        meter_provider: MeterProvider | None = None,
        meter: Meter | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        meter = get_meter("streams", meter_provider=meter_provider) if meter is None else meter
        self._now = now
        self._lock = threading.Lock()
        self._found: list[tuple[str, dict[Instrument, dict[Labels, Any]]]] = []
        self._read_at = float("-inf")
        self._histograms: dict[Instrument, Histogram] = {}
        self._sources = [ObservedSource(source, partial(self._record, source.config.group_id)) for source in sources]
        for instrument in (*OF_SOURCES, *(own for observed in self._sources for own in observed.own.values())):
            unit = "s" if instrument in OF_SOURCES else ""
            callbacks, text = [partial(self._observations, instrument)], instrument.help
            if instrument.kind is Kind.HISTOGRAM:
                self._histograms[instrument] = meter.create_histogram(
                    instrument.name,
                    unit,
                    text,
                    explicit_bucket_boundaries_advisory=instrument.buckets,
                )
            elif instrument.kind is Kind.COUNTER:
                meter.create_observable_counter(instrument.name, callbacks, description=text)
            else:
                meter.create_observable_gauge(instrument.name, callbacks, description=text)

    def _record(self, group: str, instrument: Instrument, value: float, labels: Labels) -> None:
        self._histograms[instrument].record(value, _attributes(instrument, group, labels))

    def _observations(self, instrument: Instrument, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(value, _attributes(instrument, group, labels))
            for group, samples in self._samples()
            for labels, value in samples.get(instrument, {}).items()
        ]

    def _samples(self) -> list[tuple[str, dict[Instrument, dict[Labels, Any]]]]:
        with self._lock:
            if self._now() - self._read_at > FRESH_SECONDS:
                self._found = [(observed.group, observed.samples()) for observed in self._sources]
                self._read_at = self._now()
            return self._found


def _attributes(instrument: Instrument, group: str, labels: Labels) -> dict[str, str]:
    return {"group": group, **dict(zip(instrument.labels, labels, strict=True))}
