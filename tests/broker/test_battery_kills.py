"""Battery T2, numbers 1, 2 and 8: SIGKILL at every named point, and at random under load. The oracle must be exact, and
the stores what the changelog says. Points of moves: ``test_battery_moves.py``. With librdkafka's members in full:
``BANK_MEMBERSHIP=broker`` before ``pytest``, here and for ``test_battery_members.py``."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from streams.testing.faults import POINTS
from tests.broker.battery_kit import ENDLESS, QUICK, Bank, wait_until
from tests.broker.gate import nightly

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

KEYS = 50
REVOCATIONS = ("revoke.before", "revoke.after")
AT_WORK = tuple(point for point in POINTS if point not in REVOCATIONS)
WARM = r"TakeOverDone\(.*warm=True\)"
SIX = ("handler.after", "send_offsets.before", "flush.after", "commit.before", "commit.after", "restore.half")


def count_for(point: str, rng: random.Random) -> int:
    """At which passage to strike: somewhere in the middle of the work. Of a restore, there is one at each start."""
    if point == "restore.half":
        return 1
    per_event = point.startswith(("handler", "store", "produce"))
    per_batch = point.startswith("poll.after")
    return rng.randrange(500, 1500) if per_event else rng.randrange(2, 4) if per_batch else rng.randrange(1, 4)


def kill_at(bank_group: Bank, points: Sequence[str], seed: int, **settings: str) -> None:
    """Have the only member die at one point after another, under load, and judge."""
    settings = {**QUICK, **settings}
    rng = random.Random(seed)
    bank_group.deposit(1_000, KEYS, seed)
    first = bank_group.start("victim", **settings)
    bank_group.wait_handled()
    assert first.stop() == 0, first.log.read_text()
    load = bank_group.load(ENDLESS, KEYS, seed + 1, 1_000)
    for point in rng.sample(points, len(points)):
        fault = f"{point}:{count_for(point, rng)}"
        victim = bank_group.start("victim", **settings, KES_FAULT=fault)
        wait_until(lambda victim=victim: not victim.running, f"the victim dies at {fault}")  # type: ignore[misc]
        assert victim.process.returncode == -signal.SIGKILL, victim.log.read_text()
        print(f"killed at {fault}: {bank_group.handled()} of {bank_group.produced} handled")
    bank_group.start("victim", **settings)
    load.stop()
    bank_group.wait_handled()
    bank_group.check_stores()
    bank_group.must_be_exact()


@pytest.mark.parametrize(
    ("membership", "points"),
    [
        pytest.param("", SIX, id="six"),
        pytest.param("", AT_WORK, id="all", marks=pytest.mark.nightly),
        ("broker", ("flush.after",)),
    ],
)
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_killed_at_named_points(bank_group: Bank, points: Sequence[str], seed: int) -> None:
    """Number 1: one bank, under load, whose only member dies at one point after another."""
    kill_at(bank_group, points, seed)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["", "SQLite", "RocksDB"], ids=["memory", "SQLite", "RocksDB"])
@pytest.mark.parametrize("store", ["Table", "Stores", "SimpleStore"])
def test_killed_at_named_points_with_state_on_disk(
    bank_group: Bank, tmp_path: Path, seed: int, engine: str, store: str
) -> None:
    """The same with a folder, and stores on engines. Little is restored from the changelog then."""
    points = [point for point in AT_WORK if point != "restore.half"]
    kill_at(bank_group, points, seed, BANK_FOLDER=str(tmp_path / "state"), BANK_ENGINE=engine, BANK_STORE=store)


@pytest.mark.parametrize(
    ("membership", "point"),
    [
        *(nightly("", point) for point in REVOCATIONS),
        ("broker", "revoke.before"),
    ],
)
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
@pytest.mark.parametrize(
    ("standbys", "kills"),
    [(0, 3), nightly(0, 20), nightly(1, 5), pytest.param(1, 12, marks=pytest.mark.soak)],
)
@pytest.mark.slow
def test_killed_at_random_under_load(bank_group: Bank, standbys: int, kills: int, seed: int) -> None:
    """Number 2: four members, one of them killed again and again. Spare copies are used when their owner dies."""
    settings = {**QUICK, "BANK_STANDBYS": str(standbys)}
    names = [f"member-{number}" for number in range(4)]
    members = {name: bank_group.start(name, **settings) for name in names}
    bank_group.check_stores(standbys)
    load = bank_group.load(ENDLESS, 500, seed, 1_500 if standbys else 3_000)
    bank_group.wait_handled(1)
    bank_group.strike_at_random(members, names, kills, seed, **settings)
    load.stop()
    bank_group.wait_handled(seconds=180)
    bank_group.check_stores(standbys)
    if standbys:
        # The random ones may all come before a copy is there again, or their members be back before they are missed.
        before = bank_group.times(WARM)
        owner = next(name for name, worker in members.items() if worker.works_on())
        members[owner].kill()
        wait_until(lambda: bank_group.times(WARM) > before, "the copy of who died at rest is used")
        bank_group.check_stores(standbys)
    bank_group.must_be_exact()
