"""Seeds, each a world of its own: whatever goes wrong in it, at the end every event is there exactly once.

``SEED=17`` runs that one alone; ``SIM_SEEDS=5000`` runs so many; ``SIM_FIRST`` says where to begin.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from .plans import PROFILES, plan_of
from .world import World, simulate

FIRST = int(os.environ.get("SIM_FIRST", "0"))
COUNT = int(os.environ.get("SIM_SEEDS", "110"))
ONLY = os.environ.get("SEED")
SHARDS = 11


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults are the daily bread here; the engine's warnings about them would be megabytes."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def explain(seed: int, world: World) -> str:
    told = "\n  ".join(difference[:600] for difference in world.differences[:6])
    happened = "; ".join(world.trace[-20:])
    return f"seed {seed} (run it with SEED={seed}), {world.plan}:\n  {told}\n  happened: {happened}"


@pytest.mark.timeout(0)
@pytest.mark.parametrize("shard", range(1 if ONLY else SHARDS))
def test_exactly_once_whatever_happens(shard: int) -> None:
    seeds = [int(ONLY)] if ONLY else range(FIRST + shard, FIRST + COUNT, SHARDS)
    for seed in seeds:
        world = simulate(seed, plan_of(seed))
        assert not world.differences, explain(seed, world)


@pytest.mark.parametrize("profile", sorted({made.__name__.strip("_") for made in PROFILES}))
def test_a_seed_replays_exactly(profile: str) -> None:
    """The same seed gives the same world, to the last entry of the last log."""
    seed = int(ONLY or "4711")
    first, second = (simulate(seed, plan_of(seed, profile)) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    assert first.loop.time() == second.loop.time()


def test_the_profiles_do_what_they_are_for() -> None:
    """A simulation in which nothing goes wrong proves nothing: each kind of trouble has to occur."""
    missing = {
        *("start", "stop", "halt", "cancel", "crash", "freeze", "outage", "forget", "interject"),
        *("commit REPLY_LOST", "commit REQUEST_LOST", "commit LATE", "commit HANGS", "commit ABORTABLE"),
        *("send REPLY_LOST", "send REQUEST_LOST", "send LATE", "send HANGS", "send ABORTABLE", "send FORGOTTEN"),
        *("flush REPLY_LOST", "init REPLY_LOST", "abort REPLY_LOST", "ask REPLY_LOST"),
        *("_FENCED", "UNKNOWN_MEMBER_ID", "ILLEGAL_GENERATION", "expired", "concurrent"),
    }
    for seed in range(200):
        world = simulate(seed, plan_of(seed))
        missing -= {f"{call} {strike}" for _, call, strike in world.faults.struck}
        missing -= {step.split()[1] for step in world.trace}
        missing -= world.broker.met
        if not missing:
            return
    raise AssertionError(f"these never happened: {sorted(missing)}")
