"""Worlds in which ids come again: at the end each has counted once, and each store, copy and log has its record."""

from __future__ import annotations

import pytest

from tests.broker.gate import nightly

from .plans import plan_of
from .test_simulation import explain
from .world import simulate

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("seed", [*range(4), *(nightly(seed) for seed in range(4, 300))])
def test_ids_count_once(seed: int) -> None:
    world = simulate(seed, plan_of(seed, "once"))
    assert not world.differences, explain(seed, world)
