"""Snapshots under a whole engine between fakes: when they are made, and what a store in trouble costs."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams import StateConfig
from streams.core.checkpoints import FolderMark
from streams.errors import ConfigError
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders.entries import Damaged
from streams.runtime.keeping.snapshots import snapshotting
from streams.runtime.keeping.snapshots.bundles import SnapshotStore
from tests.unit.kept_engine_kit import STORES, count, other_log
from tests.unit.runtime_kit import CHANGELOG, Bench
from tests.unit.snapshots_kit import Backed
from tests.unit.waiting import until


@pytest.fixture
def kept(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backed:
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)
    monkeypatch.setattr(snapshotting, "PATIENCE", 1.0)
    return Backed(bench, tmp_path)


async def test_only_what_is_new_is_written_and_so_many_are_kept(kept: Backed) -> None:
    kept.make(snapshots_kept=2)
    await kept.bench.start()
    for number in range(5):
        kept.bench.broker.send(f"name {number}")
        await kept.bench.committed()
        await kept.until_marked()
        await kept.until_saved()
    await kept.bench.until(lambda: len(kept.manifests) == 2, "older ones are removed")
    there = {path.name for path in (kept.place / "blocks").iterdir()}
    assert {block.name for block in kept.newest().blocks} <= there
    assert len(there) == 5, "blocks of an hour ago and less stay: they may be of a snapshot that is being made"


async def test_one_maker_is_enough(kept: Backed) -> None:
    """Another member has made a snapshot a moment ago."""
    await kept.with_a_snapshot()
    before = kept.manifests
    kept.make(snapshot_seconds=60.0)
    await kept.bench.over("x", "y")
    await kept.until_marked()
    keeper = kept.keeper
    await until(lambda: keeper.open_ones[0].snapshot_at_ms > 0, "it has seen that")
    assert kept.manifests == before


async def test_an_owner_waits_for_a_standby_to_make_it(kept: Backed, monkeypatch: Any) -> None:
    kept.make()
    await kept.bench.over("a")
    await kept.until_saved()
    monkeypatch.setattr(snapshotting, "PATIENCE", 1_000_000.0)
    kept.bench.broker.send("b")
    await kept.bench.committed()
    await kept.until_marked()
    keeper = kept.keeper
    snapshots = keeper.snapshots
    assert snapshots is not None
    snapshots._next.clear()
    await until(lambda: snapshots._next.get(0, 0.0) > keeper.now() + 1_000, "the owner leaves it to others")
    before = kept.manifests
    monkeypatch.setattr(kept.bench.engine.partitions, "kept", lambda partition: None)  # as of a copy
    snapshots._next.clear()
    await kept.until_saved()
    assert len(kept.manifests) > len(before) or kept.manifests[0] != before[0]


class Checks(dict[int, float]):
    """When to look at a partition next: now, each time; and how often that was."""

    count = 0

    def get(self, *_: object) -> float:
        self.count += 1
        return 0.0


async def test_a_copy_that_is_being_restored_makes_none(kept: Backed, monkeypatch: Any) -> None:
    kept.make()
    await kept.bench.over("a")
    await kept.until_saved()
    keeper = kept.keeper
    snapshots, (partition,) = keeper.snapshots, keeper.open_ones
    assert snapshots is not None
    assert partition.is_ready, "it was read up to the end before the work began"
    monkeypatch.setattr(kept.bench.engine.partitions, "kept", lambda partition: None)  # as of a copy
    partition.is_ready = False
    saved: list[object] = []

    def save(*args: object) -> float:
        saved.append(args)
        return 0.0

    monkeypatch.setattr(snapshots, "_save_on_thread", save)
    checks = Checks()
    monkeypatch.setattr(snapshots, "_next", checks)
    await until(lambda: checks.count > 3, "it has looked several times")
    assert not saved
    partition.is_ready = True
    await until(lambda: saved, "it is saved when it is ready")


async def test_an_older_state_is_not_saved_again(kept: Backed) -> None:
    kept.make(snapshot_seconds=0.05)
    await kept.bench.over("a", "b")
    await kept.until_marked()
    await kept.until_saved()
    keeper = kept.keeper
    snapshots, (partition,) = keeper.snapshots, keeper.open_ones
    assert snapshots is not None
    mark = partition.folder.mark
    assert mark is not None
    partition.folder.mark = msgspec.structs.replace(mark, offset=mark.offset - 1)
    before = kept.manifests
    snapshots._save_on_thread(partition, 0.0)
    assert kept.manifests == before


@pytest.mark.parametrize("seconds", [0.05, 3_600.0], ids=["when it is due", "although one was made a moment ago"])
async def test_after_the_log_was_cut_a_snapshot_is_made_at_once(kept: Backed, monkeypatch: Any, seconds: float) -> None:
    """The one that is there goes farther than the log, so it can never be used again."""
    monkeypatch.setattr(snapshotting, "CHECK_SECONDS", 0.02)
    await kept.with_a_snapshot()
    (old, *_) = kept.manifests
    other_log(kept, ["x"])
    kept.make(snapshot_seconds=seconds)
    await kept.bench.over()
    await kept.bench.until(lambda: old not in kept.manifests, "the new one is there, and the old one gone")
    assert kept.newest().mark.offset == len(kept.bench.broker.logs[CHANGELOG, 0]) - 1
    await kept.bench.stop()
    shutil.rmtree(kept.folder)
    kept.restored.clear()
    await kept.bench.start()
    assert kept.restored == [1]
    assert kept.contents() == kept.from_log() == {"x": 1}


@pytest.mark.parametrize(
    ("error", "file", "tries"),
    [
        (Damaged("cut"), "data-1", 1),  # the mark alone is new: the folder is damaged
        (Damaged("cut"), "data-{}", 3),  # it is rewritten again and again
        (FileNotFoundError("gone"), "data-{}", 1),  # by the store
    ],
    ids=["mark", "file", "store"],
)
async def test_a_save_is_tried_again_only_for_a_file_that_was_rewritten(
    kept: Backed, monkeypatch: Any, error: Exception, file: str, tries: int
) -> None:
    kept.make(snapshot_seconds=900.0)
    await kept.bench.over("a")
    await kept.until_marked()
    keeper = kept.keeper
    snapshots, (partition,) = keeper.snapshots, keeper.open_ones
    assert snapshots is not None
    tried: list[str] = []
    here = threading.current_thread()

    def save(_: object, mark: FolderMark, pieces: object) -> None:
        if threading.current_thread() is not here:  # the source's own snapshot
            raise error
        tried.append(mark.file)
        assert len(tried) < 10
        partition.folder.mark = msgspec.structs.replace(mark, offset=mark.offset + 1, file=file.format(len(tried) + 1))
        raise error

    monkeypatch.setattr(SnapshotStore, "save", save)
    monkeypatch.setattr(SnapshotStore, "has", lambda *_: False)  # it may have made one before
    with pytest.raises(type(error)):
        snapshots._save_on_thread(partition, 0.0)
    assert len(tried) == tries


async def test_a_store_that_fails_is_named_once_and_stops_nobody(kept: Backed, caplog: Any) -> None:
    kept.root.write_text("a file")
    kept.make()
    await kept.bench.over("a")
    await kept.until_marked()
    await kept.bench.until(lambda: "no snapshot can be made" in caplog.text, "it is logged")
    kept.bench.broker.send("b")
    await kept.bench.committed()
    assert kept.contents() == {"a": 1, "b": 1}
    assert "snapshots cannot be used" in caplog.text
    assert caplog.text.count("no snapshot can be made") == 1


async def test_starts_wait_once_for_a_store_that_hangs(kept: Backed, monkeypatch: Any, caplog: Any) -> None:
    """Three partitions: one has its folder, and of the others only the first waits for the store's time-out."""
    state = StateConfig(folder=str(kept.folder), checkpoint_seconds=0.02, snapshots=str(kept.root))
    kept.bench.make(count, store=STORES["table"], partitions=3, state=state)
    await kept.bench.start("a")
    await kept.bench.committed()
    await kept.until_marked()
    await kept.bench.stop()
    tried: list[int] = []
    goes_on = threading.Event()

    def hangs(_: object, place: str, *more: object, **others: object) -> None:
        tried.append(int(place.rpartition("/")[2]))
        goes_on.wait(10)
        raise TimeoutError("the store of snapshots has not answered (list) for 60 s")

    monkeypatch.setattr(SnapshotStore, "manifests", hangs)
    caplog.set_level(logging.WARNING)
    kept.bench.run()
    try:
        await until(lambda: tried, "the store is needed")
        keeper = kept.keeper
        await until(lambda: keeper.open_ones, "the folder that is there is opened meanwhile")
        assert [one.partition for one in keeper.open_ones] == [0]
    finally:
        goes_on.set()
    await kept.bench.until_active()
    assert len(tried) == 1
    assert caplog.text.count("also of the partitions that start within 60 s") == 1


