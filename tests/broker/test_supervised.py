"""``kes run`` on a real broker: a worker that is killed is not waited for, one that is frozen is.

The session is long (30 s; 45 s where the broker sets it) and each deadline longer, so what is measured can only be
below the session because somebody removed the dead member. The gap is what a ``read_committed`` reader of the outputs
sees; it is printed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from streams.kafka.questions.group_view import GroupQuestions
from streams.kafka.wire.security import PLAINTEXT
from streams.looks.group_picture import Picture, facts
from tests.broker.battery_kit import ENDLESS, Bank, Load, wait_until
from tests.broker.gate import gate
from tests.broker.kes_kit import KesRun
from tests.soak.kit import Watch

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

SESSION_SECONDS = 30.0
KEYS, PER_SECOND = 60, 400

SOURCE = """
import os
from streams.testing.faults import FaultPlan
from tests.broker import bank

def make():
    return bank.build(
        os.environ["KES_BOOTSTRAP_SERVERS"],
        os.environ["SUPERVISED_GROUP"],
        "",
        FaultPlan(),
        static_membership=os.environ["SUPERVISED_STATIC"] == "1",
        num_standbys=int(os.environ["SUPERVISED_STANDBYS"]),
    )
"""


def supervise(group: Bank, workers: int, membership: str, *, static: bool, standbys: int) -> KesRun:
    """``kes run`` of the bank."""
    (group.folder / "supervised.py").write_text(SOURCE)
    environment = {
        "KES_BOOTSTRAP_SERVERS": group.bootstrap,
        "SUPERVISED_GROUP": group.group,
        "SUPERVISED_STATIC": "1" if static else "0",
        "SUPERVISED_STANDBYS": str(standbys),
        "BANK_SESSION_SECONDS": str(SESSION_SECONDS),
        "BANK_MEMBERSHIP": membership,
    }
    return KesRun("supervised:make", workers, group.folder / "kes.log", group.folder, environment)


@pytest.fixture
def watch(bank_group: Bank) -> Iterator[Watch]:
    watch = Watch(bank_group)
    yield watch
    watch.stop()


def shares(group: Bank) -> list[int]:
    """How many partitions each member works on."""
    questions = GroupQuestions(group.bootstrap, PLAINTEXT)
    try:
        view = questions.describe_group(group.group, 10.0)
    finally:
        questions.close()
    return [sum(map(len, member["owned"].values())) for member in facts(Picture(view=view))["members"]]


@contextlib.contextmanager
def under_load(
    group: Bank,
    watch: Watch,
    workers: int,
    seed: int,
    membership: str = "streams",
    *,
    static: bool = False,
    standbys: int = 0,
) -> Iterator[KesRun]:
    """Supervised workers in the middle of their work; at the end all is drained, and nothing is lost or doubled."""
    supervised = supervise(group, workers, membership, static=static, standbys=standbys)
    load: Load | None = None
    try:
        wait_until(lambda: len(supervised.said("joining")) >= workers, "all workers are in the group")
        wait_until(lambda: sum(share > 0 for share in shares(group)) == workers, "each has its share")
        load = group.load(ENDLESS, KEYS, seed, PER_SECOND)
        wait_until(lambda: watch.all_since(0.0), "outputs of all partitions")
        settled = time.monotonic()
        wait_until(lambda: watch.all_since(settled), "outputs of all partitions, again")
        yield supervised
        load.stop()
        group.wait_handled()
        assert supervised.stop() == 0, supervised.log.read_text()
    except BaseException:
        print("\n".join(map(str, supervised.lines)), supervised.log.read_text(), sep="\n")
        raise
    finally:
        supervised.close()
        if load is not None:
            load.stop()
    group.must_be_exact()


@pytest.mark.parametrize(
    ("workers", "victims", "static", "standbys", "membership"),
    gate(
        [
            (2, 1, False, 0, "streams"),
            (2, 1, False, 1, "streams"),
            (2, 1, True, 0, "streams"),
            (1, 1, False, 0, "streams"),
            (1, 1, True, 0, "streams"),
            (2, 2, False, 0, "streams"),
            (2, 1, False, 0, "broker"),
        ],
        (2, 1, False, 0, "streams"),
    ),
)
@pytest.mark.slow
def test_a_killed_worker_is_not_waited_for(
    bank_group: Bank,
    watch: Watch,
    workers: int,
    victims: int,
    static: bool,
    standbys: int,
    membership: str,
    seed: int,
) -> None:
    with under_load(bank_group, watch, workers, seed, membership, static=static, standbys=standbys) as supervised:
        for number in range(victims):
            supervised.signal(number)
        killed = time.monotonic()
        wait_until(lambda: len(supervised.said("exited")) >= victims, "the supervisor sees the dead")
        # Its own partitions are silent from now on; those of the others may be for the rebalance.
        wait_until(lambda: watch.all_since(killed + 0.5), "outputs of all partitions after the kill")
        gap = max(watch.largest_gaps(killed, time.monotonic()).values())
        print(f"{membership}, {workers} workers, {victims} killed, {static=}, {standbys=}: {gap * 1000:.0f} ms at most")
        print("\n".join(map(str, supervised.said("removed"))))
        assert gap < SESSION_SECONDS, f"seed {seed}: it was waited for: {supervised.log.read_text()}"
        wait_until(lambda: len(supervised.said("joining")) >= workers + victims, "the killed are back")
