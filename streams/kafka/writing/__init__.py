"""Transactions as Kafka's protocol has them, on the event loop, and plain producers."""

from __future__ import annotations

__all__: list[str] = []
