"""Ids of events that are handled once: restored from wherever they were kept, and what is kept beside them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from streams import SKIP, EventContext, EventSource, EventSourceConfig, Table
from streams.core.seen import digest_of, encode
from streams.disk import SQLite
from streams.errors import OffsetError
from streams.runtime.changelog import SEEN_PREFIX
from streams.runtime.ownership.replica import Replica
from streams.runtime.partition.seen_ids import keep_reply
from streams.settings import Once, StateConfig
from streams.testing import TestDriver
from tests.unit.once_kit import WEEK, ids, numbers, once
from tests.unit.parking_kit import Add, add

pytestmark = pytest.mark.usefixtures("quiet")


# -- D8: kept ----------------------------------------------------------------------------------------------------------

KEPT = {
    "changelog": None,
    "folder": StateConfig(folder="state", checkpoint_seconds=1.0),
    "database": StateConfig(folder="state", checkpoint_seconds=1.0),
    "on disk": StateConfig(folder="state", checkpoint_seconds=1.0),
    "snapshot": StateConfig(folder="state", checkpoint_seconds=1.0, snapshots="snapshots", snapshot_seconds=2.0),
}


@pytest.mark.parametrize("kind", KEPT)
def test_ids_are_restored_from_wherever_they_were_kept(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = KEPT[kind]
    bank = once(**({} if state is None else {"state": state}))
    bank.engine = SQLite() if kind in ("database", "on disk") else None
    bank.once = Once("number", within=WEEK, engine=SQLite() if kind == "on disk" else None)
    with bank.driver(state_folder=str(tmp_path)) as driver:
        add(driver, *range(101, 400))
        driver.advance(20)
        driver.leave()
        if kind == "snapshot":
            shutil.rmtree(tmp_path / "state")
        if kind != "changelog":  # what it held before the mark is read from there, or nowhere
            receive = Replica.receive

            def without(self: Replica, records: Any, *more: Any) -> Any:
                assert not any((record.key or b"").startswith(SEEN_PREFIX) for record in records), kind
                return receive(self, records, *more)

            monkeypatch.setattr(Replica, "receive", without)
        driver.restart()
        add(driver, *range(101, 401))
        assert numbers(driver) == tuple(range(101, 401))
        driver.check()


def test_a_folder_that_lacks_the_ids_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an older release has the state without them: these events would be handled again."""
    from streams.runtime.keeping import keeper

    bank = once(state=StateConfig(folder="state", checkpoint_seconds=1.0))
    monkeypatch.setattr(keeper, "KEEPS", ())
    with bank.driver(state_folder=str(tmp_path)) as driver:
        add(driver, 1, 2)
        driver.advance(10)
        driver.leave()
        monkeypatch.undo()
        read: list[bytes] = []
        receive = Replica.receive

        def noted(self: Replica, records: Any, *more: Any) -> Any:
            read.extend(record.key for record in records)
            return receive(self, records, *more)

        monkeypatch.setattr(Replica, "receive", noted)
        driver.restart()
        add(driver, 1, 3)
        assert numbers(driver) == (1, 2, 3)
        assert sum(key.startswith(SEEN_PREFIX) for key in read) == 2, "the changelog is read from its start"
        driver.check()


def test_code_without_once_leaves_the_ids_and_records_none() -> None:
    bank = once()
    with bank.driver() as driver:
        add(driver, 1, 2)
        bank.once = None
        driver.leave()
        driver.restart()
        add(driver, 2, 3)
        bank.once = Once("number", within=WEEK)
        driver.leave()
        driver.restart()
        add(driver, 1, 2, 3)
        assert numbers(driver) == (1, 2, 2, 3, 3)
        driver.check()


@pytest.mark.parametrize(
    ("key", "value"), [(b"short", encode(9)), (b"x" * 17, encode(9)), (b"x" * 16, b"abc")], ids=["short", "long", "cut"]
)
def test_spoilt_records_are_an_error_that_names_them(key: bytes, value: bytes) -> None:
    from streams.records import Change
    from streams.runtime.partition.seen_ids import SeenIds
    from streams.settings.once import OnceBounds

    with pytest.raises(OffsetError, match="a record of an id"):
        SeenIds(OnceBounds(9)).receive(Change(SEEN_PREFIX + key, value))
    SeenIds().receive(Change(SEEN_PREFIX + key, value))  # a source without ``once=`` leaves it there


# -- what is kept beside an id -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [None, SQLite()])
@pytest.mark.parametrize("blocking", [False, True])
def test_bytes_beside_an_id_are_part_of_its_event(tmp_path: Path, engine: Any, blocking: bool) -> None:
    broken = {2}

    def made() -> EventSource[Table[str, int]]:
        state = StateConfig(folder="state", checkpoint_seconds=1.0) if engine is not None else StateConfig()
        config = EventSourceConfig(group_id="g", topic="adds", num_partitions=1, state=state, error_policy=SKIP)
        source = EventSource(config, store=Table.factory(key=str, value=int, engine=engine))

        @source.on(once=Once("number", within=WEEK, engine=engine), blocking=blocking)
        def on_add(ctx: EventContext[Table[str, int]], event: Add) -> None:
            ctx.store.put(event.key, event.number)
            keep_reply(ctx, b"first")
            if event.number in broken:
                raise RuntimeError("no")
            if event.number != 3:
                keep_reply(ctx, b"answer %d" % event.number)

        return source

    with TestDriver(made, state_folder=str(tmp_path)) as driver:
        add(driver, 1, 2, 3, 1)
        seen = driver.seen("Add")
        assert [seen.kept(number) for number in (1, 2, 3)] == [b"answer 1", None, b"first"]
        assert ids(driver)[SEEN_PREFIX + digest_of("Add", 1)][4:] == b"answer 1"
        driver.crash()
        driver.restart()
        driver.settle()
        assert driver.seen("Add").kept(1) == b"answer 1"
        driver.check()
