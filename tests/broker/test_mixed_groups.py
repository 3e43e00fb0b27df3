"""Members over kafka-python and over our own wire in one group, both orders: what a rolling upgrade goes through."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from streams.broker import KafkaBroker, KafkaCluster
from streams.kafka.group.connect import KAFKA_PYTHON, OVER, WIRE
from streams.model.group import Assigned, Lost, Revoked
from tests.broker import bank
from tests.broker.battery_kit import ENDLESS, QUICK, Bank, Worker, wait_until
from tests.broker.gate import gate
from tests.broker.kafka_versions import kafka_of
from tests.broker.membership_kit import SESSION_MS, Desk, Seat, laid_desk, settled
from tests.broker.test_battery_outages import forget_the_group
from tests.broker.test_rolling_upgrade import CAME
from tests.soak.kit import Watch, bank_on

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

ORDERS = [(KAFKA_PYTHON, WIRE), (WIRE, KAFKA_PYTHON)]
"""Who is there, and who comes."""
KEYS = 200


# -------------------------------------------------------------------------------------------------- memberships


def come_and_go(desk: Desk, there: str, comes: str) -> list[Seat]:
    """Replace the members one by one by those of the other stack. Returns who is left."""
    members = [desk.seat("a", over=there), desk.seat("b", over=there)]
    settled(*members)
    for number in range(2):
        members.append(desk.seat(f"new-{number}", over=comes))
        settled(*members)  # led by a member that was there
        leaver = members.pop(0)
        since = len(leaver.events)
        leaver.membership.leave()
        leaver.owning(0, since)
        leaver.close()
        settled(*members)
        assert not leaver.heard_of(Lost)
    assert not any(member.heard_of(Lost) for member in members)
    return members


@pytest.mark.parametrize(("there", "comes"), gate(ORDERS, (KAFKA_PYTHON, WIRE)))
def test_members_are_replaced_one_by_one(desk: Desk, there: str, comes: str) -> None:
    members = come_and_go(desk, there, comes)
    back = desk.seat("back", over=there)  # led by a member that came
    settled(*members, back)


@pytest.mark.parametrize("session_ms", [SESSION_MS])
@pytest.mark.parametrize(("there", "comes"), gate(ORDERS, (KAFKA_PYTHON, WIRE)))
def test_what_a_killed_or_a_frozen_one_had_goes_to_the_other(desk: Desk, there: str, comes: str) -> None:
    steady = {"session_timeout_ms": 12_000}
    stays, dies = desk.seat("a", over=there, **steady), desk.seat("b", over=comes)
    settled(stays, dies)
    dies.die()
    settled(stays)
    freezes = desk.seat("c", over=comes)
    settled(stays, freezes)
    thaw, since = freezes.freeze(), len(freezes.events)
    settled(stays)
    thaw()
    freezes.wait(lambda event: isinstance(event, Lost), since)
    settled(stays, freezes)
    assert not stays.heard_of(Lost)


@pytest.mark.parametrize(("there", "comes"), gate(ORDERS, (KAFKA_PYTHON, WIRE)))
def test_a_static_member_is_restarted_over_the_other_stack(desk: Desk, there: str, comes: str) -> None:
    other, restarts = desk.seat("a", over=there, static=True), desk.seat("b", over=there, static=True)
    settled(other, restarts)
    mine, since = restarts.assigned()[-1].owned, len(other.events)
    restarts.close()
    successor = desk.seat("b", over=comes, static=True)
    assert successor.owning(len(mine)).owned == mine
    assert not any(isinstance(event, Revoked | Lost) for event in other.events[since:])
    assert not any(event.added for event in other.events[since:] if isinstance(event, Assigned))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.8.2", "3.0.2", "3.9.1", "4.0.1", "4.1.1"])
def test_on_another_kafka(version: str, topic_prefix: str) -> None:
    """The embedded broker is of version 4.3."""
    with kafka_of(version) as broker:
        for number, (there, comes) in enumerate(ORDERS):
            with laid_desk("streams", broker.bootstrap_servers, f"{topic_prefix}{number}-", 12_000) as desk:
                come_and_go(desk, there, comes)


# ------------------------------------------------------------------------------------------------ event sources


def works_on(worker: Worker, count: int) -> None:
    wait_until(lambda: worker.works_on() == count, f"{worker.instance} works on {count}, not {worker.works_on()}")


def struck(group: Bank, there: str, comes: str, seed: int) -> None:
    """Moves to and fro, kills with a transaction open, a freeze past the session: one after the other, under load."""
    half, all_of_them = group.partitions // 2, group.partitions
    load = group.load(ENDLESS, KEYS, seed, 300)
    first = group.start("first", **QUICK, **{OVER: there})
    works_on(first, all_of_them)
    second = group.start("second", **QUICK, **{OVER: comes})
    works_on(second, half)
    assert second.times(CAME), "nothing was handed over"
    second.kill()
    works_on(first, all_of_them)
    second = group.start("second", **QUICK, **{OVER: comes})
    works_on(second, half)
    first.signal(signal.SIGSTOP)
    frozen = psutil.Process(first.process.pid)
    wait_until(lambda: frozen.status() == psutil.STATUS_STOPPED, "the member freezes")
    works_on(second, all_of_them)
    first.signal(signal.SIGCONT)
    works_on(first, half)
    first.kill()
    works_on(second, all_of_them)
    first = group.start("first", **QUICK, **{OVER: there})
    works_on(first, half)
    assert second.stop() == 0, second.last_words()
    works_on(first, all_of_them)
    load.stop()
    group.wait_handled()
    group.check_stores()
    group.must_be_exact()


@pytest.mark.parametrize(("there", "comes"), gate(ORDERS, (KAFKA_PYTHON, WIRE)))
def test_sources_of_both_stacks_share_a_group(bank_group: Bank, there: str, comes: str, seed: int) -> None:
    struck(bank_group, there, comes, seed)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.0.2", "3.9.1", "4.0.1", "4.1.1"])
def test_sources_on_another_kafka(version: str, tmp_path: Path, seed: int) -> None:
    with kafka_of(version) as broker:
        for number, (there, comes) in enumerate(ORDERS):
            group = Bank(broker.bootstrap_servers, f"bank{number}", tmp_path)
            try:
                struck(group, there, comes, seed + number)
            finally:
                group.close()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_coordinator_comes_back_without_its_memory(broker: KafkaBroker, fragile_group: Bank, seed: int) -> None:
    """Both members are void, and none is met under the id that it had."""
    group = fragile_group
    workers = [group.start(over, **{OVER: over}) for over in (KAFKA_PYTHON, WIRE)]
    load = group.load(ENDLESS, KEYS, seed, 500)
    for worker in workers:
        works_on(worker, bank.PARTITIONS // 2)
    broker.kill()
    forget_the_group(broker)
    broker.restart()
    for worker in workers:
        wait_until(lambda worker=worker: worker.said("membership lost"), f"{worker.instance} hears of it")  # type: ignore[misc]
    group.wait_progress(100)
    for worker in workers:
        works_on(worker, bank.PARTITIONS // 2)
    load.stop()
    group.wait_handled()
    group.check_stores()
    group.must_be_exact()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "frozen", "restarted"])
def test_the_coordinator_moves_to_another_broker(how: str, tmp_path: Path, seed: int) -> None:
    with KafkaCluster(3, properties={"broker.session.timeout.ms": "9000"}) as cluster:
        group = bank_on(cluster, "mixed", tmp_path)
        watch, load = Watch(group), group.load(ENDLESS, KEYS, seed, 100)
        workers = [group.start(over, **{OVER: over}) for over in (KAFKA_PYTHON, WIRE)]
        for worker in workers:
            works_on(worker, group.partitions // 2)
        gone = cluster.node(cluster.group_coordinator(group.group))
        before = time.monotonic()
        gone.freeze() if how == "frozen" else gone.kill()
        if how == "restarted":
            gone.restart()
        try:
            third = group.start("third", **{OVER: WIRE})  # a join in the middle of it
            wait_until(lambda: third.works_on() > 0, "it is a member")
            wait_until(lambda: watch.all_since(before + 9.0), "every partition gives something")
            print(f"silence {max(watch.largest_gaps(before, time.monotonic()).values()):.1f} s")
        finally:
            if how != "restarted":
                gone.thaw() if how == "frozen" else gone.restart()
        cluster.wait_in_sync()
        load.stop()
        group.wait_handled()
        watch.stop()
        group.must_be_exact()
