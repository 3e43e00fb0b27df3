"""Queries inside the owner's process: committed state, with a proof of ownership."""

from __future__ import annotations

__all__: list[str] = []
