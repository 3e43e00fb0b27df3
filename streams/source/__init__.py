"""Declarations of an application: the event source with its handlers, inputs and jobs, and producers of events."""

from __future__ import annotations

__all__: list[str] = []
