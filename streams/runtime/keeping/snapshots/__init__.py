"""Snapshots of folders in an object store: made, found and loaded."""

from __future__ import annotations

__all__: list[str] = []
