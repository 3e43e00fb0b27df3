"""Each safeguard of the engine taken out once: some world must go wrong, and the same world must be right with it.

A safeguard that nobody misses is either superfluous or not tested.
"""

from __future__ import annotations

import os
import re

import pytest

from . import move_safeguards, wire_safeguards  # noqa: F401  add their own
from .plans import plan_of
from .safeguards import SAFEGUARDS, Safeguard
from .world import simulate

pytestmark = pytest.mark.usefixtures("quiet")

TRIES = int(os.environ.get("SIM_TRIES", "40"))
TAKEN_OUT_WRONGLY = re.compile(r"\b(TypeError|AttributeError|NameError)\(")
"""No world that goes wrong by these shows that anything is missed: what stands in for the safeguard does not fit."""


def first_miss(safeguard: Safeguard) -> tuple[int, str, list[str]] | None:
    """(seed, profile, differences) of the first world that goes wrong without it."""
    for seed in [safeguard.seed, *range(TRIES)]:
        for profile in safeguard.profiles:
            with pytest.MonkeyPatch.context() as patch:
                safeguard.out(patch)
                world = simulate(seed, plan_of(seed, profile))
            if world.differences:
                unlike = [found for found in world.differences if TAKEN_OUT_WRONGLY.search(found)]
                assert not unlike, f"{safeguard}: it does not fit the engine any more: {unlike[0]}"
                return seed, profile, world.differences
    return None


@pytest.mark.filterwarnings("ignore")  # tasks of an engine that was broken on purpose
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SAFEGUARDS)
def test_it_is_missed(name: str) -> None:
    missed = first_miss(SAFEGUARDS[name])
    assert missed is not None, f"{name}: out, and all of {TRIES} seeds were right all the same"
    seed, profile, differences = missed
    print(f"{name}: seed {seed} of {profile}: {differences[0][:200]}")
    plan = plan_of(seed, profile)
    assert not simulate(seed, plan).differences, "and it is right with it"
