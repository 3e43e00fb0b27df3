"""Battery T2, number 4: the broker stopped and killed under load, and a group coordinator that comes back without its
memory. Nothing lost, nothing doubled, at work again within a minute."""

from __future__ import annotations

import shutil
import time

import pytest

from streams.broker import KafkaBroker
from tests.broker.battery_kit import ENDLESS, Bank, let_pass, wait_until
from tests.broker.gate import gate, nightly

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]

EVENTS, KEYS, RATE = 30_000, 100, 1_500.0
RECOVERY_SECONDS = 60.0
FROZEN_SECONDS = 25.0


def forget_the_group(broker: KafkaBroker) -> None:
    """What a coordinator does that loads nothing of its log: no members, no offsets, generations from the start."""
    assert broker.data_dir is not None
    folders = [path for path in broker.data_dir.rglob("__consumer_offsets-*") if path.is_dir()]
    assert folders, f"no offsets log in {broker.data_dir}"
    for folder in folders:
        shutil.rmtree(folder)


@pytest.mark.parametrize("repetition", gate([1, 2], 1))
@pytest.mark.parametrize("how", [nightly("stopped"), "killed", pytest.param("frozen", marks=pytest.mark.soak)])
def test_broker_goes_away_and_comes_back(
    broker: KafkaBroker, fragile_group: Bank, how: str, repetition: int, seed: int
) -> None:
    seed += repetition
    workers = [fragile_group.start(f"member-{number}") for number in range(2)]
    load = fragile_group.load(ENDLESS, KEYS, seed, RATE)
    fragile_group.wait_handled(EVENTS // 6)
    if how == "killed":
        broker.kill()
    if how == "frozen":  # it neither answers nor hangs up, for longer than clients wait
        broker.freeze()
        let_pass(FROZEN_SECONDS)
        broker.thaw()
    else:
        broker.restart()  # in good order if it still runs; data and port stay
    back = time.monotonic()
    before = fragile_group.handled()
    wait_until(lambda: fragile_group.handled() > max(before, EVENTS // 6), "work goes on", RECOVERY_SECONDS)
    print(f"at work again {time.monotonic() - back:.1f} s after the broker answered")
    load.stop()
    fragile_group.wait_handled()
    assert all(worker.running for worker in workers), "no worker may die of an outage"
    fragile_group.check_stores()
    fragile_group.must_be_exact()


@pytest.mark.parametrize("moment", gate(["under load", "all members gone"], "all members gone"))
def test_coordinator_without_its_memory(broker: KafkaBroker, fragile_group: Bank, moment: str, seed: int) -> None:
    """Seen on a real broker: its group came back without members and offsets. The changelog has the offset."""
    fragile_group.start("member-0")
    fragile_group.start("member-1")
    if moment == "under load":
        load = fragile_group.load(EVENTS, KEYS, seed, RATE)
        fragile_group.wait_handled(EVENTS // 6)
        broker.kill()
        forget_the_group(broker)
        broker.restart()
        load.finish()
    else:
        fragile_group.deposit(EVENTS // 2, KEYS, seed)
        fragile_group.wait_handled()
        fragile_group.stop_all()
        broker.kill()
        forget_the_group(broker)
        broker.restart()
        fragile_group.start("member-0")
        fragile_group.deposit(EVENTS // 2, KEYS, seed + 1)
    fragile_group.wait_handled(EVENTS)
    report = fragile_group.must_be_exact()
    assert any(worker.said("the changelog is right") for worker in fragile_group.workers), (
        "the difference must be reported"
    )
    assert report.inputs == EVENTS