async def test_without_the_package_of_the_store_there_is_no_start(kept: Backed, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    kept.make(snapshots="s3://bucket/x")
    with pytest.raises(ConfigError, match=r"pip install 'kafka-event-source\[snapshots\]'"):
        await kept.bench.run()
    kept.bench.tasks.clear()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"snapshots": "s3://key:pass@bucket/x"}, "has credentials in it"),
        ({"snapshots": "s3://bucket/x?secret_key=pass"}, "has credentials in it"),
        ({"snapshots": "ftp://host/x"}, "begins with file:, s3:"),
        ({"snapshots": "x", "folder": ""}, r"set StateConfig.folder"),
        ({"snapshots_kept": 1}, "must be 2 or more"),
        ({"snapshot_seconds": 0}, "must be more than 0"),
        ({"snapshot_secret_file": "/nowhere/at/all"}, "cannot be read"),
    ],
)
async def test_settings_that_cannot_be(kept: Backed, settings: dict[str, Any], reason: str) -> None:
    async def begin() -> None:
        kept.make(**settings)
        await kept.bench.run()

    with pytest.raises(ConfigError, match=reason) as caught:
        await begin()
    assert "=pass" not in str(caught.value)
    assert ":pass" not in str(caught.value)
    kept.bench.tasks.clear()
