"""Tables on an engine under a whole source between fakes: what reaches the disk; a disk that is damaged, or full."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from streams import EventContext, StateConfig
from streams.disk.sqlite import SQLiteDatabase
from streams.errors import ConfigError, DiskDamaged, StreamsError
from streams.outcomes import SKIP
from streams.runtime.keeping import intake as intake_module
from streams.runtime.keeping.on_disk import PartitionOnDisk
from tests.unit.kept_engine_kit import STORES, Kept, count, other_log
from tests.unit.runtime_kit import CHANGELOG, Bench, Slot
from tests.vocabulary import Named

pytestmark = pytest.mark.usefixtures("unflushed")

ON_DISK = STORES["table on SQLite"]
Rows = dict[bytes, bytes]


def rows(kept: Kept) -> Rows:
    """What is in the database of partition 0 now, without the checksums."""
    path = kept.partition_folder / "data-sqlite1" / "state.db"
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        found = connection.execute("SELECT key, value FROM state").fetchall()
    connection.close()
    return {key: value[:-4] for key, value in found}


def names(found: Rows) -> set[str]:
    return {key.decode() for key in found if not key.startswith(b"\xff")}


# -- what reaches the disk ---------------------------------------------------------------------------------------------


async def only_what_is_committed(kept: Kept, monkeypatch: Any) -> None:
    """K1: a transaction does not end, and the disk knows nothing of it."""
    kept.make(ON_DISK)
    await kept.bench.over("a", "b")
    await kept.until_marked()
    commits = []

    async def waits(self: Slot, requested: Any) -> None:
        commits.append(requested)
        await anyio.sleep_forever()

    monkeypatch.setattr(Slot, "commit", waits)
    kept.bench.broker.send("c", "a-")
    await kept.bench.until(lambda: commits, "a transaction is about to be committed")
    keeper = kept.keeper
    await keeper._thread.call(keeper.open_ones[0].write)
    assert names(rows(kept)) == {"a", "b"}
    await kept.bench.cancel()


async def test_only_what_is_committed_reaches_the_disk(kept: Kept, monkeypatch: Any) -> None:
    await only_what_is_committed(kept, monkeypatch)


async def test_that_is_noticed(kept: Kept, monkeypatch: Any) -> None:
    """The safeguard is out: the keeper writes what the store has."""
    checkpoint = PartitionOnDisk._checkpoint

    def writes_the_overlay(self: Any, pause: bool) -> None:
        self._gathered = dict(self.store._layers._overlay) | self._gathered
        checkpoint(self, pause)

    monkeypatch.setattr(PartitionOnDisk, "_checkpoint", writes_the_overlay)
    with pytest.raises(AssertionError):
        await only_what_is_committed(kept, monkeypatch)
    if not kept.bench.tasks[-1].done():
        await kept.bench.cancel()


async def test_data_and_mark_are_one_step(kept: Kept, monkeypatch: Any) -> None:
    """Whenever it is looked at, the database holds what the changelog says up to its mark."""
    seen: list[tuple[bytes | None, list[bytes]]] = []
    write = SQLiteDatabase.write

    def watched(self: SQLiteDatabase, changes: Any, mark: bytes | None, /) -> None:
        write(self, changes, mark)
        seen.append((self.mark(), [key for key, _ in self.scan(None, None, reverse=False, limit=100)]))

    monkeypatch.setattr(SQLiteDatabase, "write", watched)
    kept.make(ON_DISK)
    await kept.bench.over("a")
    for name in "bcde":
        kept.bench.broker.send(name)
        await kept.bench.committed()
        await kept.until_marked()
    assert len({mark for mark, _ in seen}) >= 4
    lengths = [len(keys) for _, keys in seen]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 5


async def test_timers_and_keys_are_kept_apart(kept: Kept) -> None:
    def wait(ctx: EventContext[Any], event: Named) -> None:
        ctx.store.put(event.name, 1)
        ctx.schedule_in(3_600, event, name=event.name)

    def make() -> None:
        kept.make(ON_DISK)
        config = kept.bench.source.config
        kept.bench.make(wait, store=ON_DISK, state=config.state, metrics_handler=config.metrics_handler)

    make()
    await kept.bench.over("a", "b")
    await kept.bench.stop()
    make()
    await kept.bench.start()
    worker = kept.bench.engine.workers[0]
    assert sorted(timer.name for timer in worker.timers) == ["a", "b"]
    assert dict(worker.store.items()) == {"a": 1, "b": 1}
    assert len(worker.store) == 2
    assert kept.restored == [0, 1]


async def test_a_large_restore_is_written_before_its_only_offset_record(kept: Kept, monkeypatch: Any) -> None:
    """Of a compacted changelog the last offset record is left: what comes before it is not kept in memory."""
    bench = kept.bench
    bench.make(count, store=STORES["table"])
    await bench.over(*(f"name {number}" for number in range(300)))
    await bench.stop()
    log = bench.broker.logs[CHANGELOG, 0]
    written: list[tuple[int, bytes | None]] = []
    write = SQLiteDatabase.write

    def watched(self: SQLiteDatabase, changes: Sequence[Any], mark: bytes | None, /) -> None:
        written.append((len(changes), mark))
        write(self, changes, mark)

    monkeypatch.setattr(SQLiteDatabase, "write", watched)
    kept.make(ON_DISK, checkpoint_bytes=1_000, unwritten_bytes=2_000)
    await bench.start()
    await kept.until_marked()
    assert kept.contents() == {f"name {number}": 1 for number in range(300)}
    assert len(rows(kept)) == 300 <= len(log)
    assert written


# -- a disk that is damaged --------------------------------------------------------------------------------------------


def spoil(kept: Kept) -> None:
    """Change a row behind the database's back."""
    path = kept.partition_folder / "data-sqlite1" / "state.db"
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE state SET value = zeroblob(12) WHERE key = ?", (b"a",))
    connection.close()


