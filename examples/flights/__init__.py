"""A year of flights out of New York, as events: the demo behind ``kes demo``."""

from __future__ import annotations
