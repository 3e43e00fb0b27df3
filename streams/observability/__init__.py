"""Metrics, traces and health of event sources: for Prometheus and probes (extra ``prometheus``), for OpenTelemetry
(extra ``otel``). A name is imported when it is first used: each needs its own extra."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.observability.http_server import HttpServer
    from streams.observability.open_telemetry import OpenTelemetryMetrics
    from streams.observability.prometheus import PrometheusMetrics
    from streams.observability.relay_metrics import RelayMetrics
    from streams.observability.traces import OpenTelemetryTraces

__all__ = ["HttpServer", "OpenTelemetryMetrics", "OpenTelemetryTraces", "PrometheusMetrics", "RelayMetrics"]

_HOMES = {
    "HttpServer": "http_server",
    "OpenTelemetryMetrics": "open_telemetry",
    "OpenTelemetryTraces": "traces",
    "PrometheusMetrics": "prometheus",
    "RelayMetrics": "relay_metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        extra = {"prometheus_client": "prometheus", "opentelemetry": "otel"}.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        advice = f"{name} needs {error.name}: pip install 'kafka-event-source[{extra}]'"
        raise ModuleNotFoundError(advice, name=error.name) from error
