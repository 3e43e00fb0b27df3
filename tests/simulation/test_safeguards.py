"""Each safeguard of the engine taken out once: some world must go wrong, and the same world must be right with it.

A safeguard that nobody misses is either superfluous or not tested.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from . import (  # noqa: F401  add their own
    jobs_safeguards,
    member_safeguards,
    move_safeguards,
    once_safeguards,
    parking_safeguards,
    wire_safeguards,
)
from .plans import Plan, plan_of
from .safeguards import SAFEGUARDS, Safeguard
from .world import simulate

pytestmark = pytest.mark.usefixtures("quiet")

TRIES = int(os.environ.get("SIM_TRIES", "40"))
TAKEN_OUT_WRONGLY = re.compile(r"\b(TypeError|AttributeError|NameError)\(")
"""No world that goes wrong by these shows that anything is missed: what stands in for the safeguard does not fit."""


def assert_missed(safeguard: Safeguard, plan: Callable[[int, str], Plan], tries: int) -> None:
    """Check that a world goes wrong without the safeguard, and that the same world is right with it."""
    for seed in [safeguard.seed, *range(tries)]:
        for profile in safeguard.profiles:
            with pytest.MonkeyPatch.context() as patch:
                safeguard.out(patch)
                differences = simulate(seed, plan(seed, profile)).differences
            if differences:
                unlike = [found for found in differences if TAKEN_OUT_WRONGLY.search(found)]
                assert not unlike, f"{safeguard}: it does not fit the engine any more: {unlike[0]}"
                print(f"seed {seed} of {profile}: {differences[0][:200]}")
                assert not simulate(seed, plan(seed, profile)).differences, "and it is right with it"
                return
    raise AssertionError(f"{safeguard}: out, and all of {tries} seeds were right all the same")


@pytest.mark.filterwarnings("ignore")  # tasks of an engine that was broken on purpose
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SAFEGUARDS)
def test_it_is_missed(name: str) -> None:
    assert_missed(SAFEGUARDS[name], plan_of, TRIES)
