"""Examples, runnable from a checkout: ``kes run examples.bank:source``, ``kes demo``."""

from __future__ import annotations
