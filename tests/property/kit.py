"""What several files of properties need."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import seed

SEED = int(os.environ.get("SEED", "0")) or None


def seeded(test: Any) -> Any:
    """``SEED=`` repeats a run; hypothesis prints the example itself when one fails."""
    return seed(SEED)(test) if SEED is not None else test


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Dead letters are warnings. For the files that import it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
