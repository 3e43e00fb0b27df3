"""Snapshots by themselves: how they are written, read and removed, and what a kill in between leaves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams.core import manifests
from streams.core.manifests import Block
from streams.disk import SQLite
from streams.disk.blobs import Blobs, open_blobs
from streams.errors import Stopped
from streams.runtime.keeping import on_disk
from streams.runtime.keeping.folders.entries import decode_pieces
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.snapshots import snapshotting
from tests.unit.kept_kit import DAY_MS, IDENTITY, Cut
from tests.unit.s3_kit import object_store
from tests.unit.snapshots_kit import Disk
from tests.unit.steps_kit import no_step
from tests.unit.waiting import give_own


def test_garbage_is_what_no_kept_manifest_names_for_an_hour() -> None:
    old, new, kept, held = "a" * 64, "b" * 64, "c" * 64, "d" * 64 + "-12"
    blocks = [(old, 3_601.0), (f"{old}-13", 3_601.0), (new, 3_599.0), (kept, 9e9), (held, 9e9), ("README", 9e9)]

    class Listing(msgspec.Struct):
        blocks: tuple[Block, ...]

    named = [Listing((Block(kept, 1),))]
    assert manifests.garbage(blocks, named, {"12"}) == [old, f"{old}-13"]  # type: ignore[arg-type]


STEPS = 18
"""More than a snapshot of three new blocks has."""


@pytest.mark.parametrize("step", range(STEPS))
def test_killed_at_any_step_the_newest_whole_snapshot_is_used(tmp_path: Path, step: int) -> None:
    disk = Disk(tmp_path, keep=2)
    disk.save(disk.write(10, 3))
    disk.save(disk.write(20, 3))
    taken: list[str] = []

    def at(name: str) -> None:
        taken.append(name)
        if len(taken) > step:
            raise Cut(name)

    disk.steps.at = at
    folder = disk.write(30, 4)
    with suppress(Cut):
        disk.save(folder)
    disk.steps.at = no_step
    offset, state = disk.restored("new")
    is_whole = "put manifest" in taken[:-1]
    assert offset == (30 if is_whole else 20)
    assert state == {b"key %d" % number: b"value %d" % offset for number in range(4 if is_whole else 3)}
    if step == STEPS - 1:
        assert set(taken) >= {"put hold", "put block", "put manifest", "delete hold", "list blocks", "delete manifest"}
        assert len(taken) < STEPS, "each step was one at which it ended"
    disk.save(disk.write(40, 3))  # and the next one is as any other
    assert disk.restored("newer")[0] == 40


def test_an_older_state_that_is_saved_later_is_not_the_newest(tmp_path: Path) -> None:
    disk, blobs = Disk(tmp_path, keep=2), open_blobs(str(tmp_path / "store"))
    for offset in (30, 40):
        disk.save(disk.write(offset, 3))
    behind = Disk(tmp_path / "behind", blobs, keep=2)
    for offset in (5, 6):
        behind.save(behind.write(offset, 2))
    assert disk.restored("new")[0] == 40
    place = disk.store.prefix(IDENTITY.topic_id, 0)
    assert [manifest.mark.offset for _, manifest in disk.store.manifests(place)] == [40, 30]
    first = disk.store.manifests(place)[1][0]  # a name can be changed by those who cannot sign
    (tmp_path / "store" / place / first).rename(tmp_path / "store" / place / "manifest-999999999999999-99-00")
    assert disk.restored("newer")[0] == 40


@pytest.mark.parametrize("error", [OSError("the store is away"), Stopped("the copy is not wanted")], ids=["os", "end"])
def test_after_a_passing_failure_a_snapshot_is_tried_again(tmp_path: Path, error: Exception) -> None:
    disk, refused = Disk(tmp_path), set[str]()
    name = disk.save(disk.write(10, 3)).name

    def fill(progress: Callable[[int, int], None]) -> str:
        place = tmp_path / "new"
        return disk.store.fill(partial(StateFolder.find, place, 0), IDENTITY, refused, progress, tombstones_ms=DAY_MS)

    def fail(done: int, size: int) -> None:
        raise error

    with pytest.raises(type(error)):
        fill(fail)
    assert not refused
    assert fill(lambda done, size: None) == name
    assert refused == {name}, "the log may yet show that it does not go on from there"


def test_a_snapshot_counts_although_older_ones_cannot_be_removed(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    disk = Disk(tmp_path, keep=2)
    for offset in (10, 20):
        disk.save(disk.write(offset, 3))

    def refuse(name: str) -> None:
        raise PermissionError(f"{name} cannot be removed")

    monkeypatch.setattr(disk.store._blobs, "delete", refuse)
    assert disk.save(disk.write(30, 3)).uploaded
    assert "stay there until the next one is made: " in caplog.text
    assert disk.restored("new")[0] == 30
    monkeypatch.undo()
    disk.save(disk.write(40, 3))
    assert len(list((tmp_path / "store").rglob("manifest-*"))) == 3, "one has its hold still, and does not count"


# -- two makers at once, one of which stands still anywhere ------------------------------------------------------------


class Pair:
    """A maker, and another one that keeps a single snapshot and whose steps something can happen at."""

    def __init__(self, root: Path) -> None:
        blobs = open_blobs(str(root / "store"))
        self.one, self.other = Disk(root / "one", blobs, keep=1), Disk(root / "other", blobs, keep=1)
        self.place = root / "store" / self.one.store.prefix(IDENTITY.topic_id, 0)
        self.folder = self.one.write(10, 3)
        self.one.save(self.folder)

    def age(self, seconds: float = 7_200.0) -> None:
        """All that is there was written long ago."""
        for path in (*self.place.glob("*-*"), *self.place.glob("blocks/*")):
            os.utime(path, (path.stat().st_mtime - seconds,) * 2)

    def at_other(self, step: str, do: Callable[[], object], after: str = "") -> None:
        """Do something when the other maker comes to a step (the first one after another), once."""
        taken = [""]

        def at(name: str) -> None:
            if name == step and after in taken:
                self.other.steps.at = no_step
                do()
            taken.append(name)

        self.other.steps.at = at

    def names(self, kind: str) -> list[str]:
        return sorted(path.name for path in self.place.glob(f"{kind}-*"))


@pytest.mark.parametrize("step", ["list blocks", "list snapshots", "delete manifest", "delete block"])
def test_a_collector_that_stood_still_takes_no_block_of_a_later_snapshot(tmp_path: Path, step: str) -> None:
    """It has found blocks that nothing names. Then the same data is saved again, and it goes on."""
    pair = Pair(tmp_path)
    pair.other.save(pair.other.write(20, 4))  # it removes the first snapshot, whose blocks stay for this time
    pair.age()
    saved = []
    pair.at_other(step, lambda: saved.append(pair.one.save(pair.one.write(40, 0))), after="delete hold")
    pair.other.save(pair.other.write(30, 4))
    assert saved[0].uploaded > 0
    assert pair.one.restored("new")[0] == 40
    assert not pair.names("hold")


def test_blocks_of_a_snapshot_that_is_removed_meanwhile_are_not_used_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.other.save(pair.folder)
    pair.at_other("put manifest", lambda: pair.one.save(pair.one.write(50, 9)))
    with pytest.raises(OSError, match=r"manifest-.*, whose blocks the new snapshot uses, was removed meanwhile"):
        pair.other.save(pair.folder)
    assert len(pair.names("manifest")) == 1
    assert not pair.names("hold")
    assert pair.one.restored("new")[0] == 50


def test_a_slow_maker_keeps_its_blocks(tmp_path: Path) -> None:
    pair = Pair(tmp_path)

    def hours_later() -> None:
        pair.age()
        pair.one.save(pair.one.write(20, 3))

    pair.at_other("put manifest", hours_later)
    pair.other.save(pair.other.write(30, 3))
    assert pair.one.restored("new")[0] == 30


def test_a_maker_that_was_taken_for_dead_begins_anew(tmp_path: Path) -> None:
    pair = Pair(tmp_path)

    def a_day_later() -> None:
        pair.age(100_000.0)
        pair.one.save(pair.one.write(20, 3))

    pair.at_other("put block", a_day_later)
    folder = pair.other.write(30, 3)
    with pytest.raises(OSError, match="its hold was removed"):
        pair.other.save(folder)
    assert pair.one.restored("new")[0] == 20
    pair.other.save(folder)
    assert pair.one.restored("newer")[0] == 30


def test_objects_of_a_time_when_a_clock_was_days_ahead_end_no_hold(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.age(-200_000.0)  # into the future
    pair.at_other("put block", lambda: pair.one.save(pair.one.write(20, 3)))
    pair.other.save(pair.other.write(30, 3))
    assert pair.one.restored("new")[0] == 30


class OldBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block of the releases before blocks had tokens: their collectors remove names of 64 digits alone."""

    sha256: str
    size: int


