"""The executor's side of a write: rows are *staged*, never sent.

When something upstream fails, when a query is stopped or a task is killed, the iterator that Spark hands to a Python
sink ends cleanly, with part of the rows. So ``write`` cannot know whether it has seen all of them, and nothing may be
finished in it. Only Spark's driver knows: it calls ``commit`` with the messages of the attempts that succeeded, one
for each task. The rows travel in these messages while they are few, else in files that the messages name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
from confluent_kafka.admin import AdminClient
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from streams.errors import ConfigError, StateDiskError, StreamsError
from streams.spark.commit import commit_once, find_write
from streams.spark.kafka import client, partitions_of
from streams.spark.write_options import WriteOptions

HEADERS_TYPE: Final = t.ArrayType(
    t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.BinaryType())])
)
_INTEGER: Final = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
SINK_COLUMNS: Final[dict[str, tuple[type[t.DataType], ...]]] = {
    "topic": (t.StringType,),
    "key": (t.BinaryType, t.StringType),
    "value": (t.BinaryType, t.StringType),
    "type": (t.StringType,),
    "version": _INTEGER,
    "headers": (t.ArrayType,),
    "partition": _INTEGER,
    "timestamp": (t.TimestampType,),
}
"""What a written row may have; ``value`` is the only one it must have. Null key: spread; null value: a tombstone."""
_IGNORED: Final = frozenset({"offset"})  # so that what was read can be written as it is

_LARGEST_MESSAGE: Final = 256 << 20

_log = logging.getLogger(__name__)


class Staged(WriterCommitMessage):
    """What one task leaves for the driver: Arrow IPC (lz4) in ``data``, or in the file ``path``."""

    def __init__(self, rows: int, size: int, data: bytes | None, path: str | None) -> None:
        self.rows = rows
        self.size = size
        self.data = data
        self.path = path


class BatchWriter(DataSourceArrowWriter):
    """One exactly-once write. Built once by Spark, then copied to the tasks and to the process that commits."""

    def __init__(self, options: WriteOptions, schema: t.StructType, *, one_machine: bool) -> None:
        check_columns(schema, options)
        self._options = options
        partitions_of(client(AdminClient, options.kafka), {options.marker_topic}, options.kafka)  # before any work
        self._run = options.run_id or uuid.uuid4().hex
        folder = options.staging_dir or (tempfile.gettempdir() if one_machine else None)
        identity = hashlib.sha256(f"{options.topic}\0{options.write_id}".encode()).hexdigest()[:24]
        self._folder = None if folder is None else str(Path(folder) / f"kes-spark-{os.getuid()}" / identity)
        # Only a hint that saves work: what decides is read again at commit time, behind the fence.
        self._done = find_write(options) is not None

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of one task. Talks to no broker."""
        if self._done:
            return Staged(0, 0, None, None)
        stage = _Stage(
            self._options.staging_threshold, None if self._folder is None else Path(self._folder) / self._run
        )
        writer, rows = None, 0
        try:
            for batch in iterator:
                kept = batch.select([name for name in batch.schema.names if name in SINK_COLUMNS])
                if writer is None:
                    writer = pa.ipc.new_stream(
                        pa.PythonFile(stage, mode="w"), kept.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
                    )
                writer.write_batch(kept)
                rows += kept.num_rows
            if writer is not None:
                writer.close()
        except BaseException:
            stage.discard()
            raise
        data, path = stage.finish()
        return Staged(rows, stage.size, data, path)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All rows and the marker in one transaction. Called once, in the driver, when every task has succeeded."""
        staged = [message for message in messages if isinstance(message, Staged)]
        if len(staged) != len(messages):
            raise StreamsError("Spark handed over a write with messages missing; nothing was written")
        try:
            result = commit_once(
                self._options,
                self._run,
                rows=sum(message.rows for message in staged),
                size=sum(message.size for message in staged),
                batches=lambda: (batch for message in staged for batch in _staged_batches(message)),
            )
        finally:
            self._clean()
        if not result.written:
            _log.warning("write %r was done before (%d rows): nothing was written", result.write_id, result.rows)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing of the write is anywhere but in staged files. May be called while tasks are still writing."""
        self._clean()

    def _clean(self) -> None:
        if self._folder is not None:  # also what killed runs of the same write have left behind
            shutil.rmtree(self._folder, ignore_errors=True)


def check_columns(schema: t.StructType, options: WriteOptions) -> None:
    """Raises ``ConfigError`` (column named) for rows that are no records."""
    for field in schema.fields:
        if field.name in _IGNORED:
            continue
        taken = SINK_COLUMNS.get(field.name)
        if taken is None:
            raise ConfigError(
                f"column {field.name} is no part of a record; drop it (known: {', '.join(SINK_COLUMNS)}), or make "
                "events of "
                "the rows with streams.spark.encode"
            )
        if not isinstance(field.dataType, taken):
            wanted = " or ".join(kind.typeName() for kind in taken)
            raise ConfigError(f"column {field.name} must be {wanted}, not {field.dataType.simpleString()}")
    if "value" not in schema.names:
        raise ConfigError("column value is missing: it holds the record's bytes (streams.spark.encode makes it)")
    if options.topic is None and "topic" not in schema.names:
        raise ConfigError("option topic is missing, and the rows have no column topic either")
    if "headers" in schema.names and schema["headers"].dataType.simpleString() != HEADERS_TYPE.simpleString():
        raise ConfigError("column headers must be array<struct<key: string, value: binary>>")


class _Stage(io.RawIOBase):
    """A sink of bytes that begins in memory and moves to a file when it has grown past a threshold."""

    def __init__(self, threshold: int, folder: Path | None) -> None:
        self._threshold = threshold
        self._folder = folder
        self._target: IO[bytes] = io.BytesIO()
        self._path: Path | None = None
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        length = self._target.write(data)
        self.size += length
        if self._path is None and self.size > self._threshold:
            self._overflow()
        return length

    def _overflow(self) -> None:
        if self._folder is None:
            if self.size > _LARGEST_MESSAGE:
                raise ConfigError(
                    f"a task has more than {_LARGEST_MESSAGE >> 20} MiB to write: give the option stagingDir (a "
                    "folder that "
                    "driver and executors share), or split the rows into more partitions"
                )
            return
        memory = self._target
        assert isinstance(memory, io.BytesIO)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path = self._folder / f"{uuid.uuid4().hex}.arrow"
            self._target = open(self._path, "xb", buffering=1 << 20)  # noqa: SIM115
            self._target.write(memory.getbuffer())
        except OSError as error:
            raise StateDiskError(
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
            raise StateDiskError(f"cannot stage rows in {self._path} (option stagingDir): {error.strerror}") from error
        return None, str(self._path)

    def discard(self) -> None:
        """Remove what was staged; never raises."""
        with contextlib.suppress(OSError):
            self._target.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _staged_batches(message: Staged) -> Iterator[Any]:
    """The rows of one task again; raises when they are not all there."""
    if not message.rows:
        return
    found = 0
    try:
        source = pa.memory_map(message.path) if message.path else pa.py_buffer(message.data)
        for batch in pa.ipc.open_stream(source):
            found += batch.num_rows
            yield batch
    except OSError as error:
        raise StateDiskError(
            f"staged rows in {message.path} cannot be read: the option stagingDir must be a folder that driver "
            "and executors "
            f"share ({error})"
        ) from error
    if found != message.rows:
        raise StateDiskError(
            f"staged rows in {message.path or 'a commit message'}: {message.rows} written, {found} found"
        )
