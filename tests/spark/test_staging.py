"""Record batches on their way: staged by tasks, in messages or files, and found again by the driver. No broker."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streams.errors import ConfigError, StagingError
from streams.spark.writing import staging
from streams.spark.writing.batch_encoding import BatchEncoder
from streams.spark.writing.placing import TopicShape
from streams.spark.writing.staging import Staged, remove, remove_files, staged_batches, staging_folder
from tests.spark.test_batch_encoding import decoded

pytestmark = pytest.mark.spark


def stage(rows: Any, *, threshold: int, folder: Path | None) -> Staged:
    encoder = BatchEncoder("t", {"compression.type": "none"}, "test", lambda topic: TopicShape(1, None))
    return staging.stage(rows, encoder, threshold=threshold, folder=folder)


ROWS = [pa.record_batch({"value": [b"a", b"b"], "offset": [1, 2]}), pa.record_batch({"value": [b"c"], "offset": [3]})]


def values(*messages: Any) -> list[bytes]:
    return [record.value for batch in staged_batches(messages) for record in decoded(batch)]


@pytest.mark.parametrize("threshold", [0, 10, 1 << 20])
def test_there_and_back(tmp_path: Path, threshold: int) -> None:
    first = stage(iter(ROWS), threshold=threshold, folder=tmp_path / "a" / "b")
    second = stage(iter(ROWS[1:]), threshold=threshold, folder=tmp_path / "a" / "b")
    empty = stage(iter(()), threshold=threshold, folder=tmp_path / "a" / "b")
    assert (first.rows, second.rows, empty.rows, empty.data, empty.path) == (3, 1, 0, None, None)
    assert [bool(each.path) for each in (first, second)] == [threshold < 50] * 2
    assert values(first, empty, second) == [b"a", b"b", b"c", b"c"]
    remove_files([first, second, empty])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_failed_leaves_no_file(tmp_path: Path) -> None:
    def failing() -> Any:
        yield ROWS[0]
        raise RuntimeError("upstream")

    with pytest.raises(RuntimeError, match="upstream"):
        stage(failing(), threshold=0, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_gone_cut_or_altered_are_an_error(tmp_path: Path) -> None:
    message = stage(iter(ROWS), threshold=0, folder=tmp_path)
    message.rows += 1
    with pytest.raises(StagingError, match="4 written, 3 found"):
        values(message)
    message.rows -= 1
    assert message.path
    content = Path(message.path).read_bytes()
    for position in range(len(content)):
        altered = bytearray(content)
        altered[position] ^= 1
        for wrong in (altered, content[:position]):
            Path(message.path).write_bytes(wrong)
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
    ours, others = tmp_path / "user" / "sink" / "1", tmp_path / "user" / "other"
    for folder in (ours, others):
        stage(iter(ROWS), threshold=0, folder=folder)
    remove(ours, up_to=tmp_path)
    assert [path.name for path in (tmp_path / "user").iterdir()] == ["other"]
    remove(others, up_to=tmp_path)
    assert list(tmp_path.iterdir()) == []
    remove(others, up_to=tmp_path)  # nothing there: nothing to do


def test_a_folder_that_goes_while_a_task_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, times = tmp_path / "a" / "b", 0

    def tidied(found: Path) -> None:
        nonlocal times
        times += 1
        if times < 3:
            remove(found, up_to=tmp_path)

    monkeypatch.setattr(staging, "_check_own", tidied)
    message = stage(iter(ROWS), threshold=0, folder=folder)
    assert (values(message), times) == ([b"a", b"b", b"c"], 3)


def test_somebody_elses_folder_in_the_temporary_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = staging_folder(None, "sink", one_machine=True)
    assert folder is not None
    assert staging_folder(None, "sink", one_machine=False) is None
    assert values(stage(iter(ROWS), threshold=0, folder=folder)) == [b"a", b"b", b"c"]
    assert folder.parent.stat().st_mode & 0o077 == 0
    remove(folder, up_to=tmp_path)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.parent.symlink_to(tmp_path / "elsewhere")  # as one that another user has made: not to be followed
    with pytest.raises(StagingError, match="not this user's"):
        stage(iter(ROWS), threshold=0, folder=folder)
