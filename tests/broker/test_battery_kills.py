"""Battery T2, numbers 1, 2 and 8: SIGKILL at every named point, and at random under load. The oracle must be exact, and
the stores what the changelog says. Points of moves: ``test_battery_moves.py``."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.testing.faults import POINTS
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import ENDLESS, Bank, seed_of, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

EVENTS, KEYS = 4_000, 50
QUICK = {"BANK_SESSION_SECONDS": "2"}
"""The tests wait for sessions to expire: a short session makes them short, and nothing else."""
NEEDS_A_REVOCATION = {"revoke.before", "revoke.after"}
SECOND_TIME = {"restore.half"}


@pytest.fixture
def bank_group(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[Bank]:
    bank = Bank(kafka_broker.bootstrap_servers, f"{topic_prefix}bank", tmp_path)
    yield bank
    bank.close()


def count_for(point: str, rng: random.Random) -> int:
    """At which passage to strike: somewhere in the middle of the work."""
    per_event = point.startswith(("handler", "store", "produce"))
    per_batch = point.startswith("poll.after")
    return rng.randrange(500, 1500) if per_event else rng.randrange(2, 4) if per_batch else rng.randrange(1, 4)


@pytest.mark.parametrize("repetition", [1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_named_point(bank_group: Bank, point: str, repetition: int) -> None:
    seed = seed_of() + repetition
    print(f"SEED={seed - repetition} point={point}")
    rng = random.Random(seed)
    fault = {"KES_FAULT": f"{point}:{count_for(point, rng)}"}
    if point in SECOND_TIME:  # something must be there to be restored
        bank_group.deposit(EVENTS // 2, KEYS, seed)
        first = bank_group.start("victim", **QUICK)
        bank_group.wait_handled()
        assert first.stop() == 0
        fault = {"KES_FAULT": f"{point}:1"}
    settings = dict(QUICK)
    if point in NEEDS_A_REVOCATION:
        fault = {"KES_FAULT": f"{point}:1"}
        settings["BANK_STRATEGY"] = "cooperative-sticky"  # warm moves take nothing away
    victim = bank_group.start("victim", **settings, **fault)
    if point in NEEDS_A_REVOCATION:
        bank_group.deposit(EVENTS, KEYS, seed)
        bank_group.wait_handled(1)
        bank_group.start("other", **settings)  # its join takes partitions away from the victim
        wait_until(lambda: not victim.running, f"the victim dies at {point}")
    else:
        wait_until(lambda: victim.said("generation"), "the victim is in the group")
        bank_group.deposit(EVENTS, KEYS, seed, per_second=2_000)  # two seconds: dozens of transactions
        load = bank_group.load(ENDLESS, KEYS, seed + 2, 2_000)  # or one, if the victim stood still meanwhile
        wait_until(lambda: not victim.running, f"the victim dies at {point}")
        load.stop()
    assert victim.process.returncode == -9, victim.log.read_text()
    bank_group.start("victim", **settings)
    bank_group.deposit(EVENTS // 4, KEYS, seed + 1)
    bank_group.wait_handled()
    bank_group.check_stores()
    bank_group.must_be_exact()


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_killed_at_random_under_load(bank_group: Bank) -> None:
    """Number 2: 4 members, 20 kills, 200,000 events."""
    seed = seed_of()
    print(f"SEED={seed}")
    rng = random.Random(seed)
    instances = [f"member-{number}" for number in range(4)]
    alive = {name: bank_group.start(name, **QUICK) for name in instances}
    total = 200_000
    load = bank_group.load(total, 500, seed, 3_000)
    bank_group.wait_handled(1)
    for _ in range(20):
        name = rng.choice(instances)
        alive[name].kill()
        pause = time.monotonic() + rng.uniform(0.1, 2.0)
        wait_until(lambda until=pause: time.monotonic() > until, "the next kill")  # type: ignore[misc]
        alive[name] = bank_group.start(name, **QUICK)
        before = bank_group.handled()
        wait_until(lambda: bank_group.handled() > before or bank_group.handled() >= total, "progress after a kill")  # noqa: B023
    load.finish()
    bank_group.wait_handled(total, 180)
    bank_group.check_stores()
    bank_group.must_be_exact()
