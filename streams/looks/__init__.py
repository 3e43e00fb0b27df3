"""Views of groups, dead letters and records that the command line and the monitor share."""

from __future__ import annotations

__all__: list[str] = []
