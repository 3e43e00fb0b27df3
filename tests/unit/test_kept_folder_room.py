"""Folders of state beside others that remove them, and a disk that a rewrite fills."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders.folder import StateFolder
from tests.unit.kept_kit import IDENTITY, Cut, FullDisk, contents, now_ms, put
from tests.unit.steps_kit import no_step, steps_of_folders

pytestmark = pytest.mark.usefixtures("unflushed")


@pytest.mark.parametrize("step", ["lstat", "open"])
def test_a_folder_that_another_process_removes_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Between its making and the lock in it: another one is taken, and the partition is kept all the same."""
    (tmp_path / "0").mkdir(mode=0o700)
    left = ["once"]
    real = os.open if step == "open" else Path.lstat

    def removed_first(path: Any, *more: Any) -> Any:
        if Path(path).name in ("0", "lock") and left:
            left.clear()
            (tmp_path / "0").rename(tmp_path / "0.gone")
        return real(path, *more)

    with monkeypatch.context() as patch:
        patch.setattr(os if step == "open" else Path, step, removed_first)
        folder = StateFolder.find(tmp_path, 0)
    assert not left
    assert folder.path.name == "0.1"
    folder.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_rewrite_that_fills_the_disk_gives_the_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Half a new file must not be what keeps the disk full: no checkpoint could be made any more."""
    monkeypatch.setattr(folder_module, "LEAST_REWRITE", 600)
    folder = StateFolder.find(tmp_path, 0)
    changes = [put(b"key %d" % number, bytes(50)) for number in range(40)]
    for offset in range(3):
        folder.append(changes)
        folder.commit(IDENTITY, offset, b"{}", now_ms())
    before = contents(folder)

    def stop(step: str) -> None:
        if step == "flush data":
            raise Cut(step)

    if not is_killed:
        FullDisk(monkeypatch, 1_000)
    with pytest.raises((OSError, Cut)), steps_of_folders(stop if is_killed else no_step):
        folder.rewrite_if_due()
    if is_killed:
        folder.close()
        folder = StateFolder.find(tmp_path, 0)
    assert contents(folder) == before
    assert folder.mark is not None
    assert [path.name for path in folder.path.glob("data-*")] == [folder.mark.file]
    folder.close()
