"""Settings of an event source and of its jobs, their groups, and where they are read from."""

from __future__ import annotations

__all__: list[str] = []
