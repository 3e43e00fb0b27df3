"""Rows on their way from a task to the driver: in the message of the task while they are few, else in a file it names.

Nothing of this is visible to readers. A staged file that no task comes back for (its task was killed, its run died)
lies in a folder that the next run of the same write or query removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from pyspark.sql.datasource import WriterCommitMessage

from streams.clients.producing.made_batch import MadeBatch
from streams.clients.producing.record_batch import BATCH_HEAD
from streams.errors import ConfigError, StagingError
from streams.spark.writing.batch_encoding import BatchEncoder

_LARGEST_MESSAGE: Final = 256 << 20
_FOLDER_ATTEMPTS: Final = 10


class StagedBatch(NamedTuple):
    """One record batch, in the order of their bytes. ``checksum``: of all of them, so that what was altered on its way
    is seen before Kafka gets it."""

    topic: str
    partition: int
    partitions: int
    size: int
    checksum: int


@dataclass
class Staged(WriterCommitMessage):
    """The result of one task for the driver: record batches one after the other in ``data``, or in the file ``path``.

    ``batches`` says what lies there. ``query`` and ``batch`` are those that Spark gave the task, ``None`` outside of a
    streaming query.
    """

    rows: int
    size: int
    data: bytes | None = field(repr=False)
    path: str | None
    batches: list[StagedBatch] = field(default_factory=list, repr=False)
    query: str | None = None
    batch: int | None = None


def staging_folder(given: str | None, identity: str, *, one_machine: bool) -> Path | None:
    """Return the folder where a write may keep files; ``None`` when there is no place that its tasks and the driver
    share."""
    root = given or (tempfile.gettempdir() if one_machine else None)
    if root is None:
        return None
    return Path(root) / f"kes-spark-{os.getuid()}" / hashlib.sha256(identity.encode()).hexdigest()[:24]


def stage(iterator: Iterable[Any], encoder: BatchEncoder, *, threshold: int, folder: Path | None) -> Staged:
    """Stage the rows of one task as record batches. Writes nothing to a broker. More than ``threshold`` bytes go into a
    file in ``folder``."""
    target = _Stage(threshold, folder)
    batches = []
    try:
        for made in encoder.encode(iterator):
            batches.append(StagedBatch(made.topic, made.partition, made.partitions, made.size, made.checksum))
            target.write(made.head)
            target.write(made.body)
    except BaseException:
        target.discard()
        raise
    data, path = target.finish()
    return Staged(encoder.rows, target.size, data, path, batches)


def staged_batches(messages: Iterable[Staged]) -> Iterator[MadeBatch]:
    """The batches again, task after task; raises ``StagingError`` if something of them is missing or altered."""
    for message in messages:
        if not message.rows:
            continue
        found = 0
        try:
            with open(message.path, "rb") if message.path else io.BytesIO(message.data or b"") as source:
                for batch in message.batches:
                    made = MadeBatch(*batch[:3], source.read(BATCH_HEAD), source.read(batch.size - BATCH_HEAD))
                    if made.size != batch.size or made.checksum != batch.checksum:
                        raise StagingError(
                            f"staged rows in {message.path or 'a commit message'} are not the ones that were staged "
                            f"({made.size} of {batch.size} bytes of a batch of {batch.topic}[{batch.partition}], or "
                            "another checksum): the file was cut or altered. Nothing was written"
                        )
                    found += made.records
                    yield made
        except OSError as error:
            raise StagingError(
                f"staged rows in {message.path} cannot be read: the option stagingDir must be a folder that driver "
                f"and executors share ({error})"
            ) from error
        if found != message.rows:
            place = message.path or "a commit message"
            raise StagingError(f"staged rows in {place}: {message.rows} written, {found} found")


def remove(folder: Path, *, up_to: Path) -> None:
    """Remove a folder and the empty ones above it, those in ``up_to`` last. Never raises."""
    shutil.rmtree(folder, ignore_errors=True)
    for parent in folder.parents:
        if parent == up_to or not parent.is_relative_to(up_to):
            return
        with contextlib.suppress(OSError):
            parent.rmdir()  # fails while another run has something in it


def remove_files(messages: Iterable[Staged]) -> None:
    """Remove what these messages name. Never raises."""
    for message in messages:
        if message.path:
            with contextlib.suppress(OSError):
                os.unlink(message.path)


class _Stage:
    """A sink of bytes that begins in memory and moves to a file when it has grown past a threshold."""

    def __init__(self, threshold: int, folder: Path | None) -> None:
        self._threshold = threshold
        self._folder = folder
        self._target: IO[bytes] = io.BytesIO()
        self._path: Path | None = None
        self.size = 0

    def write(self, data: bytes) -> None:
        """Raises ``StagingError``, ``ConfigError``."""
        try:
            self._target.write(data)
        except OSError as error:
            raise self._failed(error) from error
        self.size += len(data)
        if self._path is None and self.size > self._threshold:
            self._overflow()

    def _overflow(self) -> None:
        if self._folder is None:
            if self.size > _LARGEST_MESSAGE:
                raise ConfigError(
                    f"a task has more than {_LARGEST_MESSAGE >> 20} MiB to write: give the option stagingDir (a "
                    "folder that driver and executors share), or split the rows into more partitions"
                )
            return
        memory = self._target
        assert isinstance(memory, io.BytesIO)
        try:
            self._path, self._target = _new_file(self._folder)
            self._target.write(memory.getbuffer())
        except OSError as error:
            raise StagingError(
                f"cannot stage rows under {self._folder} (option stagingDir): {error.strerror}"
            ) from error

    def finish(self) -> tuple[bytes | None, str | None]:
        """The bytes, or the path of the file that has them; both ``None`` when there are none."""
        if self._path is None:
            assert isinstance(self._target, io.BytesIO)
            return (self._target.getvalue() if self.size else None), None
        try:
            self._target.close()
        except OSError as error:
            raise self._failed(error) from error
        return None, str(self._path)

    def _failed(self, error: OSError) -> StagingError:
        return StagingError(f"cannot stage rows in {self._path} (option stagingDir): {error.strerror}")

    def discard(self) -> None:
        """Remove what was staged; never raises."""
        with contextlib.suppress(OSError):
            self._target.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _check_own(folder: Path) -> None:
    """Any user may write into the temporary folder, so ours in it may be another user's: made before, to read along."""
    for place in (folder, *folder.parents):
        if place.name == f"kes-spark-{os.getuid()}" and place.parent == Path(tempfile.gettempdir()):
            found = place.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise StagingError(
                    f"{place} is not this user's: remove it, or give the option stagingDir (a folder of your own)"
                )
            if found.st_mode & 0o077:
                place.chmod(0o700)  # the mode that mkdir is given is that of the last folder only


def _new_file(folder: Path) -> tuple[Path, IO[bytes]]:
    for attempt in range(_FOLDER_ATTEMPTS):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_own(folder)
        path = folder / f"{uuid.uuid4().hex}.batches"
        try:
            return path, open(path, "xb", buffering=1 << 20)
        except FileNotFoundError:  # another run has just tidied up the empty folder
            if attempt == _FOLDER_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")
