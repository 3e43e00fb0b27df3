"""What several files of properties need."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import seed

SEED = int(os.environ.get("SEED", "0")) or None


def seeded(test: Any) -> Any:
    """``SEED=`` repeats a run; hypothesis prints the example itself when one fails."""
    return seed(SEED)(test) if SEED is not None else test
