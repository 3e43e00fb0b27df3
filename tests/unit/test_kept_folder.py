"""Folders of state: killed, without power, spoiled. They open at a checkpoint, or are named and set aside."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.errors import ConfigError
from streams.records import Change
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders.entries import Damaged, decode, encode
from streams.runtime.keeping.folders.folder import Broken, StateFolder, read_mark
from streams.runtime.keeping.folders.parents import prepare_root
from tests.unit.kept_kit import (
    IDENTITY,
    Cut,
    FullDisk,
    Script,
    contents,
    lose_power,
    now_ms,
    put,
    reopened,
    steps_of,
    stop_at,
)
from tests.unit.waiting import open_below

SEEDS = range(5)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are rewritten when they are small, and not flushed: only a loss of power needs that."""
    monkeypatch.setattr(folder_module, "LEAST_REWRITE", 600)
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)


# -- entries -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.builds(
            Change,
            st.binary(max_size=9),
            st.none() | st.binary(max_size=9),
            st.none(),
            st.sampled_from(["", "kind", "ä"]),
        )
    ),
    st.data(),
)
def test_changes_come_back_as_they_were_however_they_are_cut(changes: list[Change], data: st.DataObject) -> None:
    written = encode(changes)
    cut = data.draw(st.integers(0, len(written)))
    first, at = decode(written[:cut])
    second, rest = decode(written[at:])
    assert first + second == changes
    assert at + rest == len(written)


def test_a_length_that_cannot_be_is_refused() -> None:
    with pytest.raises(Damaged, match="length -2"):
        decode(b"\0\0" + b"\0\0\0\0" + b"\xff\xff\xff\xfe")


# -- killed at every step ----------------------------------------------------------------------------------------------


def test_the_script_has_all_steps(tmp_path: Path) -> None:
    assert set(steps_of(tmp_path)) == {
        "create data", "write data", "flush data", "create mark.new", "flush mark.new", "rename mark.new",
        "flush folder",
    }  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_stopped_at_any_step_it_opens_at_a_checkpoint(tmp_path: Path, seed: int) -> None:
    names: list[str] = []
    Script(tmp_path / "all", seed).run(names.append)
    for number, name in enumerate(names):
        script = Script(tmp_path / f"{number}", seed)
        with pytest.raises(Cut, match=name):
            script.run(stop_at(number))
        script.check()
        Script(script.parent, seed + 1).run()  # it goes on from there


KILLED = """
import sys
from pathlib import Path
from streams.runtime.keeping.folders import folder
from tests.unit.kept_kit import Script, kill_at_each

folder.LEAST_REWRITE = 600
kill_at_each(map(int, sys.argv[2:]), lambda number, at: Script(Path(sys.argv[1], str(number))).run(at))
"""


def test_killed_at_any_step_it_opens_at_a_checkpoint(tmp_path: Path) -> None:
    """By SIGKILL, in a process of its own for each step."""
    numbers = [str(number) for number in range(len(steps_of(tmp_path / "all")))]
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), *numbers]
    subprocess.run(command, check=True, timeout=100, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    for number in numbers:
        twin = Script(tmp_path / "twins" / number)
        with pytest.raises(Cut):
            twin.run(stop_at(int(number)))
        twin.check(tmp_path / "killed" / number)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_power_at_any_step_it_opens_at_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    names: list[str] = []
    Script(tmp_path / "all", seed).run(names.append)
    for number in range(len(names)):
        lose_power(tmp_path / f"{number}", monkeypatch, number, seed)


# -- spoiled -----------------------------------------------------------------------------------------------------------


def test_no_flipped_byte_is_silent(tmp_path: Path) -> None:
    Script(tmp_path).run()
    before = reopened(tmp_path)
    folder, flips, harmless = tmp_path / "0", 0, 0
    names = [path.name for path in folder.iterdir() if path.name != "lock"]
    assert len(names) == 2
    for name in names:
        whole = (folder / name).read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 200)):
            flips += 1
            spoiled = bytearray(whole)
            spoiled[at] ^= 1 << (at % 8)
            (folder / name).write_bytes(spoiled)
            try:
                found = reopened(tmp_path)
            except Damaged:
                continue
            finally:
                (folder / name).write_bytes(whole)
            assert found == before, f"{name}, byte {at}: another state, and nothing was noticed"
            harmless += 1
    assert flips >= 200
    assert harmless <= 8, "the case of a hexadecimal digit"


