"""Requests about a cluster, and the few that change it: topics (``admin``, ``trimming``), offsets, lags, members of
groups, open and hanging transactions, and the requests of a take-over. They block.
"""

from __future__ import annotations

__all__: list[str] = []
