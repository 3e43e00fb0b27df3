"""A rolling upgrade, and back: members of the code of before and of this one in one group, on a real broker.

Wire formats, changelog and group metadata are those of before: each code restores and takes over what the other wrote,
leads a group with the other in it, and fences what the other left open. The code of before comes out of the history;
without one (a source tarball, a shallow clone) the test is skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker import bank
from tests.broker.battery_kit import ENDLESS, Bank, Worker, wait_until
from tests.broker.releases import BEFORE, unpack

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
