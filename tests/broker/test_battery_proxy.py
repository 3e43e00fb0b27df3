"""Battery T2, number 5: thirty times a request or its reply is lost, late or doubled between a group under load and its
broker. Whatever the clients make of it: nothing is torn, lost or doubled, and work goes on."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any, Final

import pytest

from streams.config import PRODUCERS
from streams.testing.faults import KafkaProxy, Rule
from tests.broker.battery_kit import PATIENCE, Bank, Worker, wait_until
from tests.broker.gate import gate

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(240)]

KEYS, RATE, PORTION = 60, 600.0, 150
QUICK = {"BANK_SESSION_SECONDS": "2"}
LATE: Final = (2.2, 3.5)
"""Seconds: more than a session (2 s) and a transaction (1.6 s) last."""

FAULTS: Final[dict[str, dict[str, Any]]] = {
    "reply lost": {"on": "reply", "action": "drop"},
    "reply late": {"on": "reply", "action": "delay", "seconds": LATE},
    "reply doubled": {"on": "reply", "action": "double"},
    "request lost": {"on": "request", "action": "drop"},
    "request doubled": {"on": "request", "action": "double", "answer": "last"},
}
OF_TRANSACTIONS = ("EndTxn", "AddPartitionsToTxn", "TxnOffsetCommit", "Produce")
OF_THE_GROUP = ("JoinGroup", "SyncGroup")


class Attacked:
    """A group whose members reach the broker through a proxy only, under load until ``finish``."""

    def __init__(self, bank: Bank, proxy: KafkaProxy, seed: int) -> None:
        self.bank, self.proxy, self._seed = bank, proxy, seed
        self.producer = "librdkafka"
        self._enough = threading.Event()
        self._load = threading.Thread(target=self._deposit, daemon=True)

    def _deposit(self) -> None:
        portion = 0
        while not self._enough.is_set():
            self.bank.deposit(PORTION, KEYS, self._seed + portion, per_second=RATE)
            portion += 1

    def member(self, instance: str) -> Worker:
        worker = Worker(
            self.proxy.bootstrap_servers,
            self.bank.group,
            instance,
            self.bank.folder,
            **QUICK,
            BANK_PRODUCER=self.producer,
        )
        self.bank.workers.append(worker)
        return worker

    def begin(self) -> None:
        members = [self.member(f"member-{number}") for number in range(2)]
        self._load.start()
        for member in members:
            wait_until(lambda member=member: member.said("generation"), "both are in the group")  # type: ignore[misc]
        self.wait_progress()

    def wait_progress(self) -> None:
        before = self.bank.handled()
        wait_until(lambda: self.bank.handled() > before >= 0 or before < 0, "work goes on")

    def finish(self) -> None:
        """The load ends, all is handled, all members leave, the oracle finds nothing."""
        self._enough.set()
        self._load.join(PATIENCE)
        assert not self._load.is_alive(), "the load could not be produced"
        self.proxy.clear()
        self.bank.wait_handled()
        assert all(worker.running or worker.process.returncode == 0 for worker in self.bank.workers), "nobody died"
        self.bank.must_be_exact()


@pytest.fixture
def attacked(bank_group: Bank, seed: int) -> Iterator[Attacked]:
    with KafkaProxy(bank_group.bootstrap) as proxy:
        attacked = Attacked(bank_group, proxy, seed)
        yield attacked
        attacked._enough.set()


def rule_for(api: str, fault: str, seed: int) -> Rule:
    """At the first to the eighth of these requests from now on."""
    nth = random.Random(f"{seed} {api} {fault}").randrange(1, 9 if api in OF_TRANSACTIONS else 3)
    return Rule(apis={api}, nth=nth, times=1, seed=seed, **FAULTS[fault])


# With one broker and transactions v2 the wire producer enlists nothing.
BY_PRODUCER = [
    (name, api) for name in PRODUCERS for api in OF_TRANSACTIONS if (name, api) != ("wire", OF_TRANSACTIONS[1])
]


@pytest.mark.parametrize(("producer", "api"), gate(BY_PRODUCER, ("wire", "EndTxn")))
def test_transactions_under_attack(attacked: Attacked, producer: str, api: str) -> None:
    attacked.producer = producer
    attacked.begin()
    for fault in FAULTS:
        armed = attacked.proxy.add(rule_for(api, fault, attacked._seed))
        assert armed.wait_struck(seconds=PATIENCE), f"{fault}: {armed}"
        print(f"{api}: {fault}, at number {armed.seen}")
        attacked.wait_progress()
        armed.remove()
    attacked.finish()
    assert sum(attacked.proxy.struck.values()) == len(FAULTS)


@pytest.mark.parametrize("api", OF_THE_GROUP)
@pytest.mark.nightly
def test_rebalances_under_attack(attacked: Attacked, api: str) -> None:
    """A guest comes and goes, so that there are rebalances to be disturbed."""
    attacked.begin()
    for number, fault in enumerate(FAULTS):
        armed = attacked.proxy.add(rule_for(api, fault, attacked._seed))
        guest = attacked.member(f"guest-{number}")
        assert armed.wait_struck(seconds=PATIENCE), f"{fault}: {armed}"
        print(f"{api}: {fault}, at number {armed.seen}")
        wait_until(lambda guest=guest: guest.said("generation"), "the guest is in the group")  # type: ignore[misc]
        attacked.wait_progress()
        armed.remove()
        assert guest.stop() == 0, guest.log.read_text()
    attacked.finish()
    assert sum(attacked.proxy.struck.values()) == len(FAULTS)


@pytest.mark.parametrize("on", gate(["request", "reply"], "reply"))
def test_commit_whose_outcome_is_not_heard(attacked: Attacked, on: Any) -> None:
    """Held for one member until its producer is given up and replaced. The transaction is settled by asking, and
    the commits that arrive after that find their producer fenced."""
    attacked.begin()
    held = attacked.proxy.add(Rule(apis={"EndTxn"}, on=on, action="hold", client=f"{attacked.bank.group}.member-0*"))
    assert held.wait_struck()
    victim = attacked.bank.workers[0]
    found = "is committed" if on == "reply" else "not committed: sent again"
    wait_until(lambda: victim.said(found), f"a transaction {found}")
    held.release()
    attacked.wait_progress()
    attacked.finish()
