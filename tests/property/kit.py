"""What several files of properties need."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

from hypothesis import seed

from streams.testing import TestDriver

SEED = int(os.environ.get("SEED", "0")) or None


def seeded(test: Any) -> Any:
    """``SEED=`` repeats a run; hypothesis prints the example itself when one fails."""
    return seed(SEED)(test) if SEED is not None else test


def trouble(driver: TestDriver[Any], chance: random.Random, *more: Callable[[], object]) -> None:
    """Have one fault, drawn at random, befall a member or its broker; ``more``: further ones."""
    member = chance.choice(driver.members)
    faults: list[Callable[[], object]] = [
        lambda: driver.abort(member),
        lambda: driver.lose_reply("commit", member),
        lambda: driver.lose_request("commit", member),
        lambda: driver.evict(member),
        lambda: driver.freeze(member, 40),
        *more,
        driver.compact,
    ]
    chance.choice(faults)()
