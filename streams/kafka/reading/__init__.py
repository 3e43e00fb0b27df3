"""Consumers of partitions that are assigned by hand, and received messages as records."""

from __future__ import annotations

__all__: list[str] = []
