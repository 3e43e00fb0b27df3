"""Metrics and probes of a pipeline at one address, as ``kes run`` has them for an event source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from streams.observability import HttpServer
from streams.observability.health import Verdict
from streams.observability.http_server import metrics_application
from streams.spark.running.statistics import PipelineStatistics

SILENT_SECONDS: Final = 120.0
"""A pipeline whose look at its queries takes longer is not live: Spark does not answer."""
_GAUGES: Final = {
    "batch": ("kes_spark_batch", "Number of the last batch."),
    "rows": ("kes_spark_batch_rows", "Rows that the last batch read."),
    "batch_seconds": ("kes_spark_batch_seconds", "Time of the last batch."),
    "input_rows_per_second": ("kes_spark_input_rows_per_second", "Rate at which rows came, at the last batch."),
    "processed_rows_per_second": ("kes_spark_processed_rows_per_second", "Rate of the last batch."),
    "lag": ("kes_spark_lag", "Offsets between the end of the last batch and the ends of the topics then."),
}
"""Fields of ``QueryStatistics`` that are exported, where they are known."""


class PipelineMetrics:
    """All metrics have the labels ``pipeline`` and ``query``. Used by threads of the server."""

    def __init__(self, pipeline: PipelineStatistics) -> None:
        self._pipeline = pipeline
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def serve(self, address: str) -> HttpServer:
        """Serve until the server is closed. Raises ``ConfigError``."""
        return HttpServer(address, metrics_application(self.registry), {"/live": self.live, "/ready": self.ready})

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the last look at the queries."""
        labels = ["pipeline", "query"]
        up = GaugeMetricFamily("kes_spark_query_up", "1: the query runs.", labels=labels)
        starts = CounterMetricFamily("kes_spark_query_starts", "Starts of the query.", labels=labels)
        gauges = {field: GaugeMetricFamily(*named, labels=labels) for field, named in _GAUGES.items()}
        for query in self._pipeline.statistics():
            at = [self._pipeline.name, query.name]
            up.add_metric(at, float(query.state == "running"))
            starts.add_metric(at, query.starts)
            for field, family in gauges.items():
                if (value := getattr(query, field)) is not None:
                    family.add_metric(at, value)
        yield up
        yield starts
        yield from gauges.values()

    def live(self, query: dict[str, str]) -> Verdict:
        """Not live: a query has failed for good, or Spark has not answered for so long as ``SILENT_SECONDS``."""
        if (silent := self._pipeline.silent_seconds()) > SILENT_SECONDS:
            return Verdict(False, f"{self._pipeline.name}: Spark has not answered for {silent:.0f} s")
        return Verdict.of(
            [
                Verdict(each.state != "failed", f"{each.name}: {each.state} {each.error}".rstrip())
                for each in self._pipeline.statistics()
            ]
        )

    def ready(self, query: dict[str, str]) -> Verdict:
        """Not ready: a query does not run, has no batch behind it yet, or is more than ``max_lag`` offsets (of the
        query; no bound unless given) behind."""
        most = int(query["max_lag"]) if "max_lag" in query else None
        verdicts = []
        for each in self._pipeline.statistics():
            reason = ""
            if each.state not in ("running", "finished"):
                reason = f"does not run: {each.error or 'it is being started'}"
            elif each.batch is None and each.state == "running":
                reason = "its first batch is not done"
            elif most is not None and (each.lag or 0) > most:
                reason = f"{each.lag} offsets behind, more than {most}"
            verdicts.append(Verdict(not reason, f"{each.name}: {reason or 'ready'}"))
        return Verdict.of(verdicts)
