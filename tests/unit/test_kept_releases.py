"""State on disk of several kinds of stores: over releases, jumping clocks, scans held open, too few open files."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from streams.disk import RocksDB, SQLite
from streams.disk.sqlite import SQLiteDatabase
from streams.errors import StoreError, StreamsError
from streams.runtime.engine import Engine
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.on_disk import DatabaseFolder
from streams.sak import open_files
from streams.sak.open_files import LEFT_FREE
from streams.stores import NamedTable
from tests.unit.kept_engine_kit import BY_COUNT, STORES, Counts, Kept
from tests.unit.runtime_kit import CHANGELOG

pytestmark = pytest.mark.usefixtures("unflushed")

DAY_MS = 86_400_000
TABLES = ("table", "table on SQLite", pytest.param("table on RocksDB", marks=pytest.mark.nightly))


class Unindexed(Counts):
    """A release without the index and without expiry."""

    counts = NamedTable.of(str, int, bare=True)

    def items(self) -> Any:
        return list(self.counts.items())


class Expiring(Counts):
    """A release with both."""

    counts = NamedTable.of(str, int, bare=True, index=BY_COUNT, expires=3_600)


@pytest.mark.parametrize(
    "engine",
    [SQLite(), *(pytest.param(engine, marks=pytest.mark.nightly) for engine in (None, RocksDB()))],
    ids=["SQLite", "files", "RocksDB"],
)
async def test_index_and_expiry_are_switched_on_off_and_on_over_filled_state(kept: Kept, engine: Any) -> None:
    """Without a wipe. What the release without an index changes is in the index of the next one."""
    bench, expected = kept.bench, {"a": 0, "b": 0}
    for release in (Counts, Unindexed, Expiring, Unindexed, Expiring, Counts):
        kept.make(release.factory(engine=engine))
        await bench.over("a", "a", "b", "gone", "gone-")
        expected = {"a": expected["a"] + 2, "b": expected["b"] + 1}
        await kept.until_marked()
        assert dict(kept.contents()) == expected, release
        store = bench.engine.workers[0].store
        if release is not Unindexed:
            assert [key for key, _ in store.counts.by("count", expected["a"])] == ["a"]
        await bench.stop()
        assert kept.restored[-1] <= 1, "it goes on from its folder"


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("jump_ms", [DAY_MS, -DAY_MS], ids=["ahead", "back"])
async def test_a_clock_that_jumps_by_a_day(kept: Kept, caplog: Any, monkeypatch: Any, kind: str, jump_ms: int) -> None:
    """While it runs, and back before the next start: the age of the folder is not known, so the changelog is read."""
    bench, real, jumped = kept.bench, Engine.wall_ms, [0]
    monkeypatch.setattr(Engine, "wall_ms", lambda self: real(self) + jumped[0])
    kept.make(STORES[kind])
    await bench.over("a", "b")
    await kept.until_marked()
    jumped[0] = jump_ms
    bench.broker.send("a", "b-", "c")
    await bench.committed()
    await kept.until_marked()
    await bench.stop()
    jumped[0] = 0
    await bench.start()
    assert ("a clock was set" if jump_ms > 0 else "the changelog keeps tombstones") in caplog.text
    assert kept.contents() == kept.from_log() == {"a": 2, "c": 1}
    assert kept.restored[-1] == len(bench.broker.logs[CHANGELOG, 0])


@pytest.mark.parametrize("kind", TABLES)
async def test_a_scan_that_is_held_open_over_a_move(kept: Kept, kind: str) -> None:
    """It ends by an error, and holds no folder."""
    bench = kept.bench
    kept.make(STORES[kind])
    await bench.over(*(f"name {number}" for number in range(300)))
    scan = iter(bench.engine.workers[0].store.items())
    next(scan)
    await bench.stop()
    with pytest.raises(StoreError):
        list(scan)
    await bench.start()
    assert len(kept.contents()) == 300
    assert [path.name for path in kept.group_folder.iterdir() if path.is_dir()] == ["0"]


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC], ids=["open files", "room"])
async def test_a_process_that_lacks_open_files_or_room_leaves_its_folders_as_they_are(
    kept: Kept, caplog: Any, monkeypatch: Any, kind: str, code: int
) -> None:
    """It says nothing of the folder. In memory the source goes on without; a table on an engine cannot."""
    await kept.ran("a", "b", store=STORES[kind])

    def check(*_: Any, **__: Any) -> bool:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        for owner in (StateFolder, DatabaseFolder):
            patch.setattr(owner, "check", check)
        if kind == "table":
            await kept.bench.start()
            assert kept.contents() == {"a": 1, "b": 1}
            await kept.bench.stop()
        else:
            with pytest.raises(StreamsError, match="its state is on disk"):
                await kept.bench.run()
    assert "cannot be read, and stays as it is" in caplog.text
    assert not list(kept.folder.rglob("*.aside"))
    await kept.bench.start()
    assert kept.contents() == {"a": 1, "b": 1}
    assert kept.restored[-1] == 1, "it goes on from its folder"


@pytest.mark.parametrize("kind", TABLES)
async def test_a_folder_is_opened_only_if_files_are_left_for_the_rest(
    kept: Kept, caplog: Any, monkeypatch: Any, kind: str
) -> None:
    """Connections and checkpoints need files, too. The message says which limit to raise. Below what is left free
    nothing may be opened, however many files this process has open while it is asked."""
    few = LEFT_FREE - 1
    kept.make(STORES[kind])
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (few, few))
        if kind == "table":
            await kept.bench.over("a", "b")
            assert kept.contents() == {"a": 1, "b": 1}
            await kept.bench.stop()
            assert f"is not kept on disk: [Errno {errno.EMFILE}]" in caplog.text
            assert f"the process may open {few} (ulimit -n)" in caplog.text
        else:
            with pytest.raises(StreamsError, match=rf"state is on disk.* may open {few} \(ulimit -n\): raise"):
                await kept.bench.run()
    await kept.bench.over("c")
    assert kept.contents()["c"] == 1
    await kept.until_marked()


@pytest.mark.parametrize(("limit", "is_refused"), [(9 + LEFT_FREE, False), (8 + LEFT_FREE, True), (-1, False)])
def test_how_many_files_are_left_free(monkeypatch: Any, limit: int, is_refused: bool) -> None:
    limit = resource.RLIM_INFINITY if limit < 0 else limit
    monkeypatch.setattr(open_files, "os", SimpleNamespace(listdir=lambda _: ["a file"] * 9))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with (
        pytest.raises(OSError, match=f"9 files are open, and {LEFT_FREE} are left free")
        if is_refused
        else nullcontext()
    ):
        open_files.refuse_if_few_are_free()


async def test_a_read_that_lacks_open_files_costs_neither_the_event_nor_the_folder(
    kept: Kept, caplog: Any, monkeypatch: Any
) -> None:
    """The database is opened again, which frees what it had open, and the event is handled again."""
    bench, real, lacks = kept.bench, SQLiteDatabase.get, [True]
    kept.make(STORES["table on SQLite"])
    await bench.over("a", "b")
    await kept.until_marked()
    await bench.stop()

    def get(self: SQLiteDatabase, key: bytes, /) -> bytes | None:
        if key == b"a" and lacks.pop():
            lacks.append(False)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self, key)

    monkeypatch.setattr(SQLiteDatabase, "get", get)
    await bench.start()
    bench.broker.send("b", "a", "c")
    await bench.committed()
    assert kept.contents() == {"a": 2, "b": 2, "c": 1} == kept.from_log()
    assert "cannot be read now ([Errno 24] Too many open files; the process may open" in caplog.text
    assert not list(kept.folder.rglob("*.aside"))
    assert kept.restored[-1] <= 3, "it goes on from its folder"
