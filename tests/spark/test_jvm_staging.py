"""Rows that tasks in Java have staged: found by the half in Python, and folders that cannot be used. No session."""

from __future__ import annotations

import base64
import json
import os
import resource
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streams.errors import StagingError
from streams.spark.writing.batch_encoding import BatchEncoder
from streams.spark.writing.folders import StagingFolder
from streams.spark.writing.placing import TopicShape
from streams.spark.writing.staging import Staged, StagedBatch
from tests.spark.test_jvm_encoding import compiled
from tests.spark.test_staging import below, open_to_all, path_of, values

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(shutil.which("javac") is None, reason="there is no JDK"),
]

ROWS = [b"a", b"b", b"c" * 100_000]
NOBODY = 65_534


class Java:
    """Stages the same rows in any folder, as a task in Java does."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._command, self._folder = command, folder
        encoder = BatchEncoder("t", {"compression.type": "none"}, "test", lambda topic: TopicShape(1, None))
        self._batches = [*encoder.encode([pa.record_batch({"value": ROWS})])]

    def staged(self, *folders: StagingFolder, threshold: int = 0, **run: Any) -> list[Any]:
        """The message of each task, or its error. ``run``: arguments of ``subprocess.run``."""
        batches = [
            [*made[:3], base64.b64encode(made.head + made.body).decode(), made.checksum] for made in self._batches
        ]
        cases = [
            {
                "root": folder.root,
                "names": folder.names,
                "owner": os.getuid() if folder.private else -1,
                "threshold": threshold,
                "rows": len(ROWS),
                "batches": batches,
            }
            for folder in folders
        ]
        (self._folder / "cases").write_text(json.dumps(cases))
        words = [*self._command, str(self._folder / "cases")]
        ended = subprocess.run(words, capture_output=True, text=True, check=True, **run)
        return [
            found["error"] if "error" in found else self._message(folder, found)
            for folder, found in zip(folders, json.loads(ended.stdout), strict=True)
        ]

    @staticmethod
    def _message(folder: StagingFolder, found: dict[str, Any]) -> Staged:
        data = None if found["data"] is None else base64.b64decode(found["data"])
        batches = [StagedBatch(**batch) for batch in found["batches"]]
        return Staged(found["rows"], found["size"], data, folder if found["name"] else None, found["name"], batches)


@pytest.fixture(scope="module")
def java(kes_jar: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Java:
    assert kes_jar is not None
    folder = tmp_path_factory.mktemp("classes")
    open_to_all(folder, kes_jar.parent)
    return Java(compiled(kes_jar, "StageRows", folder), folder)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_there_and_back(java: Java, tmp_path: Path) -> None:
    """In a message, and in a file for those whom the folder is for; what is gone, cut or altered is not written."""
    (in_memory,) = java.staged(below(tmp_path), threshold=1 << 20)
    assert (in_memory.name, values(in_memory), files(tmp_path)) == (None, ROWS, [])
    modes = (0o700, 0o600), (0o2770, 0o660)
    roots = [tmp_path / f"{mode:o}" for mode, _ in modes]
    for root, (mode, _) in zip(roots, modes, strict=True):
        root.mkdir()
        root.chmod(mode)
    messages = java.staged(*map(below, roots))
    for message, (mode, of_files) in zip(messages, modes, strict=True):
        assert values(message) == ROWS
        path = path_of(message)
        assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path.parents[1])] == [mode, mode]
        assert stat.S_IMODE(path.stat().st_mode) == of_files
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    for wrong in (content, content[:-1]):
        path.write_bytes(wrong)
        with pytest.raises(StagingError, match=r"are not the ones that were staged.*Nothing was written"):
            values(message)
    path.unlink()
    with pytest.raises(StagingError, match=r"cannot be read: .*stagingDir.*Nothing was written"):
        values(message)


def test_a_folder_that_cannot_be_used_is_named_and_nothing_is_left(java: Java, tmp_path: Path) -> None:
    """It is a file, may not be written, has no room any more, or somebody else has made it in the temporary folder."""
    (tmp_path / "file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ours").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "open").mkdir(mode=0o755)
    private = [StagingFolder(str(tmp_path), (name, "x"), private=True) for name in ("ours", "open")]
    a_file, read_only, foreign, opened = java.staged(below(tmp_path / "file"), below("/sys/kes"), *private)
    for error, place in ((a_file, tmp_path / "file"), (read_only, "/sys/kes")):
        assert f"streams.errors.StagingError: cannot stage rows in {place}/a/b (option stagingDir): " in error
    assert f"{tmp_path}/ours is not this user's: remove it, or give the option stagingDir" in foreign
    assert values(opened) == ROWS
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700, "nobody reads along"
    path_of(opened).unlink()

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    (full,) = java.staged(below(tmp_path / "full"), preexec_fn=no_room)
    assert f"cannot stage rows in {tmp_path}/full/a/b (option stagingDir): java.io.IOException: File too large" in full
    assert files(tmp_path) == [tmp_path / "file"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_users_folder_is_named_and_a_group_shares_one(java: Java, tmp_path: Path) -> None:
    open_to_all(tmp_path)
    for name, mode in (("shared", 0o777), ("private", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    folders = below(tmp_path / "shared"), below(tmp_path / "private")
    java.staged(*folders)
    there, refused = java.staged(*folders, user=NOBODY)
    assert values(there) == ROWS
    assert path_of(there).stat().st_uid == NOBODY
    assert f"cannot stage rows in {tmp_path}/private/a/b (option stagingDir): java.nio.file.AccessDenied" in refused
