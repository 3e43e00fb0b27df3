"""Rows of joined tables that were deleted while no member ran, and whose tombstones are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streams import PoolConfig, StateConfig, Table
from streams.disk.sqlite import SQLite
from streams.runtime.ownership.missed_deletions import MissedDeletions
from streams.stores.joined import PARTITIONERS
from streams.testing import TestDriver
from tests.unit.joins_kit import CUSTOMERS, Customer, Shop, place, rows, seen, update

DAY = 86_400.0
SMALL: dict[str, Any] = {"pool": PoolConfig(target_batch_size=1, max_batch_size=2)}
"""So that a crash behind the first transaction is one between two rows."""


ANNS = PARTITIONERS["murmur2"](b"ann", 2)
"""The partition of all but one."""


def stopped_for(driver: TestDriver[Any], seconds: float) -> None:
    """Four rows are read, then all members stop; meanwhile three are deleted, one of them is put again, one changes.
    After a day the log is compacted, and has no tombstones any more."""
    for key in ("ann", "bob", "cid", "dot"):
        driver.table(CUSTOMERS).put(key, Customer(key.title()))
    driver.settle()
    driver.crash()
    driver.table(CUSTOMERS).delete("cid", wait=False)  # leaves the first hole, and the other two are behind a record
    driver.table(CUSTOMERS).put("cid", Customer("Cid II"), wait=False)
    for key in ("ann", "bob"):
        driver.table(CUSTOMERS).delete(key, wait=False)
    driver.table(CUSTOMERS).put("dot", Customer("Dot II"), wait=False)
    driver.advance(1.0)  # by time, events come behind
    place(driver, "ann", "bob", "cid", "dot", wait=False)
    driver.advance(seconds)
    for number in range(2 if seconds > DAY else 0):
        log = driver._world.broker.log(CUSTOMERS, number)
        log.compact(log.end)
        for entry in log.entries:
            entry.gone |= entry.value is None and not entry.marker


SAID = {
    "ann": ["ann: Ann to -", "ann is -"],
    "bob": ["bob: Bob to -", "bob is -"],
    "cid": ["cid: Cid to Cid II", "cid is Cid II"],
    "dot": ["dot: Dot to Dot II", "dot is Dot II"],
}


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("engine", [None, SQLite()])
def test_rows_whose_tombstones_are_gone_are_deleted_before_any_event(
    engine: SQLite | None, crash: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by tombstones that are read: the update handler gets them, once, also where a crash comes between two."""
    settings: dict[str, Any] = {**SMALL, "state": StateConfig(folder=str(tmp_path / "s"))} if engine else SMALL
    store = Table.factory(key=str, value=int, engine=engine) if engine else None
    with TestDriver(Shop(update, store=store, options={"engine": engine}, **settings).source) as driver:
        stopped_for(driver, 2 * DAY)
        if crash:
            driver.at("commit.after", driver.crash)
        driver.restart()
        if crash:
            driver.restart()
        driver.settle()
        said = seen(driver)[4:]
        assert {key: [line for line in said if line.startswith(key)] for key in SAID} == SAID
        assert {**rows(driver, 0), **rows(driver, 1)}.keys() == {b"cid", b"dot"}
        driver.check()
    assert "rows were deleted while no member read" in caplog.text


def trimmed(driver: TestDriver[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    driver._world.broker.log(CUSTOMERS, ANNS).start = 1


def without_safeguard(driver: TestDriver[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(self: MissedDeletions, *_: object) -> None:
        pass

    monkeypatch.setattr(MissedDeletions, "look", look)


@pytest.mark.parametrize(
    ("seconds", "how", "name", "says"),
    [
        (DAY / 2, lambda *_: None, "-", ""),
        (2 * DAY, trimmed, "Ann", f"{CUSTOMERS}[{ANNS}]: the log goes on at offset 3 with records that are older"),
        (2 * DAY, without_safeguard, "Ann", ""),
    ],
)
def test_keys_are_read_only_where_tombstones_may_be_gone(
    seconds: float, how: Any, name: str, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "streams")
    with TestDriver(Shop(update).source) as driver:
        stopped_for(driver, seconds)
        how(driver, monkeypatch)
        driver.restart()
        driver.settle()
        assert f"ann is {name}" in seen(driver)
        driver.check()
    assert says in caplog.text
    assert f"{CUSTOMERS}[{ANNS}]: reads all keys" not in caplog.text
