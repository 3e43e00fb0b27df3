"""Tools for the tests of applications: pytest fixtures around a real Kafka (``streams.testing.fixtures``)."""

from __future__ import annotations

__all__: list[str] = []
