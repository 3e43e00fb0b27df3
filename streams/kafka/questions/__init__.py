"""Requests about a cluster: topics, offsets, groups, transactions and permissions."""

from __future__ import annotations

__all__: list[str] = []
