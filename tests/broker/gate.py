"""Which cases of a parametrized test every change runs, and which the nightly run adds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def nightly(*case: Any) -> Any:
    """Mark one case as nightly."""
    return pytest.param(*case, marks=pytest.mark.nightly)


def gate(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Mark all cases as nightly but those that are ``kept`` in the change gate. Several arguments are a tuple."""
    cases = list(cases)
    assert all(case in cases for case in kept), f"not among the cases: {[case for case in kept if case not in cases]}"
    return [case if case in kept else nightly(*(case if isinstance(case, tuple) else (case,))) for case in cases]
