"""Consumers of partitions, and of their records as they arrive."""

from __future__ import annotations

__all__: list[str] = []
