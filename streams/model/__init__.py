"""Vocabulary that users do not import by path: groups, topics, topologies, answers of queries, checks of values."""

from __future__ import annotations

__all__: list[str] = []
