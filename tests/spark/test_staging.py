"""Record batches on their way: staged by tasks, in messages or files, and found again by the driver. No broker."""

from __future__ import annotations

import contextlib
import os
import pickle
import stat
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow._fs import _MockFileSystem

from streams.errors import ConfigError, StagingError
from streams.spark.writing import folders, staging
from streams.spark.writing.batch_encoding import BatchEncoder
from streams.spark.writing.folders import StagingFolder, staging_folder
from streams.spark.writing.placing import TopicShape
from streams.spark.writing.staging import Staged, remove_files, staged_batches
from tests.spark.test_batch_encoding import decoded
from tests.unit.s3_kit import object_store

pytestmark = pytest.mark.spark


def below(root: Path | str, *names: str) -> StagingFolder:
    return StagingFolder(str(root), names or ("a", "b"), private=False)


def path_of(message: Staged) -> Path:
    assert message.folder is not None
    assert message.name is not None
    return Path(message.folder.root, *message.folder.names, message.name)


def stage(rows: Any, *, threshold: int, folder: StagingFolder | None) -> Staged:
    encoder = BatchEncoder("t", {"compression.type": "none"}, "test", lambda topic: TopicShape(1, None))
    return staging.stage(rows, encoder, threshold=threshold, folder=folder)


def open_to_all(*folders: Path) -> None:
    """Let another user into these, and into the folders of pytest above them."""
    for folder in folders:
        folder.chmod(0o755)
        for above in folder.parents:
            if above.name.startswith(("popen-", "pytest-")):
                above.chmod(0o755)


ROWS = [pa.record_batch({"value": [b"a", b"b"], "offset": [1, 2]}), pa.record_batch({"value": [b"c"], "offset": [3]})]


def values(*messages: Any) -> list[bytes]:
    return [record.value for batch in staged_batches(messages) for record in decoded(batch)]


@pytest.mark.parametrize("threshold", [0, 10, 1 << 20])
def test_there_and_back(tmp_path: Path, threshold: int) -> None:
    first = stage(iter(ROWS), threshold=threshold, folder=below(tmp_path))
    second = stage(iter(ROWS[1:]), threshold=threshold, folder=below(tmp_path))
    empty = stage(iter(()), threshold=threshold, folder=below(tmp_path))
    assert (first.rows, second.rows, empty.rows, empty.data, empty.name) == (3, 1, 0, None, None)
    assert [bool(each.name) for each in (first, second)] == [threshold < 50] * 2
    assert values(first, empty, second) == [b"a", b"b", b"c", b"c"]
    remove_files([first, second, empty])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_failed_leaves_no_file(tmp_path: Path) -> None:
    def failing() -> Any:
        yield ROWS[0]
        raise RuntimeError("upstream")

    with pytest.raises(RuntimeError, match="upstream"):
        stage(failing(), threshold=0, folder=below(tmp_path))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_rows_that_are_gone_cut_or_altered_are_an_error(tmp_path: Path) -> None:
    message = stage(iter(ROWS), threshold=0, folder=below(tmp_path))
    message.rows += 1
    with pytest.raises(StagingError, match="4 written, 3 found"):
        values(message)
    message.rows -= 1
    path = path_of(message)
    content = path.read_bytes()
    for position in range(len(content)):
        altered = bytearray(content)
        altered[position] ^= 1
        for wrong in (altered, content[:position]):
            path.write_bytes(wrong)
            with pytest.raises(StagingError, match="are not the ones that were staged"):
                values(message)
    remove_files([message])
    with pytest.raises(StagingError, match="a folder that driver and executors share"):
        values(message)


def test_without_a_shared_folder_a_message_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_LARGEST_MESSAGE", 1000)
    many = [pa.record_batch({"value": [bytes([number]) * 400] * 3}) for number in range(10)]
    with pytest.raises(ConfigError, match="give the option stagingDir"):
        stage(iter(many), threshold=0, folder=None)


def test_folders_go_when_they_are_empty_and_stay_for_others(tmp_path: Path) -> None:
    ours, others = below(tmp_path, "user", "sink", "1"), below(tmp_path, "user", "other")
    for folder in (ours, others):
        stage(iter(ROWS), threshold=0, folder=folder)
    found = {str(each) for each in below(tmp_path, "user").children()}
    assert found == {f"{tmp_path}/user/sink", f"{tmp_path}/user/other"}
    assert below(tmp_path, "nothing").children() == []
    ours.remove()
    assert [path.name for path in (tmp_path / "user").iterdir()] == ["other"]
    others.remove()
    assert list(tmp_path.iterdir()) == []
    others.remove()  # nothing there: nothing to do


def test_a_folder_that_goes_while_a_task_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, times, made = below(tmp_path), 0, StagingFolder._make_folders

    def tidied(found: StagingFolder, path: str) -> None:
        nonlocal times
        made(found, path)
        times += 1
        if times < 3:
            folder.remove()

    monkeypatch.setattr(StagingFolder, "_make_folders", tidied)
    message = stage(iter(ROWS), threshold=0, folder=folder)
    assert (values(message), times) == ([b"a", b"b", b"c"], 3)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_a_folder_on_the_way_that_goes_while_a_task_makes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """Each of them is empty when it is made, and another sink that is done removes the empty ones above its own."""
    times, make = 0, os.mkdir

    def tidied(path: str, mode: int = 0o777) -> None:
        nonlocal times
        make(path, mode)
        if Path(path).name == gone and times < 3:
            times += 1
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", tidied)
    message = stage(iter(ROWS), threshold=0, folder=below(tmp_path))
    assert (values(message), times) == ([b"a", b"b", b"c"], 3)


