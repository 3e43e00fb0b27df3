"""Battery T2, numbers 3, 6, 8 and 11: frozen members, handlers slower than a transaction may be, and stopping."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.broker import bank
from tests.broker.battery_kit import ENDLESS, QUICK, Bank, wait_until
from tests.broker.gate import gate, nightly

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

EVENTS, KEYS = 12_000, 60


@pytest.mark.parametrize(
    ("membership", "point"),
    [
        *(nightly("", point) for point in ("", "commit.before:20:freeze", "flush.after:20:freeze")),
        *gate(
            [(name, "send_offsets.before:20:freeze") for name in ("", "broker")],
            ("", "send_offsets.before:20:freeze"),
        ),
    ],
)
def test_frozen_past_its_session(bank_group: Bank, point: str, seed: int) -> None:
    """Number 3: SIGSTOP until the others have taken over, SIGCONT; one by chance, three in the middle of a commit."""
    zombie = bank_group.start("zombie", **QUICK, **({"KES_FAULT": point} if point else {}))
    wait_until(lambda: zombie.said("generation"), "the first member is in the group")
    other = bank_group.start("other", **QUICK)
    wait_until(lambda: other.said("new"), "the second member is in the group")
    load = bank_group.load(ENDLESS, KEYS, seed, 1_000)
    bank_group.wait_handled(100)
    if not point:
        zombie.signal(signal.SIGSTOP)
    process = psutil.Process(zombie.process.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the member freezes")
    load.stop()
    bank_group.deposit(EVENTS // 8, KEYS, seed + 2)
    bank_group.wait_handled()  # the other one has taken over everything, also what the frozen one had begun
    zombie.signal(signal.SIGCONT)
    wait_until(lambda: not zombie.running or zombie.said("void, joining again"), "the zombie finds out, or ends")
    bank_group.deposit(EVENTS // 4, KEYS, seed + 1)
    bank_group.wait_handled()
    bank_group.check_stores()
    bank_group.must_be_exact()


@pytest.mark.parametrize("kind", gate(["async", "blocking", "plain"], "async", "plain"))
@pytest.mark.slow
def test_handler_slower_than_the_transaction_timeout(bank_group: Bank, kind: str, seed: int) -> None:
    """Number 6: one key's events take longer than a transaction may. Async and blocking handlers hold up their own
    partition only; a plain one holds up everything, is told about, and is still exact."""
    slow = {"BANK_HANDLER": kind, "BANK_SLOW_KEY": "account-0", "BANK_SLOW_MS": "3000"}
    while sum(event.account == "account-0" for event in bank.events(600, 100, seed)) != 2:
        seed += 1
    worker = bank_group.start("slow", **QUICK, **slow)
    bank_group.deposit(600, 100, seed)
    if kind != "plain":
        wait_until(lambda: bank_group.handled() >= 600 * 2 // 4, "the other partitions do not wait for it")
        assert bank_group.handled() < 600, "the slow one is slow"
    bank_group.wait_handled()
    if kind == "plain":
        wait_until(lambda: worker.said("stood still"), "a handler that stops the loop is named")
    bank_group.must_be_exact()


def test_sigterm_drains_and_leaves(bank_group: Bank, seed: int) -> None:
    """Number 11: at once, with exit code 0, and the group is left: the next need not wait for a session, which is long
    enough here to be told from a machine that stands still for seconds."""
    patient = {"BANK_SESSION_SECONDS": "120", "BANK_RUN": "run"}
    first = bank_group.start("first", **patient)
    load = bank_group.load(ENDLESS, KEYS, seed, 2_000)
    bank_group.wait_handled(500)
    assert first.stop(30) == 0, first.log.read_text()
    second = bank_group.start("second", **patient)
    bank_group.wait_progress()
    load.stop()
    bank_group.wait_handled()
    second.signal(signal.SIGINT)
    assert second.process.wait(30) == 0, second.log.read_text()
    bank_group.must_be_exact()


def test_second_signal_exits_at_once(bank_group: Bank, seed: int) -> None:
    environment = {
        **QUICK,
        "BANK_HANDLER": "async",
        "BANK_SLOW_KEY": "account-0",
        "BANK_SLOW_MS": "60000",
        "BANK_RUN": "run",
    }
    worker = bank_group.start("impatient", **environment)
    bank_group.deposit(200, 4, seed)
    wait_until(lambda: worker.said("the slow handler begins"), "there is something to drain")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: worker.said("a second signal exits at once"), "the drain begins")
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(30) == 128 + signal.SIGTERM  # a drain would take a minute, and end with 0
    bank_group.start("next", **QUICK)
    bank_group.wait_handled()
    bank_group.must_be_exact()
