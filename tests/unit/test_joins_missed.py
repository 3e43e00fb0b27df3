"""Rows of joined tables that were deleted while no member ran, and whose tombstones are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streams import PoolConfig, StateConfig, Table
from streams.disk.sqlite import SQLite
from streams.errors import BrokerUnavailable
from streams.runtime.ownership.missed_deletions import MissedDeletions
from streams.runtime.partition.worker import PartitionWorker
from streams.stores.joined import PARTITIONERS
from streams.testing import TestDriver
from streams.testing.driver_base import Unsettled
from streams.testing.simulation.broker import LogEntry
from tests.unit.joins_kit import CUSTOMERS, Customer, Shop, place, rows, seen, update

DAY = 86_400.0
ANNS = PARTITIONERS["murmur2"](b"ann", 2)
"""The partition of all but one."""
GONE = (
    f"{CUSTOMERS}[{ANNS}]: 2 rows were deleted while no member read, and their tombstones are gone, or may be before "
    "they are read (delete.retention.ms 86400000). They are "
)


def compacted(driver: TestDriver[Any], *, tombstones: bool) -> None:
    for number in range(2):
        log = driver._world.broker.log(CUSTOMERS, number)
        log.compact(log.end)
        for entry in log.entries:
            entry.gone |= not tombstones and entry.value is None and not entry.marker


def stopped_for(driver: TestDriver[Any], seconds: float, *, tombstones: bool = False) -> None:
    """Four rows are read, then all members stop; meanwhile three are deleted, one of them is put again, one changes;
    after that time the log is compacted."""
    for key in ("ann", "bob", "cid", "dot"):
        driver.table(CUSTOMERS).put(key, Customer(key.title()))
    driver.settle()
    driver.crash()
    for key in ("ann", "bob", "cid"):
        driver.table(CUSTOMERS).delete(key, wait=False)
    driver.table(CUSTOMERS).put("cid", Customer("Cid II"), wait=False)
    driver.table(CUSTOMERS).put("dot", Customer("Dot II"), wait=False)
    driver.advance(1.0)  # by time, events come behind
    place(driver, "ann", "bob", "cid", "dot", wait=False)
    driver.advance(seconds)
    compacted(driver, tombstones=tombstones)


@pytest.mark.parametrize("fault", ["", "crash", "abort", "join", "leave"])
@pytest.mark.parametrize("engine", [None, SQLite()])
def test_rows_whose_tombstones_are_gone_are_deleted_before_any_event(
    engine: SQLite | None, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a fault, or a move, comes with the first transaction."""
    settings: dict[str, Any] = {"state": StateConfig(folder=str(tmp_path / "s"))} if engine else {}
    settings |= {"pool": PoolConfig(target_batch_size=1, max_batch_size=2), "num_standbys": 1}
    store = Table.factory(key=str, value=int, engine=engine) if engine else None
    with TestDriver(Shop(store=store, options={"engine": engine}, **settings).source) as driver:
        stopped_for(driver, 2 * DAY)
        if fault in ("crash", "abort"):
            driver.at("commit.before" if fault == "abort" else "commit.after", getattr(driver, fault))
        elif fault:
            driver.at("commit.after", lambda _: driver.join())
        driver.restart()
        if fault == "crash":
            driver.restart()
        elif fault == "leave":
            driver.leave(0)
        driver.settle()
        assert sorted(seen(driver)) == ["ann is -", "bob is -", "cid is Cid II", "dot is Dot II"]
        assert {**rows(driver, 0), **rows(driver, 1)}.keys() == {b"cid", b"dot"}
        driver.check()
    assert f"{GONE}deleted now: b'ann', b'bob'\n" in caplog.text


