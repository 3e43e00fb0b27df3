"""A year of flights out of New York, as events: the demo behind ``make demo``."""

from __future__ import annotations