@pytest.mark.parametrize("blocking", [False, True], ids=["on the loop", "on a thread"])
async def test_damage_that_a_handler_meets_is_not_its_failure(kept: Kept, caplog: Any, blocking: bool) -> None:
    """No event is skipped for it: the partition begins anew, from the changelog."""
    bench = kept.bench
    kept.make(ON_DISK)
    await bench.over("a", "b", "a")
    await kept.until_marked()
    await bench.stop()
    kept.make(ON_DISK)
    config = bench.source.config
    more: dict[str, Any] = {"state": config.state, "metrics_handler": config.metrics_handler, "error_policy": SKIP}
    bench.make(count, store=ON_DISK, blocking=blocking, **more)
    await bench.start()
    spoil(kept)
    bench.broker.send("b", "a", "c")
    await bench.committed()
    assert kept.contents() == {"a": 3, "b": 2, "c": 1} == kept.from_log()
    assert "a row has a wrong checksum; it is set aside" in caplog.text
    assert kept.restored[-1] > 1, "from the changelog"
    bench.broker.send("a")
    await bench.committed()
    await kept.until_marked()
    assert names(rows(kept)) == {"a", "b", "c"}


async def test_damage_that_the_start_meets(kept: Kept, caplog: Any) -> None:
    await kept.ran("a", "b", store=ON_DISK)
    spoil(kept)
    await kept.bench.start()
    assert "is not used" in caplog.text
    assert (kept.group_folder / "0.aside" / "data-sqlite1" / "state.db").exists()
    assert kept.contents() == {"a": 1, "b": 1}