def test_beside_a_release_without_tokens(tmp_path: Path) -> None:
    """Its snapshots are used, and their blocks again. It reads manifests of this one, and no block has a name that its
    collector removes."""
    pair = Pair(tmp_path)
    (first,) = pair.names("manifest")
    place = pair.one.store.prefix(IDENTITY.topic_id, 0)
    new = pair.one.store.manifest(place, first)
    old = msgspec.structs.replace(new, blocks=tuple(OldBlock(block.sha256, block.size) for block in new.blocks))
    for block in new.blocks:
        (pair.place / "blocks" / block.name).rename(pair.place / "blocks" / block.sha256)
    (pair.place / first).write_bytes(manifests.encode_manifest(old, b""))
    pair.one.store._known.clear()
    assert pair.one.restored("new")[0] == 10
    assert pair.other.save(pair.folder).uploaded == 0
    assert pair.one.restored("newer")[0] == 10
    saved = pair.other.save(pair.other.write(20, 4))
    assert saved.uploaded == saved.size
    blocks = pair.other.store.manifest(place, saved.name).blocks
    read = msgspec.json.decode(msgspec.json.encode(blocks), type=tuple[OldBlock, ...])
    assert [block.sha256 for block in read] == [block.sha256 for block in blocks]
    assert not any(re.fullmatch("[0-9a-f]{64}", block.name) for block in blocks)
    pair.age()
    pair.other.save(pair.other.write(30, 5))
    assert {path.name for path in (pair.place / "blocks").iterdir()} >= {block.name for block in blocks}
    assert not any(re.fullmatch("[0-9a-f]{64}", path.name) for path in (pair.place / "blocks").iterdir())


