"""The battery against moves and standbys (T2 numbers 1, 2 and 8): members killed and frozen at each point of a move,
and receivers that never get ready. Storms, with brokers that die meanwhile: ``tests/simulation``.

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

from tests.broker.battery_kit import ENDLESS, Bank, wait_until
from tests.broker.gate import gate, nightly

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

SEEDS = int(os.environ.get("BATTERY_SEEDS", "2"))
QUICK = {"BANK_SESSION_SECONDS": "2"}
PATIENT = {"BANK_SESSION_SECONDS": "20"}
"""Where nobody has to be missed: a member that stands still for seconds on a busy machine stays one."""
CAME = "PartitionMoved.*in|TakeOverDone"
KEYS = 200

DONOR_POINTS = ("handed_over.before", "handed_over.after")
RECEIVER_POINTS = ("restore.half", "tail.received", "took.before", "took.after")
POINTS = [("donor", point) for point in DONOR_POINTS] + [("receiver", point) for point in RECEIVER_POINTS]
KILLS = [(*point, "kill", number % 2) for number, point in enumerate(POINTS)]
FREEZES = [("donor", "handed_over.before", "freeze", 0), ("receiver", "took.before", "freeze", 1)]
ALL = [(*point, action, standbys) for point in POINTS for action in ("kill", "freeze") for standbys in (0, 1)]


@pytest.mark.parametrize(
    ("role", "point", "action", "standbys"),
    [
        *gate(KILLS, ("donor", "handed_over.before", "kill", 0), ("receiver", "took.before", "kill", 0)),
        *(nightly(*case) for case in FREEZES),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ALL * SEEDS),
    ],
)
def test_struck_in_a_move(bank_group: Bank, role: str, point: str, action: str, standbys: int, seed: int) -> None:
    """Number 1: a donor with everything, a receiver that joins under load, and one of them is killed or frozen at this
    point."""
    print(f"SEED={seed} {role} {point} {action} standbys={standbys}")
    count = random.Random(f"{seed} {role} {point}").randrange(1, 5) if point == "tail.received" else 1
    settings = {**QUICK, "BANK_STANDBYS": str(standbys)}
    faulty = {role: {"KES_FAULT": f"{point}:{count}:{action}"}}
    bank_group.deposit(2_000, KEYS, seed)  # a state, so that there is something to be moved
    members = {"donor": bank_group.start("donor", **settings, **faulty.get("donor", {}))}
    bank_group.wait_handled()
    load = bank_group.load(ENDLESS, KEYS, seed + 1, 800)
    members["receiver"] = bank_group.start("receiver", **settings, **faulty.get("receiver", {}))
    victim = members.pop(role)
    if action == "kill":
        wait_until(lambda: not victim.running, f"the {role} dies at {point}")
        assert victim.process.returncode == -signal.SIGKILL, victim.log.read_text()
        heir = bank_group.start(role, **settings)
        wait_until(lambda: heir.times(CAME) > 0, "it gets its share again")
    else:  # past its session: the others go on without it, and it finds out
        process = psutil.Process(victim.process.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, f"the {role} freezes at {point}")
        [other] = members.values()
        wait_until(lambda: other.said(f"gone: {role}"), "its session is over")
        bank_group.wait_handled()  # so somebody else has everything now
        victim.signal(signal.SIGCONT)
        wait_until(lambda: not victim.running or victim.said("void, joining again"), "it finds out, or ends")
        assert victim.running, victim.log.read_text()
    load.stop()
    bank_group.wait_handled()
    bank_group.check_stores(standbys)
    bank_group.must_be_exact()


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
