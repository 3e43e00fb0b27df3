"""Examples, runnable from a checkout: ``kes run examples.bank:source``, ``make demo``."""

from __future__ import annotations
