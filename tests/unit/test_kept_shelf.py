"""What a member tells the group of its folders, and its figures: marks that are believed, of whoever's folders."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams.core.checkpoints import FORMAT, distrust_by
from streams.errors import RecordRefused
from streams.model.group import Copies, Shelf
from streams.model.topics import TopicIdentity
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders import shelf as shelf_module
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.folders.shelf import ShelfWatch
from streams.runtime.keeping.on_disk import DatabaseFolder
from tests.unit.kept_engine_kit import STORES, Kept
from tests.unit.kept_kit import DAY_MS, IDENTITY, Script, now_ms, put, reopened
from tests.unit.runtime_kit import CHANGELOG, Bench, Group
from tests.unit.waiting import until

pytestmark = pytest.mark.usefixtures("unflushed")
LOG = TopicIdentity(IDENTITY.topic_id, 8, IDENTITY.cluster)


def checkpoint(parent: Path, partition: int, offset: int, as_of_ms: int | None = None, **identity: Any) -> StateFolder:
    """A folder, held by its process, with a mark."""
    known = msgspec.structs.replace(IDENTITY, **{"partition": partition, **identity})
    folder = StateFolder.find(parent, partition)
    folder.append([put(b"a", b"1")], pause=False)
    folder.commit(known, offset, b"{}", now_ms() if as_of_ms is None else as_of_ms)
    return folder


def watch(parent: Path) -> ShelfWatch:
    return ShelfWatch(parent, IDENTITY.topic, now_ms)


def seen(parent: Path, log: TopicIdentity | None = LOG, codec: str = IDENTITY.codec) -> dict[int, int]:
    looking = watch(parent)
    looking.codec = codec
    looking.scan(log, DAY_MS)
    return looking.found.offsets


def test_marks_are_read_whoever_holds_the_folders_and_the_farthest_counts(tmp_path: Path) -> None:
    held = [checkpoint(tmp_path, 2, 30), checkpoint(tmp_path, 2, 50), checkpoint(tmp_path, 0, 7)]
    (tmp_path / "1").mkdir(mode=0o700)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "2.1"]
    looking = watch(tmp_path)
    looking.scan(None, DAY_MS)
    assert looking.found == Shelf(looking.found.name, {0: 7, 2: 50})
    held[0].commit(IDENTITY, 90, b"{}", now_ms())  # of another partition: a mark that is in the wrong place
    held[2].commit(IDENTITY, 9, b"{}", now_ms())
    looking.scan(LOG, DAY_MS)
    assert looking.found.offsets == {0: 9, 2: 50}
    assert watch(tmp_path).found.name == looking.found.name, "one machine, one shelf"
    assert watch(tmp_path.parent).found.name != looking.found.name
    for folder in held:
        folder.close()


@pytest.mark.parametrize(
    "wrong",
    [{"topic": "other"}, {"topic_id": "made again"}, {"cluster": "c2"}, {"codec": "other"}, {"format": FORMAT + 1}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_folders_that_would_not_be_used_are_not_reported(tmp_path: Path, wrong: dict[str, Any]) -> None:
    checkpoint(tmp_path, 0, 7).close()
    checkpoint(tmp_path, 1, 7, **wrong).close()
    assert seen(tmp_path) == {0: 7}


def test_an_old_one_and_one_of_the_future_are_not_reported(tmp_path: Path) -> None:
    checkpoint(tmp_path, 0, 7, now_ms() - DAY_MS + 1_800_000).close()
    checkpoint(tmp_path, 1, 7, now_ms() + 2 * 3_600_000).close()
    checkpoint(tmp_path, 2, 7, now_ms() - DAY_MS // 2).close()
    assert seen(tmp_path) == {2: 7}


def test_what_cannot_be_read_is_not_reported(tmp_path: Path) -> None:
    for partition in range(5):
        checkpoint(tmp_path, partition, 7).close()
    (tmp_path / "0" / "mark").write_bytes(b"00000000 {}")
    (tmp_path / "1").chmod(0o777)
    (tmp_path / "2" / "mark").unlink()
    os.rename(tmp_path / "3", tmp_path / "elsewhere")
    (tmp_path / "3").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "4.aside").mkdir()
    (tmp_path / "shelf").write_text("no name\n")
    assert seen(tmp_path) == {4: 7}
    assert "\n" not in watch(tmp_path).found.name
    assert seen(tmp_path / "not there") == {}


# -- adopted ----------------------------------------------------------------------------------------------------------


ADOPTED = """
import os, shutil, signal, sys
from pathlib import Path
from streams.runtime.keeping.folders import folder
from tests.unit.steps_kit import steps_of_folders
step, parent, what = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
def dies(left=[step]):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
def removes(path, ignore_errors):
    for file in sorted(path.iterdir()):
        dies()
        file.unlink()
    dies()
    path.rmdir()
