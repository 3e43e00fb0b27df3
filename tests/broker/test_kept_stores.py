"""State on disk with a real broker and real processes: killed, started again, moved. Counted is what is read again."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from streams import StateConfig
from streams.metrics import TakeOverDone
from tests.broker.battery_kit import ENDLESS, QUICK, Bank, wait_until
from tests.broker.engine_kit import Lab
from tests.broker.gate import gate, nightly
from tests.broker.test_engine_moves import Member, check, feed, share

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

PARTITIONS = 4
KINDS = ("Table", "Stores", "SimpleStore")
LOADED = r"\d+ changes from \S+/state/"


def restored(log: Path) -> int:
    """Changelog records that a process has read in its take-overs."""
    return sum(int(number) for number in re.findall(r"TakeOverDone\(.*?records=(\d+)", log.read_text()))


@pytest.mark.parametrize("engine", gate(["", "SQLite", "RocksDB"], "SQLite"))
def test_killed_it_reads_only_the_rest(bank_group: Bank, tmp_path: Path, seed: int, engine: str) -> None:
    """SIGKILL at work, then at rest; a start without the folder reads everything, one with it nearly nothing."""
    settings = {**QUICK, "BANK_FOLDER": str(tmp_path / "state"), "BANK_ENGINE": engine}
    bank_group.deposit(5_000, 400, seed)
    first = bank_group.start("member", **settings)
    bank_group.wait_handled(2_000)
    first.kill()
    second = bank_group.start("member", **settings)
    bank_group.wait_handled()
    bank_group.check_stores()
    assert second.stop() == 0, second.log.read_text()
    third = bank_group.start("member", **settings)
    bank_group.check_stores()
    assert re.search(LOADED, third.log.read_text())
    assert restored(third.log) <= PARTITIONS, "one record of each partition: the one that its folder ends with"
    third.kill()
    fourth = bank_group.start("member", **QUICK)
    bank_group.check_stores()
    assert restored(fourth.log) >= 400
    fourth.kill()
    fifth = bank_group.start("member", **settings)
    bank_group.check_stores()
    assert restored(fifth.log) <= 3 * PARTITIONS
    bank_group.deposit(500, 400, seed + 1)
    bank_group.wait_handled()
    bank_group.check_stores()
    bank_group.must_be_exact()


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["", "SQLite", "RocksDB"])
@pytest.mark.parametrize("store", KINDS)
def test_a_machine_that_is_lost_is_replaced_from_snapshots(
    bank_group: Bank, tmp_path: Path, seed: int, engine: str, store: str
) -> None:
    """SIGKILL at work, and its disk is gone: the next machine has the newest snapshots, and reads the rest."""
    settings = {**QUICK, "BANK_ENGINE": engine, "BANK_STORE": store, "BANK_SNAPSHOTS": str(tmp_path / "snapshots")}
    bank_group.deposit(5_000, 400, seed)
    first = bank_group.start("member", **settings, BANK_FOLDER=str(tmp_path / "first"))
    bank_group.wait_handled()
    place = tmp_path / "snapshots"
    wait_until(
        lambda: len({path.parent for path in place.rglob("manifest-*")}) == PARTITIONS, "each partition has a snapshot"
    )
    bank_group.deposit(1_000, 400, seed + 1)
    first.kill()
    second = bank_group.start("member", **settings, BANK_FOLDER=str(tmp_path / "second"))
    bank_group.wait_handled()
    bank_group.check_stores()
    assert len(re.findall(r"the snapshot manifest-", second.log.read_text())) == PARTITIONS
    bank_group.must_be_exact()


@pytest.mark.slow
def test_a_neighbour_adopts_the_folders_of_a_dead_member(bank_group: Bank, tmp_path: Path, seed: int) -> None:
    """Two members of one machine, and one of another. One of the two is killed: what it had goes to its neighbour,
    which reads next to nothing, and not to the other, which would read everything."""
    session = {"BANK_SESSION_SECONDS": "8"}  # longer than the time between two looks at the neighbour's folders
    here = {**session, "BANK_FOLDER": str(tmp_path / "here")}
    dead, neighbour = bank_group.start("dead", **here), bank_group.start("neighbour", **here)
    wait_until(lambda: dead.works_on() == neighbour.works_on() == 2, "they share")
    other = bank_group.start("other", **session, BANK_FOLDER=str(tmp_path / "there"))  # it has no folder of theirs
    wait_until(lambda: all(member.works_on() for member in (dead, neighbour, other)), "all three share")
    bank_group.deposit(2_000, 400, seed)
    bank_group.wait_handled()
    bank_group.check_stores()
    wait_until(lambda: (dump := dead.dump()) is not None and not dump.unwritten, "its folders have what is committed")
    dump = dead.dump()
    assert dump is not None
    orphans = {store.partition for store in dump.stores if store.role == "active"}
    assert orphans
    dead.kill()
    taken = {partition: rf"TakeOverDone\(partition={partition}, .*?records=(\d+)" for partition in orphans}
    before = {partition: neighbour.times(pattern) for partition, pattern in taken.items()}
    elsewhere = sum(other.times(pattern) for pattern in taken.values())
    wait_until(
        lambda: all(neighbour.times(pattern) > before[partition] for partition, pattern in taken.items()),
        "the neighbour has taken over",
    )
    assert sum(other.times(pattern) for pattern in taken.values()) == elsewhere
    for pattern in taken.values():
        assert int(re.findall(pattern, neighbour.log.read_text())[-1]) <= 2, "the record that the folder ends with"
    bank_group.check_stores()
    bank_group.must_be_exact()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "store"), [("", "Table"), ("SQLite", "Stores"), ("RocksDB", "SimpleStore")])
def test_a_frozen_member_holds_its_folders_and_comes_back(
    bank_group: Bank, tmp_path: Path, seed: int, engine: str, store: str
) -> None:
    """SIGSTOP with the locks held, a take-over by a member of the same machine in folders beside those, SIGCONT: the
    two share again, and each partition is in one folder that counts."""
    settings = {**QUICK, "BANK_FOLDER": str(tmp_path / "state"), "BANK_ENGINE": engine, "BANK_STORE": store}
    frozen, other = bank_group.start("frozen", **settings), bank_group.start("other", **settings)
    wait_until(lambda: frozen.works_on() == other.works_on() == 2, "they share")
    bank_group.deposit(1_000, 200, seed)
    bank_group.wait_handled()
    frozen.signal(signal.SIGSTOP)
    wait_until(lambda: other.works_on() == PARTITIONS, "the other has taken over")
    folders = {path.parent.name for path in (tmp_path / "state").rglob("lock")}
    assert len([name for name in folders if name.endswith(".1")]) >= 2, "beside those that are locked"
    bank_group.deposit(1_000, 200, seed + 1)
    bank_group.wait_handled()
    frozen.signal(signal.SIGCONT)
    wait_until(lambda: frozen.works_on() == other.works_on() == 2, "they share again")
    bank_group.deposit(500, 200, seed + 2)
    bank_group.wait_handled()
    bank_group.check_stores()
    assert frozen.stop() == other.stop() == 0
    again = bank_group.start("again", **settings)
    bank_group.check_stores()
    assert again.times(LOADED) == PARTITIONS
    assert restored(again.log) <= 3 * PARTITIONS
    marks = list((tmp_path / "state").rglob("mark"))
    assert len([path for path in marks if not path.parent.name.endswith(".aside")]) == PARTITIONS
    bank_group.must_be_exact()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("standbys", "kills", "engine", "store"),
    [
        (1, 3, "", "Table"),
        nightly(0, 12, "", "Table"),
        *(nightly(1, 12, engine, store) for engine in ("", "SQLite", "RocksDB") for store in KINDS),
    ],
)
def test_killed_at_random_beside_others_in_one_folder(
    bank_group: Bank, tmp_path: Path, standbys: int, kills: int, engine: str, store: str, seed: int
) -> None:
    """Three members of one machine, one of them killed again and again under load: whoever gets a partition takes over
    its folder, and the stores are what the changelog says."""
    settings = {**QUICK, "BANK_STANDBYS": str(standbys), "BANK_FOLDER": str(tmp_path / "state")}
    settings |= {"BANK_ENGINE": engine, "BANK_STORE": store}
    names = [f"member-{number}" for number in range(3)]
    members = {name: bank_group.start(name, **settings) for name in names}
    bank_group.check_stores(standbys)
    load = bank_group.load(ENDLESS, 500, seed, 1_500)
    bank_group.wait_handled(1)
    bank_group.strike_at_random(members, names, kills, seed, **settings)
    load.stop()
    bank_group.wait_handled(seconds=180)
    bank_group.check_stores(standbys)
    for member in members.values():
        member.kill()
    last = bank_group.start(names[0], **settings)  # all standbys are gone: what it has, it has from the folders
    bank_group.check_stores()
    assert last.times(LOADED)
    assert not bank_group.times("is set aside"), "every folder was good"
    last.signal(signal.SIGTERM)
    bank_group.must_be_exact()


@pytest.mark.asyncio
async def test_moves_between_members_with_folders(lab: Lab, tmp_path: Path) -> None:
    """To and fro; each member has a folder of its own, as on two machines. Then both are started again."""
    states = {name: StateConfig(folder=str(tmp_path / name), checkpoint_seconds=0.1) for name in ("one", "two")}
    await lab.create()
    rounds = 0
    for again in range(2):
        one = Member(lab, "one", state=states["one"], num_standbys=1)
        async with one:
            await one.until_alone()
            rounds += await feed(lab, 10)
            async with Member(lab, "two", state=states["two"], num_standbys=1) as two:
                await share(one, two, standbys=1)
                rounds += await feed(lab, 10)
                await check(lab, rounds)
            await one.until_alone()
            rounds += await feed(lab, 5)
            await check(lab, rounds)
        if again:
            read = [m.records for m in one.measured if isinstance(m, TakeOverDone)][:PARTITIONS]
            assert sum(read) <= PARTITIONS, "it was the last one: its folders are at the end"
    await lab.check_settled()
