"""State on disk under a whole engine between fakes: what survives, what is not believed, and who waits for whom."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streams import Table
from streams.errors import ConfigError
from streams.model.topics import TopicIdentity
from streams.runtime.engine import Engine
from streams.runtime.keeping import keeper as keeper_module
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders.folder import StateFolder
from tests.unit.kept_engine_kit import STORES, Kept, count, other_log, stays_full
from tests.unit.runtime_kit import CHANGELOG, Bench, Group

pytestmark = pytest.mark.usefixtures("unflushed")

Scenario = Callable[[Bench, Path], Any]


# -- what survives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_every_store_survives(kept: Kept, kind: str, end: str) -> None:
    bench = kept.bench
    kept.make(STORES[kind])
    await bench.over("a", "b", "a", "c")
    if end == "stop":
        before = kept.contents()
        await bench.stop()
    else:
        await kept.until_marked()
        before = kept.contents()
        await bench.cancel()
    await bench.start()
    assert kept.contents() == before
    assert kept.restored == [0, 1], "of the changelog only the record that the folder ends with is read"
    bench.broker.send("a")
    await bench.committed()
    assert kept.contents() != before or kind.startswith("SimpleStore")


async def test_only_the_rest_of_the_changelog_is_read(kept: Kept) -> None:
    bench = kept.bench
    await kept.ran("a", "b", "b-")
    bench.make(count, store=STORES["table"])  # without a folder, on another machine
    await bench.over("c", "a", "d", "a-")
    await bench.stop()
    newer = len(bench.broker.logs[CHANGELOG, 0]) - 1 - kept.marked
    kept.make()
    await bench.start()
    assert kept.contents() == {"c": 1, "d": 1} == kept.from_log()
    assert kept.restored[-1] == newer + 1


async def test_without_a_folder_there_is_no_file_and_no_thread(bench: Bench, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    bench.make(count, store=STORES["table"])
    await bench.over("a")
    assert bench.engine.keeper is None
    assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name == "kes-keeper"]
    assert bench.engine.workers[0].kept is None


async def test_a_lost_membership_and_a_restart_keep_the_folder(kept: Kept) -> None:
    bench = kept.bench
    kept.make()
    await bench.over("a", "b")
    bench.connections.membership.lose_and_rejoin()
    await bench.until(lambda: len(kept.restored) == 2, "it has it back")
    await bench.until_active()
    assert kept.restored == [0, 1]
    bench.broker.send("a")
    await bench.committed()
    assert kept.contents() == {"a": 2, "b": 1}


# -- what is not believed ----------------------------------------------------------------------------------------------


async def begins_anew(kept: Kept, caplog: Any, reason: str) -> None:
    """Start again: all of the changelog is read, the state is right, and the reason is named once."""
    bench = kept.bench
    await bench.start()
    assert kept.contents() == kept.from_log()
    assert kept.restored[-1] == len(bench.broker.logs[CHANGELOG, 0])
    said = [record.getMessage() for record in caplog.records if reason in record.getMessage()]
    assert said, caplog.text
    assert str(kept.folder) in said[0] or "changelog[0]" in said[0]
    bench.broker.send("again")
    await bench.committed()
    await kept.until_marked()


async def test_a_folder_of_another_topic_id(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    await kept.ran("a", "b")
    other_log(kept, ["x", "y"])
    monkeypatch.setattr(Group, "identity", lambda *_: TopicIdentity("another", 1))
    await kept.bench.over()
    assert kept.contents() == {"x": 1, "y": 1}
    assert "its topic id is 'id', not 'another'; it is set aside" in caplog.text
    assert (kept.group_folder / "0.aside" / "mark").exists()


async def test_a_folder_of_other_codecs(kept: Kept, caplog: Any) -> None:
    await kept.ran("a", "b")
    kept.make(Table.factory(key=str, value=bytes))
    await kept.bench.start()
    assert "its codec is 'Table(StrCodec, IntCodec)', not 'Table(StrCodec, BytesCodec)'" in caplog.text
    assert kept.restored[-1] == len(kept.bench.broker.logs[CHANGELOG, 0])


async def test_a_folder_that_is_older_than_tombstones(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    await kept.ran("a", "b")
    real = Engine.wall_ms
    monkeypatch.setattr(Engine, "wall_ms", lambda self: real(self) + 23 * 3_600_000 + 60_000)
    await begins_anew(kept, caplog, "the changelog keeps tombstones for 24 h")


def damage(kept: Kept) -> None:
    data = next(kept.partition_folder.glob("data-*"))
    spoiled = bytearray(data.read_bytes())
    spoiled[-1] ^= 0x20
    data.write_bytes(spoiled)


async def test_a_folder_with_a_flipped_byte(kept: Kept, caplog: Any) -> None:
    await kept.ran("a", "b")
    damage(kept)
    await begins_anew(kept, caplog, "another checksum than its mark")


def damage_database(kept: Kept) -> None:
    with closing(sqlite3.connect(kept.partition_folder / "data-sqlite1" / "state.db")) as connection, connection:
        connection.execute("UPDATE state SET value = zeroblob(12) WHERE key = ?", (b"a",))


def empty_database(kept: Kept) -> None:
    shutil.rmtree(kept.partition_folder / "data-sqlite1")
    (kept.partition_folder / "data-sqlite1").mkdir()


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [("table", damage), ("table on SQLite", damage_database), ("table on SQLite", empty_database)],
    ids=["a file", "a database", "an empty database"],
)
@pytest.mark.parametrize("snapshots", ["", "snapshots"], ids=["alone", "with snapshots"])
async def test_a_damaged_folder_gives_way_to_an_older_one(
    kept: Kept, tmp_path: Path, kind: str, spoil: Callable[[Kept], None], snapshots: str
) -> None:
    """A frozen process has held that until now. Only what it lacks is read from the changelog."""
    bench, older = kept.bench, tmp_path / "older"
    await kept.ran("a", "b", store=STORES[kind])
    mark = kept.marked
    shutil.copytree(kept.partition_folder, older)
    await kept.ran("a", "c", store=STORES[kind])
    shutil.copytree(older, kept.group_folder / "0.1")
    spoil(kept)
    kept.make(STORES[kind], snapshots=snapshots and str(tmp_path / snapshots))
    await bench.start()
    assert kept.contents() == {"a": 2, "b": 1, "c": 1} == kept.from_log()
    assert kept.restored[-1] == len(bench.broker.logs[CHANGELOG, 0]) - mark
    folders = [path.name for path in kept.group_folder.iterdir() if path.is_dir()]
    assert sorted(folders) == ["0.1", "0.aside"]


async def test_a_folder_that_turns_bad_while_it_is_loaded(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    """A part of it is in the store then: the store is dropped with it."""
    await kept.ran("a", "b")
    check = StateFolder.check

    def check_then_spoil(self: StateFolder, *of: Any, **more: Any) -> bool:
        found = check(self, *of, **more)
        if found:
            damage(kept)
        return found

    monkeypatch.setattr(StateFolder, "check", check_then_spoil)
    await begins_anew(kept, caplog, "another checksum than its mark")


@pytest.mark.parametrize("names", [["x"], ["x", "y", "z", "x", "y", "z"]], ids=["shorter", "longer"])
async def test_a_log_that_was_cut_and_written_anew(kept: Kept, caplog: Any, names: list[str]) -> None:
    bench = kept.bench
    await kept.ran("a", "b", "c")
    other_log(kept, names)
    bench.make(count, store=STORES["table"])
    await bench.over()
    await bench.stop()
    kept.make()
    await begins_anew(kept, caplog, "its warm copy starts over")
    assert "set aside" in caplog.text


async def test_an_input_offset_that_goes_back(kept: Kept, caplog: Any) -> None:
    """The marked record is there, and what follows is of a member that had less."""
    bench = kept.bench
    await kept.ran("a", "b", "c")
    log = bench.broker.logs[CHANGELOG, 0]
    value = log[-1].value.replace(b'"offset":3', b'"offset":2')  # type: ignore[union-attr]
    assert value != log[-1].value
    bench.broker.append(CHANGELOG, 0, log[-1].key, value, None)
    bench.broker.offsets[0] = 2
    await bench.start()
    assert "goes back from 3 to 2" in caplog.text
    assert kept.restored[-1] == len(log)


# -- disks that refuse -------------------------------------------------------------------------------------------------


async def test_a_root_that_cannot_be_used_stops_the_start(kept: Kept) -> None:
    kept.folder.write_text("")
    kept.make()
    with pytest.raises(ConfigError, match=r"StateConfig.folder is .*state"):
        await kept.bench.run()


async def test_a_folder_that_cannot_be_used_costs_nothing_but_the_restore(kept: Kept, caplog: Any) -> None:
    await kept.ran("a", "b")
    kept.partition_folder.chmod(0o777)
    await kept.bench.start()
    assert "changelog[0] is not kept on disk" in caplog.text
    assert kept.contents() == {"a": 1, "b": 1}
    kept.bench.broker.send("a")
    await kept.bench.committed()


async def test_a_full_disk_stops_nobody_and_is_written_to_again(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    kept.make()
    await kept.bench.over("a")
    await kept.until_marked()
    real = os.pwrite

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_module.os, "pwrite", full)
    kept.bench.broker.send("a", "b")
    await kept.bench.committed()
    await kept.bench.until(lambda: "cannot be written to" in caplog.text, "it is logged")
    kept.bench.broker.send("a")
    await kept.bench.committed()
    assert "bytes are free" in caplog.text
    assert caplog.text.count("cannot be written to") == 1, "once"
    monkeypatch.setattr(folder_module.os, "pwrite", real)
    await kept.until_marked()
    await kept.bench.cancel()
    await kept.bench.start()
    assert kept.contents() == {"a": 3, "b": 1}
    assert kept.restored[-1] == 1


async def test_a_disk_that_stays_full_leaves_the_folder_at_its_mark(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    await stays_full(kept, monkeypatch)
    assert "is left at its mark" in caplog.text
    monkeypatch.undo()
    await kept.bench.stop()
    await kept.bench.start()
    assert kept.contents() == kept.from_log()
    assert kept.restored[-1] > 1, "what the folder lacks"


async def test_a_folder_that_another_process_holds(kept: Kept) -> None:
    await kept.ran("a", "b")
    frozen = StateFolder.open(kept.partition_folder)
    assert frozen is not None
    await kept.bench.start()
    assert kept.restored[-1] == len(kept.bench.broker.logs[CHANGELOG, 0])
    await kept.bench.stop()
    frozen.close()
    await kept.bench.start()
    assert kept.restored[-1] == 1
    assert kept.contents() == {"a": 1, "b": 1}


async def test_a_mark_of_a_time_when_the_clock_was_ahead_is_renewed_when_it_is_set_back(
    kept: Kept, monkeypatch: Any
) -> None:
    """A start would not believe it for a day, in which nothing else may happen in the partition."""
    real, ahead = Engine.wall_ms, [86_400_000]
    monkeypatch.setattr(Engine, "wall_ms", lambda self: real(self) + ahead[0])
    kept.make()
    await kept.bench.over("a")
    await kept.until_marked()
    before, ahead[0] = kept.marked, 0
    await kept.bench.until(lambda: kept.marked > before, "another offset record is sent")
    await kept.bench.stop()
    assert len(kept.bench.broker.logs[CHANGELOG, 0]) == before + 2, "once"
    await kept.bench.start()
    assert kept.restored[-1] == 1
    assert kept.contents() == {"a": 1}


async def test_a_quiet_partition_renews_its_mark(kept: Kept, monkeypatch: Any) -> None:
    monkeypatch.setattr(keeper_module, "RENEW_MS", 100)
    kept.make()
    await kept.bench.over("a")
    await kept.until_marked()
    before = kept.marked
    await kept.bench.until(lambda: kept.marked > before, "another offset record is sent")
    await kept.bench.stop()
    await kept.bench.start()
    assert kept.contents() == {"a": 1}