if what == "adopted":
    folder.shutil.rmtree = removes
found = folder.StateFolder.find(parent, 0)
found.remove_spares()
if what == "set aside":
    with steps_of_folders(lambda name: dies()):
        found.set_aside()
"""


@pytest.mark.parametrize("what", ["adopted", "set aside"])
def test_killed_while_it_is_adopted_or_set_aside(tmp_path: Path, what: str) -> None:
    """By SIGKILL, before each file that goes: it is the farthest folder still, or an empty one, and can be used."""
    root = Path(__file__).parents[2]
    killed = 0
    for step in range(9):
        parent = tmp_path / str(step)
        folders = [StateFolder.find(parent, 0), StateFolder.find(parent, 0)]
        for folder, offset in zip(folders, (5, 9), strict=True):
            folder.append([put(b"a", b"%d" % offset)])
            folder.commit(IDENTITY, offset, b"{}", now_ms())
            folder.close()
        if what == "set aside":
            only = StateFolder.find(parent, 0)
            only.remove_spares()
            only.close()
        command = [sys.executable, "-c", ADOPTED, str(step), str(parent), what]
        ended = subprocess.run(command, timeout=100, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False)
        assert ended.returncode in (0, -signal.SIGKILL)
        killed += ended.returncode != 0
        whole = what == "adopted" or (step == 0 and ended.returncode != 0)
        assert reopened(parent) == ((9, {b"a": b"9"}) if whole else (-1, {})), step
        after = Script(parent)
        after.run()
        after.check()
        if ended.returncode == 0:
            break
    assert killed >= (4 if what == "adopted" else 2)


def test_a_lock_in_a_folder_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder adopts a farther one, and removes it, between the opening of the lock file and the locking of it. A
    third process then has a folder of that name, which must not be written to by two."""
    real, third = folder_module.lock_file, []

    def late(handle: int) -> bool:
        monkeypatch.setattr(folder_module, "lock_file", real)
        shutil.rmtree(tmp_path / "0")
        third.append(StateFolder.open(tmp_path / "0"))
        return real(handle)

    monkeypatch.setattr(folder_module, "lock_file", late)
    second = StateFolder.find(tmp_path, 0)
    assert second.path.name == "0.1"
    assert third[0] is not None
    for folder in (second, *third):
        folder.close()


