"""Connections to brokers, messages as bytes, and compression."""

from __future__ import annotations

__all__: list[str] = []