def spoil(how: str, folder: Path, other: Path) -> None:
    data = next(folder.glob("data-*"))
    match how:
        case "data is missing":
            data.unlink()
        case "data is cut":
            data.write_bytes(data.read_bytes()[:-1])
        case "data is empty":
            data.write_bytes(b"")
        case "data is another partition's":
            shutil.copy(next(other.glob("data-*")), data)
        case "data is a link":
            data.rename(folder.parent / "elsewhere")
            data.symlink_to(folder.parent / "elsewhere")
        case "mark is cut":
            (folder / "mark").write_bytes((folder / "mark").read_bytes()[:-1])
        case "mark is empty":
            (folder / "mark").write_bytes(b"")
        case "mark is another partition's":
            shutil.copy(other / "mark", folder / "mark")


@pytest.mark.parametrize(
    "how",
    [
        "data is missing", "data is cut", "data is empty", "data is another partition's", "data is a link",
        "mark is cut", "mark is empty", "mark is another partition's",
    ],
)  # fmt: skip
def test_a_spoiled_folder_is_found_and_set_aside(tmp_path: Path, how: str) -> None:
    Script(tmp_path / "one").run()
    Script(tmp_path / "two", seed=3).run()
    spoil(how, tmp_path / "one" / "0", tmp_path / "two" / "0")
    folder = StateFolder.find(tmp_path / "one", 0)
    with pytest.raises((Damaged, OSError)):
        contents(folder)
    aside = folder.set_aside()
    assert contents(folder) == (-1, {})
    folder.append([put(b"k", b"v")])
    folder.commit(IDENTITY, 3, b"{}", now_ms())
    folder.close()
    assert reopened(tmp_path / "one") == (3, {b"k": b"v"})
    assert aside.is_dir()


def test_a_folder_without_a_mark_is_empty(tmp_path: Path) -> None:
    Script(tmp_path).run()
    (tmp_path / "0" / "mark").unlink()
    assert reopened(tmp_path) == (-1, {})


# -- who may use it ----------------------------------------------------------------------------------------------------


def test_one_process_per_folder_the_second_gets_another_one(tmp_path: Path) -> None:
    first = StateFolder.find(tmp_path, 0)
    second = StateFolder.find(tmp_path, 0)
    assert (first.path.name, second.path.name) == ("0", "0.1")
    first.append([put(b"a", b"1")])
    first.commit(IDENTITY, 5, b"{}", now_ms())
    second.append([put(b"a", b"2")])
    second.commit(IDENTITY, 9, b"{}", now_ms())
    second.close()
    third = StateFolder.find(tmp_path, 0)
    assert third.path.name == "0.1", "the first is still in use"
    third.close()
    first.close()
    farthest = StateFolder.find(tmp_path, 0)
    assert contents(farthest) == (9, {b"a": b"2"})
    assert (tmp_path / "0").exists(), "the older one may be needed yet"
    farthest.remove_spares()
    farthest.close()
    assert not (tmp_path / "0").exists()


