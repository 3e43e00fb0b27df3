"""Seeds, each a world of its own: whatever goes wrong in it, at the end every event is there exactly once.

``SEED=17`` runs that one alone; ``SIM_SEEDS=5000`` runs so many; ``SIM_FIRST`` says where to begin, ``PROFILE`` takes
all of them from one profile.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections import Counter
from typing import NamedTuple

import pytest

from streams.testing.simulation.network import WIRE_POINTS

from .plans import PROFILES, plan_of
from .watch import STEPS
from .world import World, simulate

pytestmark = pytest.mark.usefixtures("quiet")

FIRST = int(os.environ.get("SIM_FIRST", "0"))
COUNT = int(os.environ.get("SIM_SEEDS", str(5 * len(PROFILES))))
ONLY = os.environ.get("SEED")
PROFILE = os.environ.get("PROFILE", "")
SHARDS = len(PROFILES)


class Outcome(NamedTuple):
    """What is kept of a world. ``wrong``: what to say about it, empty if all is right."""

    wrong: str
    met: frozenset[str]
    counts: Counter[str]
    digest: bytes
    """Of its logs to the last entry, and of the time at its end."""


@functools.cache
def outcome(seed: int, profile: str = PROFILE) -> Outcome:
    world = simulate(seed, plan_of(seed, profile))
    met = {f"{call} {strike}" for _, call, strike in world.faults.struck}
    met |= {step.split()[1] for step in world.trace} | world.broker.met
    digest = hashlib.sha256(repr((world.fingerprint(), world.loop.time())).encode()).digest()
    return Outcome(explain(seed, world) if world.differences else "", frozenset(met), world.watch.counts, digest)


def explain(seed: int, world: World) -> str:
    told = "\n  ".join(difference[:600] for difference in world.differences[:6])
    happened = "; ".join(world.trace[-20:])
    return f"seed {seed} (run it with SEED={seed}), {world.plan}:\n  {told}\n  happened: {happened}"


@pytest.mark.timeout(0)
@pytest.mark.parametrize("shard", range(1 if ONLY else SHARDS))
def test_exactly_once_whatever_happens(shard: int) -> None:
    seeds = [int(ONLY)] if ONLY else range(FIRST + shard, FIRST + COUNT, SHARDS)
    for seed in seeds:
        assert not outcome(seed).wrong, outcome(seed).wrong


@pytest.mark.parametrize("seed", [int(ONLY)] if ONLY else range(SHARDS))
def test_a_seed_replays_exactly(seed: int) -> None:
    """The same seed gives the same world, to the last entry of the last log: one of each profile."""
    assert outcome.__wrapped__(seed) == outcome(seed)


@pytest.mark.timeout(0)
@pytest.mark.skipif(bool(ONLY or PROFILE), reason="a part of the seeds only")
def test_the_seeds_do_what_they_are_for() -> None:
    """A simulation in which nothing goes wrong proves nothing: each kind of trouble has to occur."""
    wanted = {
        *("start", "stop", "halt", "cancel", "crash", "freeze", "evict", "outage", "forget", "interject"),
        *("roll", "migrate"),
        *("commit REPLY_LOST", "commit REQUEST_LOST", "commit LATE", "commit HANGS", "commit ABORTABLE"),
        *("send REPLY_LOST", "send REQUEST_LOST", "send LATE", "send HANGS", "send ABORTABLE", "send FORGOTTEN"),
        *("flush REPLY_LOST", "init REPLY_LOST", "abort REPLY_LOST", "ask REPLY_LOST"),
        *("_FENCED", "UNKNOWN_MEMBER_ID", "ILLEGAL_GENERATION", "expired", "concurrent"),
        *("flush MOVED", "flush MOVED_AFTER", "flush UNSURE", "flush NOT_YET", "send MOVED", "commit MOVED", "ask CUT"),
        *("duplicate", "ended again"),
        *(f"kill {point}" for point in WIRE_POINTS if not point.startswith("abort")),  # there are few
    }
    met: set[str] = set()
    counts: Counter[str] = Counter()
    for seed in range(COUNT):
        met |= outcome(seed).met
        counts += outcome(seed).counts
    met |= outcome(15, "late").met  # aborts are few, and lost answers to them fewer
    assert not wanted - met, f"these never happened: {sorted(wanted - met)}"
    often = {"took": 150, "promotions": 80, "aborted": 12, "struck within a move": 15, "withdrawn": 2}
    often |= {"rang": 500, "list": 100, "lists that failed": 30}
    often |= {f"trap {step}": 1 for step in STEPS}
    seldom = {what: counts[what] for what, least in often.items() if counts[what] < least}
    assert not seldom, f"these happened too seldom: {seldom}"
