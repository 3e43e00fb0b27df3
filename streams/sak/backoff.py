"""Pauses that grow with each failure."""

from __future__ import annotations

import random


def backoff_seconds(
    failures: int,
    first: float,
    longest: float,
    factor: float = 2.0,
    *,
    jitter: float = 0.25,
    rng: random.Random | None = None,
) -> float:
    """Return the pause after the n-th failure in a row (from 1): ``first``, times ``factor`` each time, at most
    ``longest``.

    Up to the share ``jitter`` of it is added or taken off at random, so that many who failed together do not come back
    together; the result may exceed ``longest`` by that share. ``failures <= 0`` gives 0. ``rng``
    replaces the module ``random``.
    """
    if failures <= 0:
        return 0.0
    growths = min(failures - 1, 60)  # 2**60 times anything is beyond every limit, and no float overflows on the way
    wait = min(first * factor**growths, longest)
    return wait * (1.0 + jitter * (rng or random).uniform(-1.0, 1.0))
