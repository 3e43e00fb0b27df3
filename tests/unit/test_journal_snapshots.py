"""Snapshots in a folder: whole or passed over, of this journal or refused, the newest kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from streams.errors import ConfigError, JournalError, OffsetError
from streams.journal import SnapshotFolder
from streams.journal.snapshots import read_snapshot


def save(folder: SnapshotFolder, position: int, state: bytes = b"state", topic_id: str = "id") -> Path:
    def write(file: BinaryIO) -> None:
        file.write(state)

    return folder.save("ledger", topic_id, position, write)


def test_the_newest_are_kept_and_the_newest_whole_one_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = SnapshotFolder(tmp_path / "new" / "folder", keep=2)
    assert folder.newest("ledger", "id", 0, 100) is None
    for position in (5, 10, 30, 90):
        save(folder, position, b"%d" % position)
    assert [read_snapshot(path).state for path in folder.files()] == [b"90", b"30"]
    found = folder.newest("ledger", "id", 0, 100)
    assert found is not None
    assert (found.head.position, found.state) == (90, b"90")
    newest = folder.files()[0]
    for damage in (b"", newest.read_bytes()[:-1], newest.read_bytes().replace(b"\n90", b"\n91"), b"{}\n"):
        newest.write_bytes(damage)
        found = folder.newest("ledger", "id", 0, 100)
        assert found is not None
        assert found.state == b"30"
    assert caplog.text.count("is damaged") == 4
    assert folder.newest("ledger", "id", 31, 100) is None  # the log does not go on behind it


def test_a_snapshot_is_kept_when_a_damaged_one_of_a_higher_position_is_there(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path, keep=1)
    save(folder, 90).write_bytes(b"damaged")
    for position in (20, 30):
        written = save(folder, position)
        assert written.exists()
    found = folder.newest("ledger", "id", 0, 100)
    assert found is not None
    assert found.head.position == 30
    save(folder, 95)
    assert [read_snapshot(path).head.position for path in folder.files()] == [95]


def test_a_snapshot_that_does_not_fit_the_log_is_an_error(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    save(folder, 50)
    with pytest.raises(OffsetError, match=r"a snapshot of position 50, and ledger\[0\] ends at 49: the log has lost"):
        folder.newest("ledger", "id", 0, 49)
    for journal, topic_id in (("other", "id"), ("ledger", "another")):
        with pytest.raises(JournalError, match="belongs to another one, or the topic was recreated"):
            folder.newest(journal, topic_id, 0, 100)


def test_a_process_that_dies_and_a_save_that_raises_leave_the_older_ones(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    kept = save(folder, 1)
    (tmp_path / ".00000000000000000002.snapshot").write_bytes(b"half")
    assert SnapshotFolder(tmp_path).files() == [kept]
    assert list(tmp_path.iterdir()) == [kept]

    def fails(file: BinaryIO) -> None:
        file.write(b"some")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        folder.save("ledger", "id", 2, fails)
    assert folder.files() == [kept]


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot hold snapshots: "):
        SnapshotFolder(tmp_path / "file")
    with pytest.raises(ConfigError, match="/proc/none cannot hold snapshots: "):  # nobody may make one there
        SnapshotFolder("/proc/none")
    with pytest.raises(ConfigError, match="keeps 0; it must be 1 or more"):
        SnapshotFolder(tmp_path, keep=0)
    folder = SnapshotFolder(tmp_path / "gone")
    folder.path.rmdir()
    with pytest.raises(JournalError, match="cannot be written: No such file"):
        save(folder, 1)


def test_a_full_disk_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SnapshotFolder(tmp_path)
    kept = save(folder, 1)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JournalError, match=r"0002\.snapshot cannot be written: No space left on device"):
        save(folder, 2)
    assert list(tmp_path.iterdir()) == [kept]