def test_it_is_the_tables_own_setting_that_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where that is an hour or less, too."""
    monkeypatch.setattr(MissedDeletions, "_ask_life_ms", lambda self, topic: 600_000)
    with TestDriver(Shop().source) as driver:
        stopped_for(driver, 1_200.0)
        driver.restart()
        driver.settle()
        assert {**rows(driver, 0), **rows(driver, 1)}.keys() == {b"cid", b"dot"}
    assert "(delete.retention.ms 600000). They are deleted now: b'ann', b'bob'" in caplog.text


def test_with_an_update_handler_they_are_named_and_kept_until_tombstones_are_sent_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with TestDriver(Shop(update).source) as driver:
        stopped_for(driver, 2 * DAY)
        driver.restart()
        driver.settle()
        assert f"{GONE}kept, since the update handler of the table could not be called" in caplog.text
        assert f"{CUSTOMERS}[{ANNS}]: send a tombstone for b'ann', b'bob'\n" in caplog.text
        for key in ("ann", "bob"):
            driver.table(CUSTOMERS).delete(key)
        place(driver, "ann")
        said = seen(driver)
        assert said[said.index("ann is Ann") :][-3:] == ["ann: Ann to -", "bob: Bob to -", "ann is -"]
        driver.check()


def test_a_tombstone_that_goes_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cleaner may come between the reading of the keys and that of the records."""
    found = MissedDeletions._find

    async def find(self: MissedDeletions, *arguments: Any) -> set[bytes]:
        missed = await found(self, *arguments)
        compacted(driver, tombstones=False)
        return missed

    monkeypatch.setattr(MissedDeletions, "_find", find)
    with TestDriver(Shop().source) as driver:
        stopped_for(driver, 2 * DAY, tombstones=True)
        driver.restart()
        driver.settle()
        assert {**rows(driver, 0), **rows(driver, 1)}.keys() == {b"cid", b"dot"}


def test_without_an_answer_about_one_partition_the_others_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, failed = MissedDeletions._find, list[str]()

    async def find(self: MissedDeletions, worker: PartitionWorker, where: Any, *arguments: Any) -> set[bytes]:
        if where.partition == ANNS and (len(failed) < 2 or not any("dot" in line for line in seen(driver))):
            failed.append("no answer")
            raise BrokerUnavailable(failed[-1])
        return await found(self, worker, where, *arguments)

    monkeypatch.setattr(MissedDeletions, "_find", find)
    with TestDriver(Shop().source) as driver:
        stopped_for(driver, 2 * DAY)
        driver.restart()
        driver.settle()
        assert {**rows(driver, 0), **rows(driver, 1)}.keys() == {b"cid", b"dot"}
        driver.check()
    assert "waits for the broker: no answer" in caplog.text


def test_a_tombstone_that_is_young_waits_for_its_place() -> None:
    """The position is at the marker of a transaction, since which nothing was written for long."""
    with TestDriver(Shop().source) as driver:
        broker = driver._world.broker
        epoch = broker.init("feeder", 600.0)
        assert epoch is not None
        broker.produce("feeder", epoch, CUSTOMERS, ANNS, LogEntry(b"ann", b'{"name":"Ann"}', None, None))
        broker.end("feeder", epoch, True)
        driver.settle()
        driver.crash()
        driver.advance(2 * DAY)
        place(driver, "ann", wait=False)
        driver.advance(1.0)
        driver.table(CUSTOMERS).delete("ann", wait=False)
        driver.table(CUSTOMERS).put("bob", Customer("Bob"), wait=False)
        driver.restart()
        driver.settle()
        assert seen(driver) == ["ann is Ann"]
        driver.check()


def trimmed(driver: TestDriver[Any]) -> None:
    driver._world.broker.log(CUSTOMERS, ANNS).start = 1


def test_an_open_transaction_in_the_table_holds_up_no_start() -> None:
    """What is behind the last stable offset is read later."""
    with TestDriver(Shop().source) as driver:
        stopped_for(driver, 2 * DAY)
        broker = driver._world.broker
        epoch = broker.init("feeder", 600.0)
        assert epoch is not None
        broker.produce("feeder", epoch, CUSTOMERS, ANNS, LogEntry(b"ann", b'{"name":"Anna"}', None, None))
        with pytest.raises(Unsettled, match="feeder"):
            driver.restart()
        assert sorted(seen(driver)) == ["ann is -", "bob is -", "cid is Cid II", "dot is Dot II"]
        broker.end("feeder", epoch, True)
        driver.advance(5)
        place(driver, "ann")
        assert seen(driver)[-1] == "ann is Anna"
        driver.check()


@pytest.mark.parametrize(
    ("seconds", "how", "name", "says"),
    [
        (DAY / 2, None, "-", ""),
        (2 * DAY, trimmed, "Ann", f"{CUSTOMERS}[{ANNS}]: the log goes on at offset 3 with records that are older"),
    ],
)
def test_keys_are_read_only_where_tombstones_may_be_gone(
    seconds: float, how: Any, name: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "streams")
    with TestDriver(Shop().source) as driver:
        stopped_for(driver, seconds, tombstones=seconds < DAY)
        if how is not None:
            how(driver)
        driver.restart()
        driver.settle()
        assert f"ann is {name}" in seen(driver)
        driver.check()
    assert says in caplog.text
    assert f"{CUSTOMERS}[{ANNS}]: reads all keys" not in caplog.text
