"""Folders of a partition on disk: which one is in use, and what it holds."""

from __future__ import annotations

__all__: list[str] = []