async def test_damage_that_is_met_while_indexes_are_built(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    await kept.ran("a", "b", store=STORES["Stores on SQLite"])
    scan, begun = SQLiteDatabase.scan, []

    def broken(self: SQLiteDatabase, low: Any, high: Any, /, **more: Any) -> Any:
        if low is None:  # of the table with the index; timers and the store's own entries were read before
            begun.append(self)
            if len(begun) == 1:
                raise DiskDamaged("a block is damaged")
        return scan(self, low, high, **more)

    monkeypatch.setattr(SQLiteDatabase, "scan", broken)
    await kept.bench.start()
    assert "is not used: a block is damaged; it is set aside" in caplog.text
    assert len(begun) > 1
    assert kept.contents() == {"a": 1, "b": 1}
    assert kept.restored[-1] == len(kept.bench.broker.logs[CHANGELOG, 0])


@pytest.mark.parametrize(("first", "second"), [("table", "table on SQLite"), ("table on SQLite", "table")])
async def test_another_engine_than_the_folders(kept: Kept, caplog: Any, first: str, second: str) -> None:
    await kept.ran("a", "b", store=STORES[first])
    kept.make(STORES[second])
    await kept.bench.start()
    assert "its codec is" in caplog.text
    assert "on sqlite1" in caplog.text
    assert kept.contents() == {"a": 1, "b": 1}
    assert kept.restored[-1] == len(kept.bench.broker.logs[CHANGELOG, 0])


async def test_a_log_that_was_cut_and_written_anew(kept: Kept, caplog: Any) -> None:
    bench = kept.bench
    await kept.ran("a", "b", "c", store=ON_DISK)
    other_log(kept, ["x", "y", "z", "x", "y", "z"])
    bench.make(count, store=STORES["table"])
    await bench.over()
    await bench.stop()
    kept.make(ON_DISK)
    await bench.start()
    assert "its warm copy starts over" in caplog.text
    assert kept.contents() == kept.from_log() == {"x": 2, "y": 2, "z": 2}


@pytest.mark.parametrize("lacks", ["mark", "database"])
async def test_a_part_of_the_folder_is_missing(kept: Kept, lacks: str) -> None:
    """The mark's file is a copy; a database is not."""
    await kept.ran("a", "b", store=ON_DISK)
    folder = kept.partition_folder
    lost = folder / "mark" if lacks == "mark" else folder / "data-sqlite1" / "state.db"
    lost.unlink()
    await kept.bench.start()
    assert kept.contents() == {"a": 1, "b": 1}
    assert kept.restored[-1] == (1 if lacks == "mark" else len(kept.bench.broker.logs[CHANGELOG, 0]))


async def test_a_link_in_place_of_the_database(kept: Kept, caplog: Any) -> None:
    await kept.ran("a", "b", store=ON_DISK)
    place = kept.partition_folder / "data-sqlite1"
    elsewhere = kept.folder / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    await kept.bench.start()
    assert "is a link or a file, not a folder" in caplog.text
    assert kept.contents() == {"a": 1, "b": 1}


# -- a disk that is full, or not there ---------------------------------------------------------------------------------


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_full_disk_holds_the_intake_until_there_is_room(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    bench = kept.bench
    kept.make(ON_DISK, checkpoint_bytes=300, unwritten_bytes=1_000)
    await bench.over("a")
    await kept.until_marked()
    with monkeypatch.context() as patch:
        patch.setattr(SQLiteDatabase, "write", full)
        bench.broker.send(*(f"some longer name {number}" for number in range(200)))
        await bench.until(lambda: bench.engine.pool._is_held, "the intake is held")
        # It is held as soon as so much is committed; the disk is tried by another thread, and may be later.
        await bench.until(lambda: "cannot be written to" in caplog.text, "the disk has refused")
        bench.broker.send("the last one")
    await bench.committed()
    await kept.until_marked()
    assert kept.contents() == kept.from_log()
    assert names(rows(kept)) == set(kept.from_log())
    await bench.until(lambda: not bench.engine.pool.is_full, "the intake goes on")


async def test_a_disk_that_stays_full_stops_the_source(kept: Kept, monkeypatch: Any) -> None:
    bench = kept.bench
    kept.make(ON_DISK, checkpoint_bytes=300, unwritten_bytes=1_000)
    await bench.over("a")
    await kept.until_marked()
    monkeypatch.setattr(intake_module, "HOLD_SECONDS", 0.1)
    monkeypatch.setattr(SQLiteDatabase, "write", full)
    bench.broker.send(*(f"some longer name {number}" for number in range(200)))
    with pytest.raises(StreamsError, match=r"state/group-g/topic-in/0: \d+ bytes wait to be written.*bytes are free"):
        await bench.tasks[-1]
    monkeypatch.undo()
    await bench.start()
    await bench.committed()
    assert kept.contents() == kept.from_log()


async def test_a_write_that_fails_for_good_begins_anew(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    bench = kept.bench
    kept.make(ON_DISK)
    await bench.over("a")
    await kept.until_marked()
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        patch.setattr(SQLiteDatabase, "_set_mark", broken)
        bench.broker.send("b")
        await bench.until(lambda: "is set aside" in caplog.text, "the folder is given up")
    await bench.until_active()
    bench.broker.send("a")
    await bench.committed()
    await kept.until_marked()
    assert kept.contents() == {"a": 2, "b": 1} == kept.from_log()


@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_without_a_folder_the_start_is_refused(bench: Bench, is_wrapped: bool) -> None:
    bench.make(count, store=(lambda where: ON_DISK(where)) if is_wrapped else ON_DISK)
    with pytest.raises(ConfigError, match=r"engine=SQLite\(\) keeps state on disk: set StateConfig.folder"):
        await bench.run()


async def test_a_folder_that_cannot_be_used_stops_the_source(kept: Kept) -> None:
    """Its state does not fit into memory."""
    await kept.ran("a", "b", store=ON_DISK)
    kept.partition_folder.chmod(0o777)
    with pytest.raises(
        StreamsError, match=r"changelog\[0\]: its state is on disk, and StateConfig.folder cannot be used"
    ):
        await kept.bench.run()


def test_the_memory_of_all_tables_is_bounded() -> None:
    with pytest.raises(ConfigError, match="memory_bytes"):
        StateConfig(memory_bytes=1)


async def test_a_log_that_goes_back_under_a_database_starts_it_over(kept: Kept, caplog: Any) -> None:
    """The end of the log is lost while the partition is worked on. What is in the database is more than the log has."""
    bench = kept.bench
    kept.make(STORES["table on SQLite"])
    await bench.over("a")
    end = len(bench.broker.logs[CHANGELOG, 0])
    for name in ("b", "c"):
        bench.broker.send(name)
        await bench.committed()
    await kept.until_marked()
    del bench.broker.logs[CHANGELOG, 0][end:]
    bench.broker.send("d")
    await bench.committed()
    await bench.until(lambda: len(kept.restored) == 2, "the partition begins anew")
    await bench.until_active()
    assert "it lost its end" in caplog.text
    assert kept.contents() == kept.from_log() == {"a": 1, "d": 1}
