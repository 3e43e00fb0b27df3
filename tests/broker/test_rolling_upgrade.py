"""A rolling upgrade, and back: members of the code of before and of this one in one group, on a real broker.

Wire formats, changelog and group metadata are those of before: each code restores and takes over what the other wrote,
leads a group with the other in it, and fences what the other left open. The code of before comes out of the history;
without one (a source tarball, a shallow clone) the test is skipped.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.broker import bank
from tests.broker.battery_kit import ENDLESS, Bank, Worker, wait_until
from tests.broker.releases import BEFORE, unpack
from tests.broker.test_kept_stores import LOADED, QUICK, restored

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(480)]

KEYS = 200
SETTINGS = {"BANK_SESSION_SECONDS": "6", "BANK_STANDBYS": "1"}
CAME = r"PartitionMoved\(.*direction='in'"
"""A partition that came by the marker in its donor's last transaction: no take-over, the other code handed it over."""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the code of before."""
    tree = tmp_path_factory.mktemp("before")
    if not unpack(BEFORE, tree):
        pytest.skip(f"the history is not here, so the code of before ({BEFORE[:7]}) is not, either")
    return tree


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
def test_members_of_both_codes_share_a_group_of_the_brokers_protocol(bank_group: Bank, before: Path) -> None:
    """That of before spoke it by librdkafka. Both orders, and each takes over from the other after a kill."""
    new = {"BANK_SESSION_SECONDS": "6"}
    old = {**new, "PYTHONPATH": str(before)}
    load = bank_group.load(ENDLESS, KEYS, 2, 400)
    first, second = bank_group.start("first", **old), bank_group.start("second", **new)
    share_evenly(first, second)
    first.kill()  # with a transaction open, or not
    wait_until(lambda: second.works_on() == bank.PARTITIONS, "this code took over from that of before")
    first = bank_group.start("first", **old)
    share_evenly(first, second)
    second.kill()
    wait_until(lambda: first.works_on() == bank.PARTITIONS, "the code of before took over from this one")
    second = bank_group.start("second", **new)
    share_evenly(first, second)
    assert first.stop() == 0
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
