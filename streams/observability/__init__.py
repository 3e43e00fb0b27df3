"""Metrics and health of event sources, for Prometheus and probes. Needs the extra ``prometheus``."""

from __future__ import annotations

from streams.observability.http_server import HttpServer
from streams.observability.prometheus import PrometheusMetrics

__all__ = ["HttpServer", "PrometheusMetrics"]