def test_a_snapshot_whose_maker_died_does_not_count_and_goes_after_a_day(tmp_path: Path) -> None:
    pair = Pair(tmp_path)

    def die() -> None:
        raise Cut("delete hold")

    pair.at_other("delete hold", die)
    with suppress(Cut):
        pair.other.save(pair.other.write(90, 3))
    pair.one.save(pair.one.write(20, 3))
    assert len(pair.names("manifest")) == 2, "it does not count as the one that is kept"
    assert len(pair.names("hold")) == 1
    assert pair.one.restored("new")[0] == 90, "and can be used"
    pair.age(100_000.0)
    pair.one.save(pair.one.write(30, 3))
    assert not pair.names("hold")
    assert [name.split("-")[2] for name in pair.names("manifest")] == ["30"]
    pair.one.save(pair.one.write(40, 3))
    named = {block.name for _, manifest in pair.one.store.manifests(str(pair.place)) for block in manifest.blocks}
    assert {path.name for path in (pair.place / "blocks").iterdir()} >= named
    assert pair.one.restored("newer")[0] == 40


class Unsure:
    """A place whose call with a certain number fails, with or without its effect: its answer may be what was lost."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.left, self.is_done = -1, False

    def __getattr__(self, name: str) -> Any:
        def call(*of: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                if self.is_done:
                    getattr(self._blobs, name)(*of)
                raise TimeoutError(f"no answer ({name})")
            return getattr(self._blobs, name)(*of)

        return call


@pytest.mark.parametrize("is_done", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["no effect", "done"])
def test_whichever_call_fails_the_next_snapshot_is_as_any_other(tmp_path: Path, is_done: bool) -> None:
    """And what counts is whole at any time."""
    for number in range(100):
        blobs = Unsure(open_blobs(str(tmp_path / f"{number}" / "store")))
        disk = Disk(tmp_path / f"{number}", blobs, keep=2)
        for offset in (10, 20):
            disk.save(disk.write(offset, 3))
        folder = disk.write(30, 4)
        blobs.left, blobs.is_done = number, is_done
        with suppress(OSError):
            disk.save(folder)
        is_over, blobs.left = blobs.left >= 0, -1
        assert disk.restored("new")[0] in (20, 30)
        for offset in (40, 50):
            disk.save(disk.write(offset, 3))
        assert disk.restored("newer")[0] == 50
        place = disk.store.prefix(IDENTITY.topic_id, 0)
        for _, manifest in disk.store.manifests(place)[:2]:
            assert b"".join(disk.store.pieces(manifest, lambda *_: None))
        if is_over:
            return
    raise AssertionError("there is no end of calls")


def test_what_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    first = disk.save(disk.write(10, 2_000), 4096)
    assert first.uploaded == first.size
    second = disk.save(disk.write(20, 20), 4096)
    assert second.size > first.size
    assert second.uploaded <= 0.1 * second.size
    assert disk.restored("new")[0] == 20


def test_of_a_database_only_the_pieces_with_changes_are_written_again(tmp_path: Path) -> None:
    engine = SQLite()
    database = engine.open(str(tmp_path / "db"), memory_bytes=1 << 20, partitions=1)
    rows = [(b"key %08d" % number, b"x" * 500) for number in range(8_000)]
    database.write(rows, b"1")
    before = list(on_disk._rows(database, 1 << 22))
    database.write([(rows[7_000][0], b"y" * 500)], b"2")
    after = list(on_disk._rows(database, 1 << 22))
    database.close()
    assert len(before) > 2
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1
    assert [(change.key, change.value) for some in decode_pieces(iter(before), "x") for change in some] == rows


def test_a_block_that_is_gone_or_cut_is_written_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    folder = disk.write(10, 20)
    disk.save(folder)
    first, second, *_ = sorted((tmp_path / "store").rglob("blocks/*"))
    first.unlink()
    second.write_bytes(b"")
    assert disk.save(folder).uploaded > 0
    assert disk.restored("new")[0] == 10


def test_garbage_goes_after_an_hour_unless_a_manifest_cannot_be_read(tmp_path: Path, caplog: Any) -> None:
    disk = Disk(tmp_path, keep=2)
    disk.save(disk.write(10, 3))
    (blocks,) = (tmp_path / "store").rglob("blocks")
    stray = blocks / ("a" * 64)
    other = blocks.parent / "manifest-999999999999999-9-00"
    other.write_bytes(b"kes-snapshot 2 sha256 " + b"0" * 64 + b"\n")
    for path in (stray, blocks / "README"):
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    disk.save(disk.write(20, 3))
    assert stray.exists()
    assert "it has the format 2" in caplog.text
    other.unlink()
    disk.save(disk.write(30, 3))
    disk.save(disk.write(40, 3))
    assert not stray.exists()
    assert (blocks / "README").exists(), "what is no block is nobody's to remove"
    assert len(list(blocks.parent.glob("manifest-*"))) == 2
    assert disk.restored("new")[0] == 40


def test_a_store_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with object_store() as found:
        disk = Disk(tmp_path, open_blobs(found.address, call_seconds=5), keep=2)
        for offset in (10, 20, 30):
            disk.save(disk.write(offset, 50), 1024)
        assert disk.restored("new")[0] == 30
        assert len([key for key in found.objects if "manifest-" in key]) == 2
        name = next(key for key in found.objects if "/blocks/" in key)
        found.objects.pop(name)
        assert disk.restored("another")[0] in (-1, 20), "the one before, or none"
        found.status = 403
        with pytest.raises(OSError, match=r"403|ACCESS_DENIED|Trouble"):
            disk.restored("third")


def test_the_rate_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    give_own(monkeypatch, "time", snapshotting, sleep=waited.append, monotonic=lambda: 5.0)
    pace = snapshotting.WritingPace(1_000)
    pace(500)
    pace(500)
    assert waited == [0.5, 1.0]


def test_an_upload_ends_when_the_source_stops(tmp_path: Path) -> None:
    disk = Disk(tmp_path, is_over=lambda: True)
    with pytest.raises(Stopped):
        disk.save(disk.write(10, 3))
    assert not list((tmp_path / "store").rglob("manifest-*"))
