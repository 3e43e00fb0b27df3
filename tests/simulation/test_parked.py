"""Worlds in which events are parked: at the end each is there once, in the order of its key."""

from __future__ import annotations

import pytest

from tests.broker.gate import nightly

from .plans import plan_of
from .test_simulation import explain
from .world import simulate

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("profile", ["parked", "struck"])
@pytest.mark.parametrize("seed", [*range(4), *(nightly(seed) for seed in range(4, 300))])
def test_parked_events_are_there_once_and_in_order(seed: int, profile: str) -> None:
    world = simulate(seed, plan_of(seed, profile))
    assert not world.differences, explain(seed, world)
