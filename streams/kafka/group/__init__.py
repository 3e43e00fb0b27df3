"""Membership of a consumer group: joins, heartbeats, reports and assignments."""

from __future__ import annotations

__all__: list[str] = []
