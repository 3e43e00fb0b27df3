"""Tests for numbers among any values: ``True`` and ``False`` are none here, though they are ints."""

from __future__ import annotations

from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Check whether the value is an int or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Check whether the value is an int."""
    return isinstance(value, int) and not isinstance(value, bool)
