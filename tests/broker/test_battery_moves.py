"""The battery against moves and standbys (T2 numbers 1, 2, 7 and 8): members killed and frozen at each point of a move,
a storm of rebalances, rolling restarts, receivers that never get ready, and a broker that dies meanwhile.

    pytest -m soak tests/broker/test_battery_moves.py      all of it at full length
    BATTERY_SEEDS=5 SEED=4711 ...                          more seeds per point, a run once more
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from streams.broker import KafkaBroker
from tests.broker.battery_kit import ENDLESS, Bank, Worker, wait_until
from tests.broker.gate import gate

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

SEEDS = int(os.environ.get("BATTERY_SEEDS", "2"))
QUICK = {"BANK_SESSION_SECONDS": "2"}
PATIENT = {"BANK_SESSION_SECONDS": "20"}
"""Where nobody has to be missed: a member that stands still for seconds on a busy machine stays one."""
WARM = r"TakeOverDone\(.*warm=True\)"
KEYS = 200

DONOR_POINTS = ("marker commit.before", "marker commit.after", "handed_over.before", "handed_over.after")
RECEIVER_POINTS = ("restore.half", "tail.received", "took.before", "took.after")
POINTS = [("donor", point) for point in DONOR_POINTS] + [("receiver", point) for point in RECEIVER_POINTS]
FREEZES = [("donor", "marker commit.before"), ("receiver", "took.before")]


def fault_at(point: str, count: int, action: str = "kill") -> dict[str, str]:
    """The environment of a victim. Points named ``marker ...`` count in transactions with a release marker only."""
    scope, _, point = point.rpartition(" ")
    return {"KES_FAULT": f"{point}:{count}:{action}", "BANK_FAULT_IN": scope}


def at_work(worker: Worker) -> bool:
    """Whether it works on any partition."""
    dump = worker.dump()
    return dump is not None and any(store.role == "active" for store in dump.stores)


class Attack:
    """A donor with everything, a receiver that joins under load, and a fault in one of them."""

    def __init__(self, group: Bank, role: str, point: str, standbys: int, seed: int, action: str = "kill") -> None:
        print(f"SEED={seed} {role} {point} {action} standbys={standbys}")
        rng = random.Random(f"{seed} {role} {point}")
        self.group, self.role, self.seed = group, role, seed
        self.settings = {**QUICK, "BANK_STANDBYS": str(standbys)}
        fault = fault_at(point, rng.randrange(1, 5) if point == "tail.received" else 1, action)
        group.deposit(2_000, KEYS, seed)  # a state, so that there is something to be moved
        faults = {"donor": {}, "receiver": {}, role: fault}
        self.donor = group.start("donor", **self.settings, **faults["donor"])
        group.wait_handled()
        self.load = group.load(ENDLESS, KEYS, seed + 1, 800)
        self.receiver = group.start("receiver", **self.settings, **faults["receiver"])
        self.victim = self.donor if role == "donor" else self.receiver

    def finish(self, standbys: int) -> None:
        """Enough work; then everything must be right."""
        self.load.stop()
        self.group.wait_handled()
        self.group.check_stores(standbys)
        self.group.must_be_exact()


def killed(group: Bank, role: str, point: str, standbys: int, seed: int) -> None:
    attack = Attack(group, role, point, standbys, seed)
    victim = attack.victim
    wait_until(lambda: not victim.running, f"the {role} dies at {point}")
    assert victim.process.returncode == -signal.SIGKILL, victim.log.read_text()
    heir = group.start(role, **attack.settings)
    wait_until(lambda: heir.times("PartitionMoved.*in|TakeOverDone") > 0, "it gets its share again")
    attack.finish(standbys)


def frozen(group: Bank, role: str, point: str, standbys: int, seed: int) -> None:
    attack = Attack(group, role, point, standbys, seed, "freeze")
    victim = attack.victim
    process = psutil.Process(victim.process.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, f"the {role} freezes at {point}")
    other = attack.receiver if role == "donor" else attack.donor
    wait_until(lambda: other.said(f"gone: {role}"), "its session is over")
    group.wait_handled()  # so somebody else has everything now
    victim.signal(signal.SIGCONT)
    wait_until(lambda: not victim.running or victim.said("void, joining again"), "it finds out, or ends")
    assert victim.running, victim.log.read_text()
    attack.finish(standbys)


@pytest.mark.parametrize(("role", "point"), gate(POINTS, ("donor", "marker commit.after"), ("receiver", "took.before")))
def test_killed_in_a_move(bank_group: Bank, role: str, point: str, seed: int) -> None:
    """Number 1: each point once, every second time with standbys."""
    killed(bank_group, role, point, (seed + POINTS.index((role, point))) % 2, seed)


@pytest.mark.parametrize(("role", "point"), FREEZES)
@pytest.mark.nightly
def test_frozen_in_a_move(bank_group: Bank, role: str, point: str, seed: int) -> None:
    """Past the session: the others go on without it, and it finds out."""
    frozen(bank_group, role, point, (seed + FREEZES.index((role, point))) % 2, seed)


@pytest.mark.soak
@pytest.mark.parametrize("repetition", range(SEEDS))
@pytest.mark.parametrize("standbys", [0, 1])
@pytest.mark.parametrize("action", ["kill", "freeze"])
@pytest.mark.parametrize(("role", "point"), POINTS)
def test_every_point_of_a_move(
    bank_group: Bank, role: str, point: str, action: str, standbys: int, repetition: int, seed: int
) -> None:
    (killed if action == "kill" else frozen)(bank_group, role, point, standbys, seed + 10 * repetition)


@pytest.mark.parametrize(
    ("events", "kills"), [(25_000, 5), pytest.param(100_000, 12, marks=[pytest.mark.soak, pytest.mark.timeout(420)])]
)
@pytest.mark.nightly
def test_killed_at_random_with_standbys(bank_group: Bank, events: int, kills: int, seed: int) -> None:
    """Number 2: 4 members, each partition with a spare copy that is used when its owner dies."""
    rng = random.Random(seed)
    settings = {**QUICK, "BANK_STANDBYS": "1"}
    members = {name: bank_group.start(name, **settings) for name in (f"member-{number}" for number in range(4))}
    bank_group.check_stores(1)
    load = bank_group.load(events, 500, seed, 2_500 if events > 50_000 else 1_500)
    bank_group.wait_handled(1)
    for _ in range(kills):
        name = rng.choice(sorted(members))
        members[name].kill()
        pause = time.monotonic() + rng.uniform(0.1, 2.0)
        wait_until(lambda until=pause: time.monotonic() > until, "the next kill")  # type: ignore[misc]
        members[name] = bank_group.start(name, **settings)
        before = bank_group.handled()
        wait_until(lambda: bank_group.handled() > before or not load.runs, "progress after a kill")  # noqa: B023
    load.finish()
    bank_group.wait_handled()
    bank_group.check_stores(1)
    # The random ones may all come before a copy is there again, or their members be back before they are missed.
    before = bank_group.times(WARM)
    owners = [name for name, worker in sorted(members.items()) if at_work(worker)]
    members.pop(rng.choice(owners)).kill()
    wait_until(lambda: bank_group.times(WARM) > before, "the copy of who died at rest is used")
    bank_group.check_stores(1)
    report = bank_group.must_be_exact()
    warm, cold = bank_group.times(WARM), bank_group.times(r"TakeOverDone\(.*warm=False\)")
    print(f"{report}; {warm} warm take-overs, {cold} cold, {bank_group.times('PartitionMoved.*in')} moves")


@pytest.mark.nightly
def test_rolling_restart_under_load(bank_group: Bank, seed: int) -> None:
    """Each of four members is stopped and started again, with little more than a handful of generations each."""
    settings = {**PATIENT, "BANK_STANDBYS": "1"}
    names = [f"member-{number}" for number in range(4)]
    members = {name: bank_group.start(name, **settings) for name in names}
    bank_group.check_stores(1)
    before = bank_group.generations()
    load = bank_group.load(ENDLESS, KEYS, seed, 800)
    for name in names:
        assert members[name].stop() == 0, members[name].log.read_text()
        members[name] = bank_group.start(name, **settings)
        wait_until(lambda name=name: members[name].times("PartitionMoved.*in|TakeOverDone") > 0, f"{name} works")  # type: ignore[misc]
    load.stop()
    bank_group.wait_handled()
    bank_group.check_stores(1)
    generations = bank_group.generations() - before
    print(f"{generations} generations for a rolling restart of four")
    bank_group.must_be_exact()
    assert generations <= 4 * 6, f"{generations} generations"


def test_a_receiver_that_never_gets_ready(bank_group: Bank, tmp_path: Path, seed: int) -> None:
    """Who leaves does not wait for it longer than its leave_timeout_seconds, and loses nothing."""
    gate = tmp_path / "gate"
    donor = bank_group.start("donor", **PATIENT, BANK_LEAVE_SECONDS="2")
    wait_until(lambda: donor.said("engine generation"), "the donor is in the group")
    bank_group.deposit(20_000, 4_000, seed, per_second=10_000)
    bank_group.wait_handled()
    receiver = bank_group.start("receiver", **PATIENT, BANK_GATE=str(gate), BANK_GATE_MS="5")
    wait_until(lambda: receiver.said("engine generation"), "the receiver is in the group")
    began = time.monotonic()
    assert donor.stop() == 0, donor.log.read_text()
    assert donor.said("were not handed over within leave_timeout_seconds"), donor.log.read_text()
    assert time.monotonic() - began >= 2, "it leaves before its time"
    assert receiver.times("PartitionMoved.*in") == 0, "the receiver was ready, and could have been waited for"
    bank_group.deposit(1_000, 4_000, seed + 1)
    gate.touch()
    bank_group.wait_handled()
    bank_group.check_stores()
    bank_group.must_be_exact()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["moving", pytest.param("preparing", marks=pytest.mark.soak)])
@pytest.mark.nightly
def test_broker_dies_in_a_move(
    broker: KafkaBroker, fragile_group: Bank, tmp_path: Path, moment: str, seed: int
) -> None:
    gate = tmp_path / "gate"
    donor = fragile_group.start("donor")
    wait_until(lambda: donor.said("engine generation"), "the donor is in the group")
    fragile_group.deposit(8_000, 2_000, seed, per_second=8_000)
    fragile_group.wait_handled()
    load = fragile_group.load(ENDLESS, 2_000, seed + 1, 600)
    if moment == "moving":
        gate.touch()
    receiver = fragile_group.start("receiver", BANK_GATE=str(gate), BANK_GATE_MS="1")
    if moment == "moving":
        wait_until(lambda: donor.said("handed over to"), "the first partition is handed over")
    else:
        wait_until(lambda: receiver.said("engine generation"), "the receiver prepares")
    broker.kill()
    broker.restart()
    gate.touch()
    before = fragile_group.handled()
    wait_until(lambda: fragile_group.handled() > max(before, 0) + 500, "work goes on")
    load.stop()
    fragile_group.wait_handled()
    assert donor.running, "no worker may die of an outage"
    assert receiver.running, "no worker may die of an outage"
    wait_until(lambda: receiver.times("PartitionMoved.*in|TakeOverDone") > 0, "the receiver gets its share")
    fragile_group.check_stores()
    fragile_group.must_be_exact()


@pytest.mark.slow
@pytest.mark.nightly
def test_broker_dies_while_a_standby_is_restored(
    broker: KafkaBroker, fragile_group: Bank, tmp_path: Path, seed: int
) -> None:
    gate = tmp_path / "gate"
    owner = fragile_group.start("owner", BANK_STANDBYS="1")
    wait_until(lambda: owner.said("engine generation"), "the owner is in the group")
    fragile_group.deposit(8_000, 2_000, seed, per_second=8_000)
    fragile_group.wait_handled()
    heir = fragile_group.start("heir", BANK_STANDBYS="1", BANK_GATE=str(gate), BANK_GATE_MS="1")
    wait_until(lambda: heir.said("engine generation"), "the heir restores")
    broker.kill()
    broker.restart()
    gate.touch()
    fragile_group.check_stores(1, seconds=90)
    owner.kill()
    fragile_group.deposit(1_000, 2_000, seed + 1)
    fragile_group.wait_handled()
    assert heir.times(WARM) > 0, "the copies were there, and are used"
    fragile_group.check_stores()
    fragile_group.must_be_exact()