@pytest.mark.parametrize("kind", [StateFolder, DatabaseFolder])
@pytest.mark.parametrize(
    "wrong",
    [{"topic_id": "made again"}, {"cluster": "c2"}, {"codec": "other"}, {"format": FORMAT + 1}, {"as_of_ms": 0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_of_several_folders_one_that_is_believed_is_adopted_before_a_farther_one(
    tmp_path: Path, kind: type[StateFolder], wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A process that was frozen has held the first one, until its topic was made again, or its codec was another."""
    held = [checkpoint(tmp_path, 0, 90, **wrong), checkpoint(tmp_path, 0, 5), checkpoint(tmp_path, 0, 7)]
    for folder in held:
        folder.close()
    distrust = distrust_by(IDENTITY, now_ms=now_ms(), tombstones_ms=DAY_MS)
    found = kind.find(tmp_path, 0, distrust)
    assert found.mark is not None
    assert found.mark.offset == 7
    assert [spare.path.name for spare in found.spares] == ["0.1"]
    found.remove_spares()
    found.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.2", "0.aside"]
    assert (tmp_path / "0.aside" / "mark").exists(), "it is kept for looking at"
    assert f"{tmp_path / '0'} is not used: it" in caplog.text


def test_of_several_folders_that_are_not_believed_the_farthest_is_named(tmp_path: Path) -> None:
    for folder in [checkpoint(tmp_path, 0, 90, topic_id="other"), checkpoint(tmp_path, 0, 5, topic_id="other")]:
        folder.close()
    found = StateFolder.find(tmp_path, 0, lambda mark: "its topic id is another")
    assert found.mark is not None
    assert found.mark.offset == 90
    found.close()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


# -- under an engine ---------------------------------------------------------------------------------------------------


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the group is told, ``"start"`` where the membership begins."""
    found: list[Any] = []
    start = Group.start

    def begin(self: Group, deliver: Any) -> None:
        found.append("start")
        start(self, deliver)

    monkeypatch.setattr(Group, "start", begin)
    monkeypatch.setattr(Group, "report", lambda self, copies, announce: found.append(copies), raising=False)
    monkeypatch.setattr(shelf_module, "SCAN_SECONDS", 0.02)
    monkeypatch.setattr("streams.runtime.keeping.keeper.SCAN_SECONDS", 0.02)
    return found


async def test_the_first_report_has_the_folders_and_later_ones_what_became_of_them(
    kept: Kept, reported: list[Any]
) -> None:
    await kept.ran("a", "b")
    first = reported[0]
    assert isinstance(first, Copies)
    assert first.shelf
    assert first.shelf.offsets == {}
    reported.clear()
    mark = kept.marked
    await kept.bench.start()
    assert reported[0].shelf == Shelf(first.shelf.name, {0: mark})
    assert reported[1] == "start"
    kept.bench.broker.send("c")
    await kept.bench.committed()
    await kept.until_marked()
    await until(lambda: reported[-1].shelf.offsets == {0: kept.marked}, "the later mark is reported")


async def test_a_folder_of_the_topic_that_was_there_before_displaces_none(kept: Kept) -> None:
    """Its offset is higher, so it was taken, and set aside; the whole changelog was read."""
    await kept.ran("a", "b")
    other = StateFolder.open(kept.group_folder / "0.1")
    assert other is not None
    other.append([put(b"a", b"1")], pause=False)
    other.commit(IDENTITY, 90, b"{}", now_ms())
    other.close()
    await kept.bench.start()
    assert kept.restored[-1] == 1
    assert kept.contents() == kept.from_log() == {"a": 1, "b": 1}


async def test_without_a_folder_nothing_is_reported_before_the_start(bench: Bench, reported: list[Any]) -> None:
    bench.make(None, store=STORES["table"])
    await bench.start()
    assert reported[0] == "start"
    assert not any(copies.shelf for copies in reported[1:])


@pytest.mark.parametrize("what", ["lost", "dropped", "refused"])
async def test_what_ends_a_partition_costs_a_short_read(kept: Kept, what: str) -> None:
    """A lost membership, a restart, a refused record: everything is there again, and one record of the log was read."""
    bench = kept.bench
    kept.make()
    await bench.over("a", "b", "a")
    await kept.until_marked()
    engine = bench.engine
    if what == "lost":
        bench.connections.membership.lose_and_rejoin()
    elif what == "dropped":  # a coordinator that did not know the member for a moment
        engine.partitions.dropped()
    else:
        engine.partitions.refused(0, 2, RecordRefused("too large"))
    await bench.until(lambda: len(kept.restored) == 2, "it has it back")
    await bench.until_active()
    assert len(bench.broker.logs[CHANGELOG, 0]) >= 3
    assert kept.restored == [0, 1]
    assert kept.contents() == {"a": 2, "b": 1}
    bench.broker.send("a")
    await bench.committed()
    assert kept.contents() == {"a": 3, "b": 1} == kept.from_log()


async def test_the_figures_of_a_folder(kept: Kept) -> None:
    kept.make()
    await kept.bench.over("a", "b")
    await kept.until_marked()
    (found,) = kept.bench.source.statistics().folders
    data = next(kept.partition_folder.glob("data-*"))
    assert (found.partition, found.state, found.offset) == (0, "kept", kept.marked)
    assert found.size_bytes == data.stat().st_size
    assert (found.gathered_changes, found.unwritten_bytes) == (0, 0)
    assert 0 <= found.mark_age_seconds < 60
    assert 0 < found.recover_seconds < 0.1
    keeper = kept.keeper
    await until(lambda: keeper.open_ones[0].checkpoint_seconds > 0, "it was measured")
    keeper.open_ones[0].give_up("test")
    assert kept.bench.source.statistics().folders[0].state == "left"
    assert kept.bench.source.statistics().folders_set_aside == 0


async def test_a_folder_that_is_set_aside_is_counted(kept: Kept) -> None:
    await kept.ran("a", "b")
    next(kept.partition_folder.glob("data-*")).write_bytes(b"")
    await kept.bench.start()
    assert kept.bench.source.statistics().folders_set_aside == 1


async def test_the_progress_of_loading_is_seen(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    await kept.ran("a", "b")
    seen: list[tuple[int, int]] = []
    loads = "streams.runtime.ownership.replica.Replica.loads"
    monkeypatch.setattr(loads, lambda self, loaded, size: seen.append((loaded, size)))
    await kept.bench.start()
    size = next(kept.partition_folder.glob("data-*")).stat().st_size
    assert seen == [(size, size)]
