"""The battery against moves and standbys (T2 numbers 1, 2 and 8): members killed at each point of a move, and receivers
that never get ready. Members that freeze, brokers that die meanwhile, storms: ``tests/simulation``."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.broker.battery_kit import ENDLESS, QUICK, Bank, wait_until
from tests.broker.gate import gate

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

PATIENT = {"BANK_SESSION_SECONDS": "20"}
"""Where nobody has to be missed: a member that stands still for seconds on a busy machine stays one."""
CAME = "PartitionMoved.*in|TakeOverDone"
KEYS = 200

POINTS = [
    *(("donor", point) for point in ("handed_over.before", "handed_over.after")),
    *(("receiver", point) for point in ("restore.half", "tail.received", "took.before", "took.after")),
]
KILLS = [(*point, number % 2) for number, point in enumerate(POINTS)]


@pytest.mark.parametrize(
    ("role", "point", "standbys"), gate(KILLS, ("donor", "handed_over.before", 0), ("receiver", "took.before", 0))
)
def test_struck_in_a_move(bank_group: Bank, role: str, point: str, standbys: int, seed: int) -> None:
    """Number 1: a donor with everything, a receiver that joins under load, and one of them is killed at this point."""
    count = random.Random(f"{seed} {role} {point}").randrange(1, 5) if point == "tail.received" else 1
    settings = {**QUICK, "BANK_STANDBYS": str(standbys)}
    faulty = {role: {"KES_FAULT": f"{point}:{count}"}}
    bank_group.deposit(2_000, KEYS, seed)  # a state, so that there is something to be moved
    members = {"donor": bank_group.start("donor", **settings, **faulty.get("donor", {}))}
    bank_group.wait_handled()
    load = bank_group.load(ENDLESS, KEYS, seed + 1, 800)
    members["receiver"] = bank_group.start("receiver", **settings, **faulty.get("receiver", {}))
    victim = members[role]
    wait_until(lambda: not victim.running, f"the {role} dies at {point}")
    assert victim.process.returncode == -signal.SIGKILL, victim.log.read_text()
    heir = bank_group.start(role, **settings)
    wait_until(lambda: heir.times(CAME) > 0, "it gets its share again")
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
    wait_until(lambda: donor.said("joined: receiver"), "the donor knows to whom it can hand over")
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
