"""Battery T2, number 4: the broker stopped and killed under load, and a group coordinator that comes back without its
memory. Nothing lost, nothing doubled, at work again within a minute."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.broker import KafkaBroker
from streams.testing.fixtures import OwnBroker
from tests.broker.battery_kit import ENDLESS, Bank, seed_of, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]

EVENTS, KEYS, RATE = 30_000, 100, 1_500.0
RECOVERY_SECONDS = 60.0
FROZEN_SECONDS = 25.0


@pytest.fixture
def broker(own_broker: OwnBroker) -> KafkaBroker:
    return own_broker(start_timeout=150.0)  # it is started anew while members are at work


@pytest.fixture
def bank_group(broker: KafkaBroker, topic_prefix: str, tmp_path: Path) -> Iterator[Bank]:
    bank = Bank(broker.bootstrap_servers, f"{topic_prefix}bank", tmp_path)
    yield bank
    bank.close()


def forget_the_group(broker: KafkaBroker) -> None:
    """What a coordinator does that loads nothing of its log: no members, no offsets, generations from the start."""
    assert broker.data_dir is not None
    folders = [path for path in broker.data_dir.rglob("__consumer_offsets-*") if path.is_dir()]
    assert folders, f"no offsets log in {broker.data_dir}"
    for folder in folders:
        shutil.rmtree(folder)


@pytest.mark.parametrize("repetition", [1, 2])
@pytest.mark.parametrize("how", ["stopped", "killed", pytest.param("frozen", marks=pytest.mark.soak)])
def test_broker_goes_away_and_comes_back(broker: KafkaBroker, bank_group: Bank, how: str, repetition: int) -> None:
    seed = seed_of() + repetition
    print(f"SEED={seed - repetition}")
    workers = [bank_group.start(f"member-{number}") for number in range(2)]
    load = bank_group.load(ENDLESS, KEYS, seed, RATE)
    bank_group.wait_handled(EVENTS // 6)
    if how == "killed":
        broker.kill()
    if how == "frozen":  # it neither answers nor hangs up, for longer than clients wait
        broker.freeze()
        until = time.monotonic() + FROZEN_SECONDS
        wait_until(lambda: time.monotonic() > until, "enough of that")
        broker.thaw()
    else:
        broker.restart()  # in good order if it still runs; data and port stay
    back = time.monotonic()
    before = bank_group.handled()
    wait_until(lambda: bank_group.handled() > max(before, EVENTS // 6), "work goes on", RECOVERY_SECONDS)
    print(f"at work again {time.monotonic() - back:.1f} s after the broker answered")
    load.stop()
    bank_group.wait_handled()
    assert all(worker.running for worker in workers), "no worker may die of an outage"
    bank_group.check_stores()
    bank_group.must_be_exact()


@pytest.mark.parametrize("moment", ["under load", "all members gone"])
def test_coordinator_without_its_memory(broker: KafkaBroker, bank_group: Bank, moment: str) -> None:
    """Seen on a real broker: its group came back without members and offsets. The changelog has the offset."""
    seed = seed_of()
    print(f"SEED={seed}")
    bank_group.start("member-0")
    bank_group.start("member-1")
    if moment == "under load":
        load = bank_group.load(EVENTS, KEYS, seed, RATE)
        bank_group.wait_handled(EVENTS // 6)
        broker.kill()
        forget_the_group(broker)
        broker.restart()
        load.finish()
    else:
        bank_group.deposit(EVENTS // 2, KEYS, seed)
        bank_group.wait_handled()
        bank_group.stop_all()
        broker.kill()
        forget_the_group(broker)
        broker.restart()
        bank_group.start("member-0")
        bank_group.deposit(EVENTS // 2, KEYS, seed + 1)
    bank_group.wait_handled(EVENTS)
    report = bank_group.must_be_exact()
    assert any(worker.said("the changelog is right") for worker in bank_group.workers), (
        "the difference must be reported"
    )
    assert report.inputs == EVENTS