@pytest.mark.parametrize("address", ["s3://key:se/cret@bucket/x", "s3://key:se cret@bucket/x?region=cret"])
def test_an_address_that_is_none_is_told_without_its_secret(address: str) -> None:
    """As with a key of AWS, most of which have a "/"."""
    folder = below(address)
    with pytest.raises(
        StagingError, match=r"store of s3://bucket/x/a/b \(option stagingDir\): .*'s3://bucket/x'"
    ) as told:
        stage(iter(ROWS), threshold=0, folder=folder)
    assert "cret" not in f"{told.value}{folder!r}"


def test_somebody_elses_folder_in_the_temporary_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = staging_folder(None, "sink", one_machine=True)
    assert folder is not None
    assert staging_folder(None, "sink", one_machine=False) is None
    assert values(stage(iter(ROWS), threshold=0, folder=folder)) == [b"a", b"b", b"c"]
    ours = tmp_path / folder.names[0]
    assert ours.stat().st_mode & 0o077 == 0
    folder.remove()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    ours.symlink_to(tmp_path / "elsewhere")  # as one that another user has made: not to be followed
    with pytest.raises(StagingError, match="not this user's"):
        stage(iter(ROWS), threshold=0, folder=folder)


@pytest.mark.parametrize(("mode", "of_files"), [(0o700, 0o600), (0o2770, 0o660)])
def test_what_is_staged_is_for_those_whom_the_folder_is_for(tmp_path: Path, mode: int, of_files: int) -> None:
    """So executors of one user and a driver of another can share it; the name of no user is in the path."""
    tmp_path.chmod(mode)
    folder = staging_folder(str(tmp_path), "sink", one_machine=False)
    assert folder is not None
    path = path_of(stage(iter(ROWS), threshold=0, folder=folder / "run"))
    made = [each for each in path.parents if tmp_path in each.parents]
    assert {stat.S_IMODE(each.stat().st_mode) for each in made} == {mode}
    assert stat.S_IMODE(path.stat().st_mode) == of_files
    assert [each.name for each in made] == ["run", folder.names[1], "kes-spark"]


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """It is a file, what was in it is gone, and its disk is full."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StagingError, match=r"cannot stage rows under .*/file/a/b \(option stagingDir\): "):
        stage(iter(ROWS), threshold=0, folder=below(tmp_path / "file"))
    message = stage(iter(ROWS), threshold=0, folder=below(tmp_path))
    path_of(message).unlink()
    with pytest.raises(StagingError, match=r"cannot be read: .* Nothing was written"):
        values(message)
    target = staging._Stage(0, below(tmp_path))
    target._overflow()
    target._target.close()
    with open("/dev/full", "wb", buffering=0) as full:
        target._target = full
        with pytest.raises(StagingError, match=r"in .*\.batches \(option stagingDir\): No space left"):
            target.write(b"x" * 100)
        target.discard()
    assert [path for path in (tmp_path / "a").rglob("*") if path.is_file()] == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_users_folder_is_named_and_a_group_shares_one(tmp_path: Path) -> None:
    """As executors and a driver of two users: the other one cannot use a private folder, and empties a shared one."""
    open_to_all(tmp_path)
    folder = below(tmp_path / "shared")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    message = stage(iter(ROWS), threshold=0, folder=folder)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with contextlib.suppress(BaseException):
            stage(iter(ROWS), threshold=0, folder=below(tmp_path / "shared"))
            remove_files([message])
            try:
                stage(iter(ROWS), threshold=0, folder=below(tmp_path, "private"))
            except StagingError as error:
                os._exit(0 if "Permission denied" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not path_of(message).exists()
    folder.remove()
    assert list((tmp_path / "shared").iterdir()) == []


def test_any_store_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow's store in memory, as one that has no folders of ours; and a byte that it gives back altered."""
    store = _MockFileSystem()
    store.create_dir("bucket/staging/kes-spark/sink/run", recursive=True)
    monkeypatch.setattr(folders, "_opened", lambda root: (store, "bucket/staging"))
    folder = StagingFolder("s3://key:secret@bucket/staging?region=x", ("kes-spark", "sink"), private=False)
    message = stage(iter(ROWS), threshold=0, folder=folder / "run")
    assert values(pickle.loads(pickle.dumps(message))) == [b"a", b"b", b"c"]
    assert str(folder) == "s3://bucket/staging/kes-spark/sink"
    assert "secret" not in repr(message)
    place = f"bucket/staging/kes-spark/sink/run/{message.name}"
    with store.open_input_stream(place) as source:
        content = bytearray(source.read())
    content[70] ^= 1
    with store.open_output_stream(place) as target:
        target.write(bytes(content))
    with pytest.raises(StagingError, match="are not the ones that were staged"):
        values(message)
    (folder / "run").remove()
    assert folder.children() == []
    with pytest.raises(StagingError, match=r"staged rows in s3://bucket/staging/kes-spark/sink/run/.* cannot be read"):
        values(message)


def test_a_store_that_answers_503_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with object_store() as store:
        store.status = 503
        address = store.address.replace("s3://", "s3://k:hidden@")
        with pytest.raises(StagingError, match=r"cannot stage rows .* s3://bucket/kes/a/b.*stagingDir.*: .*") as told:
            stage(iter(ROWS), threshold=0, folder=below(address))
    assert "hidden" not in str(told.value)
    assert "503" in str(told.value)
