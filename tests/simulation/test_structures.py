"""Worlds whose store is a ``Stores``: it is what the changelog says, and its table what a plain one is."""

from __future__ import annotations

import os
from collections import Counter

import msgspec
import pytest

from .plans import plan_of
from .test_simulation import explain
from .world import simulate

pytestmark = pytest.mark.usefixtures("quiet")

COUNT = int(os.environ.get("STRUCTURE_SEEDS", "1"))
KINDS = ("crashes", "everything", "handlers", "lost_replies", "moves", "standbys")


@pytest.mark.timeout(0)
def test_exactly_once_with_structures() -> None:
    counts: Counter[str] = Counter()
    for number, profile in enumerate(KINDS):
        for seed in range(COUNT):
            kept, on_disk = number % 2 == 0, number % 4 == 0  # in memory, in files, and in a database
            plan = plan_of(seed, profile)
            plan = msgspec.structs.replace(plan, structures=True, patient=False, kept=kept, on_disk=on_disk)
            world = simulate(seed, plan)
            assert not world.differences, explain(seed, world)
            counts += world.watch.counts
    assert counts["windows"] > 20 * COUNT, "windows were closed, and their state was compared"
