"""A rolling upgrade, and back: members of the code of before and of this one in one group, on a real broker.

Wire formats, changelog and group metadata are those of before: each code restores and takes over what the other wrote,
leads a group with the other in it, and fences what the other left open. The code of before speaks the group protocol
by kafka-python. It comes out of the history; without one (a source tarball, a shallow clone) the test is skipped.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from streams.broker import KafkaBroker, KafkaCluster
from tests.broker import bank
from tests.broker.battery_kit import ENDLESS, QUICK, Bank, Worker, wait_until
from tests.broker.kafka_versions import kafka_of
from tests.broker.releases import BEFORE, unpack
from tests.broker.test_battery_outages import forget_the_group
from tests.broker.test_battery_parked import ParkedBank, parked_bank
from tests.broker.test_kept_stores import LOADED, restored
from tests.soak.kit import Watch, bank_on

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(480)]

__all__ = ["parked_bank"]
KEYS = 200
SETTINGS = {"BANK_SESSION_SECONDS": "6", "BANK_STANDBYS": "1"}
CAME = r"PartitionMoved\(.*direction='in'"
"""A partition that came by the marker in its donor's last transaction: no take-over, the other code handed it over."""


MOVED = r"PartitionMoved\("
REFUSED = "its format is 2, the newest known here is 1"
STATIC = '    settings.setdefault("static_membership", bool(os.environ.get("BANK_STATIC")))\n'
"""A line of this code's bank, which that of before lacks."""
ORDERS = [("before", "this"), ("this", "before")]
"""Whose code is there, and whose comes."""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the code of before."""
    tree = tmp_path_factory.mktemp("before")
    if not unpack(BEFORE, tree):
        pytest.skip(f"the history is not here, so the code of before ({BEFORE[:7]}) is not, either")
    program = tree / "tests/broker/bank.py"
    head, line, rest = program.read_text().partition('    settings.setdefault("num_standbys"')
    assert line
    program.write_text(head + STATIC + line + rest)
    return tree


@pytest.fixture
def codes(before: Path) -> dict[str, dict[str, str]]:
    """What makes a worker one of the code."""
    return {"before": {"PYTHONPATH": str(before)}, "this": {}}


def share_evenly(*workers: Worker) -> None:
    wanted = bank.PARTITIONS // len(workers)
    names = ", ".join(worker.instance for worker in workers)
    wait_until(lambda: all(worker.works_on() == wanted for worker in workers), f"{names} have {wanted} each")


def test_members_of_both_codes_share_a_group(bank_group: Bank, before: Path, tmp_path: Path) -> None:
    """The members of this code have folders, and report them to leaders of both."""
    old = {**SETTINGS, "PYTHONPATH": str(before)}
    new = {**SETTINGS, "BANK_FOLDER": str(tmp_path / "state")}
    bank_group.deposit(2_000, KEYS, 1)
    first = bank_group.start("first", **old)
    bank_group.wait_handled()  # all that is there was written by the code of before
    load = bank_group.load(ENDLESS, KEYS, 2, 400)

    upgraded = bank_group.start("second", **new)  # led by the code of before
    share_evenly(first, upgraded)
    assert upgraded.times(CAME), "partitions came from the code of before"
    assert first.stop() == 0  # it hands over the others
    wait_until(lambda: upgraded.works_on() == bank.PARTITIONS, "this code has everything")

    back = bank_group.start("first", **old)  # led by this code
    share_evenly(back, upgraded)
    assert back.times(CAME), "partitions came from this code"

    upgraded.kill()  # with a transaction open, or not
    wait_until(lambda: back.works_on() == bank.PARTITIONS, "the code of before took over from this one")
    upgraded = bank_group.start("second", **new)
    share_evenly(back, upgraded)
    back.kill()
    wait_until(lambda: upgraded.works_on() == bank.PARTITIONS, "this code took over from that of before")
    last = bank_group.start("first", **new)  # the upgrade is complete
    share_evenly(last, upgraded)

    load.stop()
    bank_group.wait_handled()
    bank_group.check_stores(standbys=1)
    bank_group.must_be_exact()


@pytest.mark.parametrize("membership", ["broker"])
def test_a_group_of_the_brokers_protocol_is_stopped_for_the_upgrade(bank_group: Bank, before: Path) -> None:
    """That of before spoke it by librdkafka, whose ids any program has: this one does not join it, and it goes on."""
    new = {"BANK_SESSION_SECONDS": "6"}
    load = bank_group.load(ENDLESS, KEYS, 2, 400)
    first = bank_group.start("first", **new, PYTHONPATH=str(before))
    wait_until(lambda: first.works_on() == bank.PARTITIONS, "the code of before has everything")
    refused = bank_group.start("second", **new)
    wait_until(lambda: not refused.running, "this code refuses the group")
    assert refused.said("other programs are members of it (first at ")
    assert first.works_on() == bank.PARTITIONS
    bank_group.wait_progress()
    assert first.stop() == 0
    second = bank_group.start("second", **new)
    wait_until(lambda: second.works_on() == bank.PARTITIONS, "this code has everything")
    load.stop()
    bank_group.wait_handled()
    bank_group.check_stores()
    bank_group.must_be_exact()


@pytest.mark.parametrize(("engine", "store"), [("", "Table"), ("SQLite", "Stores"), ("RocksDB", "SimpleStore")])
def test_folders_and_snapshots_of_the_code_of_before_are_taken(
    bank_group: Bank, before: Path, tmp_path: Path, engine: str, store: str
) -> None:
    settings = {**QUICK, "BANK_ENGINE": engine, "BANK_STORE": store, "BANK_SNAPSHOTS": str(tmp_path / "snapshots")}
    bank_group.deposit(3_000, KEYS, 1)
    old = bank_group.start("member", **settings, BANK_FOLDER=str(tmp_path / "state"), PYTHONPATH=str(before))
    bank_group.wait_handled()
    manifests = (tmp_path / "snapshots").rglob
    wait_until(lambda: len({path.parent for path in manifests("manifest-*")}) == bank.PARTITIONS, "each has a snapshot")
    assert old.stop() == 0, old.log.read_text()
    partitions = len(list((tmp_path / "state").rglob("mark")))
    new = bank_group.start("member", **settings, BANK_FOLDER=str(tmp_path / "state"))
    bank_group.check_stores()
    assert re.search(LOADED, new.log.read_text())
    assert restored(new.log) <= partitions, "one record of each partition: the one that its folder ends with"
    new.kill()
    bank_group.deposit(500, KEYS, 2)
    elsewhere = bank_group.start("member", **settings, BANK_FOLDER=str(tmp_path / "elsewhere"))
    bank_group.wait_handled()
    bank_group.check_stores()
    assert elsewhere.times(r"the snapshot manifest-") == bank.PARTITIONS
    bank_group.must_be_exact()


def test_the_code_of_before_refuses_partitions_with_parked_keys(
    parked_bank: ParkedBank, before: Path, seed: int
) -> None:
    """It would handle later events of these keys before those that wait. Its copies never become ready, so nothing is
    moved to it; what it has to take over, it stops at by name, and this code goes on. Empty queues do not change that
    while their records are in the log: it reads each one."""
    group, old = parked_bank, {**SETTINGS, "PYTHONPATH": str(before)}
    new = {**SETTINGS, **parked_bank.settings}
    group.broken(True)
    load = group.load(ENDLESS, KEYS, seed, 200)
    owner = group.start("this", **new)
    group.wait_progress(1_000)
    wait_until(lambda: all(group.parked_keys()), "a key is parked in each partition")
    other = group.start("before", **old)
    wait_until(lambda: other.times(REFUSED) > 0, "its copies are refused by name")
    group.wait_progress(1_000)
    assert owner.works_on() == group.partitions, "nothing is moved to it"
    owner.kill()
    wait_until(lambda: not other.running, "it stops at what it has to take over")
    assert re.search(rf"OffsetError.*{REFUSED}", other.last_words(200)), other.last_words()
    owner = group.start("this", **new)
    group.wait_progress(1_000)
    load.stop()
    group.broken(False)
    group.wait_handled()
    wait_until(lambda: not any(group.parked_keys()), "the queues are empty")
    other = group.start("before", **old)
    wait_until(lambda: other.times(REFUSED) > 0, "it reads what was in them")
    assert owner.works_on() == group.partitions
    group.deposit(300, KEYS, seed + 1)
    group.wait_handled()
    assert other.stop() == 0, other.last_words()
    group.work_off()


# ----------------------------------------------------------------------------------------- struck, in both orders


def works_on(worker: Worker, count: int) -> None:
    wait_until(lambda: worker.works_on() == count, f"{worker.instance} works on {count}, not {worker.works_on()}")


def struck(group: Bank, there: dict[str, str], comes: dict[str, str], seed: int) -> None:
    """Moves to and fro, kills with a transaction open, a freeze past the session: one after the other, under load."""
    half, all_of_them = group.partitions // 2, group.partitions
    load = group.load(ENDLESS, KEYS, seed, 300)
    first = group.start("first", **QUICK, **there)
    works_on(first, all_of_them)
    second = group.start("second", **QUICK, **comes)
    works_on(second, half)
    assert second.times(CAME), "nothing was handed over"
    second.kill()
    works_on(first, all_of_them)
    second = group.start("second", **QUICK, **comes)
    works_on(second, half)
    first.signal(signal.SIGSTOP)
    frozen = psutil.Process(first.process.pid)
    wait_until(lambda: frozen.status() == psutil.STATUS_STOPPED, "the member freezes")
    works_on(second, all_of_them)
    first.signal(signal.SIGCONT)
    works_on(first, half)
    first.kill()
    works_on(second, all_of_them)
    first = group.start("first", **QUICK, **there)
    works_on(first, half)
    assert second.stop() == 0, second.last_words()
    works_on(first, all_of_them)
    load.stop()
    exact(group)


def exact(group: Bank) -> None:
    group.wait_handled()
    group.check_stores()
    group.must_be_exact()


@pytest.mark.parametrize(("there", "comes"), ORDERS)
def test_kills_and_freezes(
    bank_group: Bank, codes: dict[str, dict[str, str]], there: str, comes: str, seed: int
) -> None:
    struck(bank_group, codes[there], codes[comes], seed)


@pytest.mark.parametrize("version", ["3.0.2", "3.9.1", "4.0.1", "4.1.1"])
def test_kills_and_freezes_on_another_kafka(
    version: str, codes: dict[str, dict[str, str]], tmp_path: Path, seed: int
) -> None:
    """The embedded broker is of version 4.3."""
    with kafka_of(version) as broker:
        for number, (there, comes) in enumerate(ORDERS):
            group = Bank(broker.bootstrap_servers, f"bank{number}", tmp_path)
            try:
                struck(group, codes[there], codes[comes], seed + number)
            finally:
                group.close()


@pytest.mark.parametrize(("there", "comes"), ORDERS)
def test_a_static_member_is_restarted_with_the_other_code(
    bank_group: Bank, codes: dict[str, dict[str, str]], there: str, comes: str, seed: int
) -> None:
    """Its partitions come back to it, and the other one keeps its own."""
    settings = {"BANK_SESSION_SECONDS": "20", "BANK_STATIC": "1"}
    load = bank_group.load(ENDLESS, KEYS, seed, 300)
    other = bank_group.start("other", **settings, **codes[there])
    restarts = bank_group.start("restarts", **settings, **codes[there])
    share_evenly(other, restarts)
    theirs, mine, moves = partitions_of(other), partitions_of(restarts), other.times(MOVED)
    restarts.kill()
    successor = bank_group.start("restarts", **settings, **codes[comes])
    share_evenly(other, successor)
    assert (partitions_of(other), partitions_of(successor)) == (theirs, mine)
    assert other.times(MOVED) == moves
    load.stop()
    exact(bank_group)


def partitions_of(worker: Worker) -> set[int]:
    """What it works on."""
    dump = worker.dump()
    assert dump is not None
    return {store.partition for store in dump.stores if store.role == "active"}


def test_the_coordinator_comes_back_without_its_memory(
    broker: KafkaBroker, fragile_group: Bank, codes: dict[str, dict[str, str]], seed: int
) -> None:
    """Members of both codes are void, and none is met under the id that it had."""
    group = fragile_group
    workers = [group.start(name, **code) for name, code in codes.items()]
    load = group.load(ENDLESS, KEYS, seed, 500)
    share_evenly(*workers)
    broker.kill()
    forget_the_group(broker)
    broker.restart()
    for worker in workers:
        wait_until(lambda worker=worker: worker.said("membership lost"), f"{worker.instance} hears of it")  # type: ignore[misc]
    group.wait_progress(100)
    share_evenly(*workers)
    load.stop()
    exact(group)


@pytest.mark.parametrize("how", ["killed", "frozen", "restarted"])
def test_the_coordinator_moves_to_another_broker(
    how: str, codes: dict[str, dict[str, str]], tmp_path: Path, seed: int
) -> None:
    with KafkaCluster(3, properties={"broker.session.timeout.ms": "9000"}) as cluster:
        group = bank_on(cluster, "mixed", tmp_path)
        watch, load = Watch(group), group.load(ENDLESS, KEYS, seed, 100)
        workers = [group.start(name, **code) for name, code in codes.items()]
        for worker in workers:
            works_on(worker, group.partitions // 2)
        gone = cluster.node(cluster.group_coordinator(group.group))
        began = time.monotonic()
        gone.freeze() if how == "frozen" else gone.kill()
        if how == "restarted":
            gone.restart()
        try:
            third = group.start("third")  # a join in the middle of it
            wait_until(lambda: third.works_on() > 0, "it is a member")
            wait_until(lambda: watch.all_since(began + 9.0), "every partition gives something")
            print(f"silence {max(watch.largest_gaps(began, time.monotonic()).values()):.1f} s")
        finally:
            if how != "restarted":
                gone.thaw() if how == "frozen" else gone.restart()
        cluster.wait_in_sync()
        load.stop()
        group.wait_handled()
        watch.stop()
        group.must_be_exact()