def test_a_folder_that_is_half_removed_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process opens the place of a folder whose file ``lock`` is gone already; then the remover is killed."""
    for name, offset in (("0", 5), ("0.1", 9)):
        folder = StateFolder.open(tmp_path / name)
        assert folder is not None
        folder.append([put(b"a", b"1")])
        folder.commit(IDENTITY, offset, b"{}", now_ms())
        folder.close()

    class Killed(BaseException):
        pass

    def lock_first(path: Path, *, ignore_errors: bool) -> None:
        (path / "lock").unlink()
        other = StateFolder.open(tmp_path / "0")
        assert other is not None
        assert read_mark(other.path) is None
        other.close()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lock_first)
        folder = StateFolder.find(tmp_path, 0)
        with pytest.raises(Killed):
            folder.remove_spares()
        folder.close()
    assert reopened(tmp_path) == (9, {b"a": b"1"})
    assert [path.name for path in tmp_path.iterdir()] == ["0.1"], "nothing of the removed one is left"


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0").chmod(mode)
    with pytest.raises(PermissionError, match="chmod go-w"):
        StateFolder.find(tmp_path, 0)


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "0").symlink_to(tmp_path / "real")
    with pytest.raises(NotADirectoryError, match="link"):
        StateFolder.find(tmp_path, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir(mode=0o700)
    os.chown(tmp_path / "0", 12345, -1)
    with pytest.raises(PermissionError, match="user 12345"):
        StateFolder.find(tmp_path, 0)


def test_the_root_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("file", "open"):
        with pytest.raises(ConfigError, match=r"StateConfig.folder is .*" + name):
            prepare_root(str(tmp_path / name), "g", "in")
    parent = prepare_root(str(tmp_path / "state"), "..", "in")
    assert parent == tmp_path / "state" / "group-.." / "topic-in"
    assert stat.S_IMODE(parent.stat().st_mode) == 0o700


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    Script(tmp_path).run()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "0").iterdir()} == {0o600}


# -- no room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 5, 100, 700, 1500])
def test_a_full_disk_takes_nothing_and_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    Script(tmp_path).run()
    folder = StateFolder.find(tmp_path, 0)
    before = contents(folder)
    disk = FullDisk(monkeypatch, room)
    changes = [put(b"new %d" % number, bytes(50)) for number in range(40)]
    with pytest.raises(OSError, match="No space"):
        folder.append(changes)
    assert reopened_beside(folder) == before
    disk.room = 1 << 30
    folder.append(changes)
    folder.commit(IDENTITY, 1_000, b"{}", now_ms())
    folder.rewrite_if_due()
    folder.close()
    offset, state = reopened(tmp_path)
    assert offset == 1_000
    assert state == before[1] | {change.key: change.value for change in changes}


def reopened_beside(folder: StateFolder) -> tuple[int, dict[bytes, bytes]]:
    """What a process would find that opened it now."""
    return contents(StateFolder(folder.path, -1))


def test_a_flush_that_fails_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports it once; what was not written is taken for written afterwards."""
    folder = StateFolder.find(tmp_path, 0)
    folder.append([put(b"a", b"1")])

    def fails(handle: int) -> None:
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(folder_module.os, "fsync", fails)
    with pytest.raises(Broken, match="cannot be flushed: lost"):
        folder.commit(IDENTITY, 5, b"{}", now_ms())
    folder.close()
    assert reopened(tmp_path) == (-1, {})


# -- opened and closed -------------------------------------------------------------------------------------------------


def test_a_thousand_opens_leave_no_handle_behind(tmp_path: Path) -> None:
    Script(tmp_path).run()
    for number in range(1_000):
        folder = StateFolder.find(tmp_path, 0)
        contents(folder)
        folder.append([put(b"k", b"%d" % number)])
        if number % 100 == 0:
            folder.commit(IDENTITY, 1_000 + number, b"{}", now_ms())
        folder.close()
    assert open_below(tmp_path) == []


def test_the_file_stays_small_however_often_a_key_is_written(tmp_path: Path) -> None:
    folder = StateFolder.find(tmp_path, 0)
    for number in range(300):
        folder.append([put(b"hot", bytes(50)), put(b"key %d" % number, None if number % 3 else b"v")], pause=False)
        folder.commit(IDENTITY, number, b"{}", now_ms())
        folder.rewrite_if_due(pause=False)
    files = list(folder.path.glob("data-*"))
    assert len(files) == 1
    live = sum(len(key) + len(value) + 10 for key, value in contents(folder)[1].items())
    assert files[0].stat().st_size <= 2.5 * max(live, 600)
    folder.close()


def test_a_folder_that_is_flushed_has_no_file_open_but_its_lock(tmp_path: Path) -> None:
    """A process may have hundreds of partitions."""
    folder = StateFolder.find(tmp_path, 0)
    for offset in range(3):
        folder.append([put(b"key", bytes(2 << 20))], pause=False)
        folder.commit(IDENTITY, offset, b"{}", now_ms())
        assert len(open_below(tmp_path)) == 1
        folder.rewrite_if_due(pause=False)
        assert len(open_below(tmp_path)) == 1
    folder.close()
    assert reopened(tmp_path) == (2, {b"key": bytes(2 << 20)})
