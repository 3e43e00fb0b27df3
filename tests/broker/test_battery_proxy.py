"""Battery T2, number 5: thirty times a request or its reply is lost, late or doubled between a group under load and its
broker. Whatever the clients make of it: nothing is torn, lost or doubled, and work goes on."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any, Final

import pytest

from streams.testing.faults import KafkaProxy, Rule
from tests.broker.battery_kit import ENDLESS, PATIENCE, QUICK, Bank, wait_until
from tests.broker.gate import gate, nightly
from tests.broker.test_wire_producer import set_transaction_version

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(240)]

LATE: Final = (2.2, 3.5)
"""Seconds: more than a session (2 s) and a transaction (1.6 s) last."""

FAULTS: Final[dict[str, dict[str, Any]]] = {
    "reply lost": {"on": "reply", "action": "drop"},
    "reply late": {"on": "reply", "action": "delay", "seconds": LATE},
    "reply doubled": {"on": "reply", "action": "double"},
    "request lost": {"on": "request", "action": "drop"},
    "request doubled": {"on": "request", "action": "double", "answer": "last"},
}
OF_TRANSACTIONS = ("EndTxn", "TxnOffsetCommit", "Produce")
OF_V1 = (*OF_TRANSACTIONS, "AddPartitionsToTxn")
"""With one broker and transactions v2 a producer enlists nothing."""
OF_THE_GROUP = ("JoinGroup", "SyncGroup")


@pytest.fixture
def proxy(bank_group: Bank) -> Iterator[KafkaProxy]:
    """The only way to the broker for members of the bank."""
    with KafkaProxy(bank_group.bootstrap) as proxy:
        bank_group.of_members = proxy.bootstrap_servers
        yield proxy


@contextlib.contextmanager
def attacked(bank: Bank, proxy: KafkaProxy, seed: int, **settings: str) -> Iterator[None]:
    """Two members at work; at the end all is handled, all leave, and the oracle finds nothing."""
    members = [bank.start(f"member-{number}", **QUICK, **settings) for number in range(2)]
    load = bank.load(ENDLESS, 60, seed, 600)
    try:
        wait_until(lambda: all(member.said("generation") for member in members), "both are in the group")
        bank.wait_progress()
        yield
    finally:
        load.stop()
    proxy.clear()
    bank.wait_handled()
    assert all(worker.running or worker.process.returncode == 0 for worker in bank.workers), "nobody died"
    bank.must_be_exact()


@pytest.mark.parametrize(
    ("membership", "api"),
    [
        *gate([("", api) for api in OF_TRANSACTIONS], ("", "EndTxn")),
        *(nightly("", api) for api in OF_THE_GROUP),
        pytest.param("broker", "ConsumerGroupHeartbeat", marks=pytest.mark.soak),
    ],
)
def test_under_attack(bank_group: Bank, proxy: KafkaProxy, api: str, seed: int) -> None:
    """Where the group is attacked a guest comes and goes, so that there are rebalances to be disturbed."""
    attack(bank_group, proxy, api, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("api", OF_V1)
def test_under_attack_where_epochs_do_not_tell_transactions_apart(fragile_group: Bank, api: str, seed: int) -> None:
    """Transactions v1, as in a cluster that was upgraded and is not yet finalized."""
    asyncio.run(set_transaction_version(fragile_group.bootstrap, 1))
    with KafkaProxy(fragile_group.bootstrap) as proxy:
        fragile_group.of_members = proxy.bootstrap_servers
        attack(fragile_group, proxy, api, seed)
    assert fragile_group.workers[0].said("transactions v1")


def attack(bank_group: Bank, proxy: KafkaProxy, api: str, seed: int) -> None:
    with attacked(bank_group, proxy, seed):
        for number, fault in enumerate(FAULTS):
            nth = random.Random(f"{seed} {api} {fault}").randrange(1, 9 if api in OF_V1 else 3)
            armed = proxy.add(Rule(apis={api}, nth=nth, times=1, seed=seed, **FAULTS[fault]))
            guest = None if api in OF_V1 else bank_group.start(f"guest-{number}", **QUICK)
            assert armed.wait_struck(seconds=PATIENCE), f"{fault}: {armed}"
            print(f"{api}: {fault}, at number {armed.seen}")
            if guest is not None:
                wait_until(lambda guest=guest: guest.said("generation"), "the guest is in the group")  # type: ignore[misc]
            bank_group.wait_progress()
            armed.remove()
            if guest is not None:
                assert guest.stop() == 0, guest.log.read_text()
    assert sum(proxy.struck.values()) == len(FAULTS)


@pytest.mark.parametrize("on", gate(["request", "reply"], "reply"))
def test_commit_whose_outcome_is_not_heard(bank_group: Bank, proxy: KafkaProxy, on: Any, seed: int) -> None:
    """Held for one member until its producer is given up and replaced. The transaction is settled by asking, and
    the commits that arrive after that find their producer fenced."""
    with attacked(bank_group, proxy, seed):
        held = proxy.add(Rule(apis={"EndTxn"}, on=on, action="hold", client=f"{bank_group.group}.member-0*"))
        assert held.wait_struck()
        found = "is committed" if on == "reply" else "not committed: sent again"
        wait_until(lambda: bank_group.workers[0].said(found), f"a transaction {found}")
        held.release()
        bank_group.wait_progress()
