"""Snapshots that go farther than their log, which has lost its end: they hold up no new one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams.disk.blobs import open_blobs
from tests.unit.kept_kit import IDENTITY
from tests.unit.snapshots_kit import Disk


class CutLog:
    """A place with a snapshot up to offset 90 and one up to 20, and the folder of a log that has lost its end."""

    def __init__(self, root: Path) -> None:
        self.end, self.asked = 50, 0
        disk = Disk(root / "old", open_blobs(str(root / "store")), keep=2)
        for offset in (20, 90):
            disk.save(disk.write(offset, 3))
        self.disk = Disk(root / "new", open_blobs(str(root / "store")), keep=2, end=self._ask)
        self.folder = self.disk.write(40, 3)

    def _ask(self, partition: int) -> int:
        self.asked += 1
        return self.end

    @property
    def offsets(self) -> list[int]:
        place = self.disk.store.prefix(IDENTITY.topic_id, 0)
        return [manifest.mark.offset for _, manifest in self.disk.store.manifests(place)]

    @property
    def is_saved(self) -> bool:
        assert self.folder.mark is not None
        return self.disk.store.has(self.folder.mark)


@pytest.mark.parametrize("end", [41, 90])
def test_a_snapshot_that_goes_farther_than_a_log_that_was_cut_holds_up_no_new_one(
    tmp_path: Path, caplog: Any, end: int
) -> None:
    log = CutLog(tmp_path)
    log.end = end
    assert not log.is_saved
    log.disk.save(log.folder)
    assert log.offsets == [40, 20]
    assert f"is removed: the changelog lost its end, and ended at offset {end}" in caplog.text
    assert log.disk.restored("disk of another")[0] == 40
    asked = log.asked
    assert log.is_saved
    assert log.asked == asked, "without one that goes farther there is no request"


@pytest.mark.parametrize("end", [-1, 91, 40, 0], ids=["not known", "not cut", "cut below the folder, too", "empty"])
def test_a_snapshot_that_the_log_may_go_on_from_stays_the_newest(tmp_path: Path, end: int) -> None:
    """One that goes farther than a folder is that of a member that is ahead."""
    log = CutLog(tmp_path)
    log.end = end
    assert log.is_saved
    log.disk.save(log.folder)
    assert log.offsets == [90, 40]


def test_a_snapshot_of_lost_records_stays_until_the_new_one_is_verified(tmp_path: Path, monkeypatch: Any) -> None:
    """Each write of the new one fails, or cannot be read back."""
    log = CutLog(tmp_path)
    put, left = log.disk.store._put, [0]

    def fails(path: str, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("what was written is not there")
        put(path, data)

    monkeypatch.setattr(log.disk.store, "_put", fails)
    for number in range(9):
        left[0] = number
        with suppress(OSError):
            log.disk.save(log.folder)
            break
        assert log.offsets == [90, 20]
    assert number > 2
    assert log.offsets == [40, 20]


def test_another_record_at_the_same_offset_is_not_there_already(tmp_path: Path) -> None:
    log = CutLog(tmp_path)
    log.disk.save(log.folder)
    assert log.is_saved
    mark = log.folder.mark
    assert mark is not None
    assert not log.disk.store.has(msgspec.structs.replace(mark, record=b"another"))
