"""Battery T2, numbers 1, 2 and 8: SIGKILL at every named point, and at random under load. The oracle must be exact, and
the stores what the changelog says. Points of moves: ``test_battery_moves.py``."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence

import pytest

from streams.config import PRODUCERS
from streams.testing.faults import POINTS
from tests.broker.battery_kit import ENDLESS, Bank, wait_until
from tests.broker.gate import gate, nightly

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

KEYS = 50
QUICK = {"BANK_SESSION_SECONDS": "2"}
"""The tests wait for sessions to expire: a short session makes them short, and nothing else."""
REVOCATIONS = ("revoke.before", "revoke.after")
AT_WORK = tuple(point for point in POINTS if point not in REVOCATIONS)
SIX = ("handler.after", "flush.after", "send_offsets.after", "commit.before", "commit.after", "restore.half")


def count_for(point: str, rng: random.Random) -> int:
    """At which passage to strike: somewhere in the middle of the work. Of a restore, there is one at each start."""
    if point == "restore.half":
        return 1
    per_event = point.startswith(("handler", "store", "produce"))
    per_batch = point.startswith("poll.after")
    return rng.randrange(500, 1500) if per_event else rng.randrange(2, 4) if per_batch else rng.randrange(1, 4)


@pytest.mark.parametrize(
    "points", [pytest.param(SIX, id="six"), pytest.param(AT_WORK, id="all", marks=pytest.mark.nightly)]
)
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_killed_at_named_points(bank_group: Bank, points: Sequence[str], seed: int) -> None:
    """Number 1: one bank, under load, whose only member dies at one point after another, with either producer."""
    rng = random.Random(seed)
    bank_group.deposit(1_000, KEYS, seed)
    first = bank_group.start("victim", **QUICK)
    bank_group.wait_handled()
    assert first.stop() == 0, first.log.read_text()
    load = bank_group.load(ENDLESS, KEYS, seed + 1, 1_000)
    strikes = [(point, producer) for point in points for producer in PRODUCERS]
    for point, producer in rng.sample(strikes, len(strikes)):
        fault = f"{point}:{count_for(point, rng)}"
        victim = bank_group.start("victim", **QUICK, KES_FAULT=fault, BANK_PRODUCER=producer)
        wait_until(lambda victim=victim: not victim.running, f"the victim dies at {fault}")  # type: ignore[misc]
        assert victim.process.returncode == -signal.SIGKILL, victim.log.read_text()
        print(f"killed at {fault} ({producer}): {bank_group.handled()} of {bank_group.produced} handled")
    bank_group.start("victim", **QUICK)
    load.stop()
    bank_group.wait_handled()
    bank_group.check_stores()
    bank_group.must_be_exact()


@pytest.mark.parametrize("point", [nightly(point) for point in REVOCATIONS])
def test_killed_in_a_revocation(bank_group: Bank, point: str, seed: int) -> None:
    """Number 1: a join takes partitions away from the victim. Warm moves do not: this is the other strategy."""
    settings = {**QUICK, "BANK_STRATEGY": "cooperative-sticky"}
    victim = bank_group.start("victim", **settings, KES_FAULT=f"{point}:1")
    bank_group.deposit(4_000, KEYS, seed)
    bank_group.wait_handled(1)
    bank_group.start("other", **settings)
    wait_until(lambda: not victim.running, f"the victim dies at {point}")
    assert victim.process.returncode == -signal.SIGKILL, victim.log.read_text()
    bank_group.start("victim", **settings)
    bank_group.deposit(1_000, KEYS, seed + 1)
    bank_group.wait_handled()
    bank_group.check_stores()
    bank_group.must_be_exact()


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("total", "kills"), gate([(12_000, 3), (200_000, 20)], (12_000, 3)))
@pytest.mark.slow
def test_killed_at_random_under_load(bank_group: Bank, total: int, kills: int, seed: int) -> None:
    """Number 2: four members, with one producer and the other, one of them killed again and again."""
    rng = random.Random(seed)
    instances = [f"member-{number}" for number in range(4)]
    alive = {name: bank_group.start(name, **QUICK, BANK_PRODUCER=rng.choice(PRODUCERS)) for name in instances}
    load = bank_group.load(total, 500, seed, 3_000)
    bank_group.wait_handled(1)
    for _ in range(kills):
        name = rng.choice(instances)
        alive[name].kill()
        pause = time.monotonic() + rng.uniform(0.1, 2.0)
        wait_until(lambda until=pause: time.monotonic() > until, "the next kill")  # type: ignore[misc]
        alive[name] = bank_group.start(name, **QUICK, BANK_PRODUCER=rng.choice(PRODUCERS))
        before = bank_group.handled()
        wait_until(lambda: bank_group.handled() > before or bank_group.handled() >= total, "progress after a kill")  # noqa: B023
    load.finish()
    bank_group.wait_handled(total, 180)
    bank_group.check_stores()
    bank_group.must_be_exact()
