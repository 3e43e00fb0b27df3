"""Rows on their way from a task to the driver: in the message of the task while they are few, else in a file it names.

Nothing of this is visible to readers. A staged file that no task comes back for (its task was killed, its run died)
lies in a folder that the next run of the same write or query removes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from streams.errors import ConfigError, StagingError
from streams.kafka.wire.placement import BATCH_HEAD
from streams.kafka.writing.made_batch import MadeBatch
from streams.spark.writing.batch_encoding import BatchEncoder
from streams.spark.writing.folders import StagingFolder, reason

_LARGEST_MESSAGE: Final = 256 << 20


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
    """The result of one task for the driver: record batches one after the other in ``data``, or in the file ``name`` of
    ``folder``.

    ``batches`` says what lies there. ``query`` and ``batch`` are those that Spark gave the task, ``None`` outside of a
    streaming query.
    """

    rows: int
    size: int
    data: bytes | None = field(repr=False)
    folder: StagingFolder | None = None
    name: str | None = None
    batches: list[StagedBatch] = field(default_factory=list, repr=False)
    query: str | None = None
    batch: int | None = None

    @property
    def where(self) -> str:
        """The place for messages."""
        return "a commit message" if self.name is None else f"{self.folder}/{self.name}"


def stage(iterator: Iterable[Any], encoder: BatchEncoder, *, threshold: int, folder: StagingFolder | None) -> Staged:
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
    # After the last row: only a file that is closed is whole in its store, and only then may its name go to the driver.
    data, name = target.finish()
    return Staged(encoder.rows, target.size, data, folder if name else None, name, batches)


def staged_batches(messages: Iterable[Staged]) -> Iterator[MadeBatch]:
    """The batches again, task after task; raises ``StagingError`` if something of them is missing or altered."""
    for message in messages:
        if not message.rows:
            continue
        found, where = 0, message.where
        try:
            with _opened(message) as source:
                for batch in message.batches:
                    made = MadeBatch(*batch[:3], source.read(BATCH_HEAD), source.read(batch.size - BATCH_HEAD))
                    if made.size != batch.size or made.checksum != batch.checksum:
                        raise StagingError(
                            f"staged rows in {where} are not the ones that were staged ({made.size} of {batch.size} "
                            f"bytes of a batch of {batch.topic}[{batch.partition}], or another checksum): the file was "
                            "cut or altered. Nothing was written"
                        )
                    found += made.records
                    yield made
        except (OSError, pa.ArrowException) as error:
            raise StagingError(
                f"staged rows in {where} cannot be read: the option stagingDir must be a folder that driver and "
                f"executors share, and its store must be there ({reason(error)}). Nothing was written"
            ) from None
        if found != message.rows:
            raise StagingError(f"staged rows in {where}: {message.rows} written, {found} found")


def _opened(message: Staged) -> Any:
    if message.folder is None or message.name is None:
        return io.BytesIO(message.data or b"")
    return message.folder.open(message.name)


def remove_files(messages: Iterable[Staged]) -> None:
    """Remove what these messages name. Never raises."""
    for message in messages:
        if message.folder is not None and message.name is not None:
            message.folder.delete(message.name)


class _Stage:
    """A sink of bytes that begins in memory and moves to a file when it has grown past a threshold."""

    def __init__(self, threshold: int, folder: StagingFolder | None) -> None:
        self._threshold = threshold
        self._folder = folder
        self._target: Any = io.BytesIO()
        self._name: str | None = None
        self.size = 0

    def write(self, data: bytes) -> None:
        """Raises ``StagingError``, ``ConfigError``."""
        with self._clear():
            self._target.write(data)
        self.size += len(data)
        if self._name is None and self.size > self._threshold:
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
        self._name, self._target = self._folder.create()
        with self._clear():
            self._target.write(memory.getbuffer())

    def finish(self) -> tuple[bytes | None, str | None]:
        """The bytes, or the name of the file that has them; both ``None`` when there are none."""
        if self._name is None:
            return (self._target.getvalue() if self.size else None), None
        with self._clear():
            self._target.close()  # a store keeps nothing before
        return None, self._name

    @contextlib.contextmanager
    def _clear(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise StagingError(
                f"cannot stage rows in {self._folder}/{self._name} (option stagingDir): {reason(error)}"
            ) from None

    def discard(self) -> None:
        """Remove what was staged; never raises."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self._target.close()
        if self._folder is not None and self._name is not None:
            self._folder.delete(self._name)
