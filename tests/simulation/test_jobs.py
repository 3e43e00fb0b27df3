"""Worlds with durable jobs: each is called for once or more under one id, never before its start is committed, and its
end is there once."""

from __future__ import annotations

import pytest

from tests.broker.gate import nightly

from .plans import plan_of
from .test_simulation import explain
from .world import simulate

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("seed", [*range(3), *(nightly(seed) for seed in range(3, 300))])
def test_jobs_end_once(seed: int) -> None:
    world = simulate(seed, plan_of(seed, "jobs"))
    assert not world.differences, explain(seed, world)
