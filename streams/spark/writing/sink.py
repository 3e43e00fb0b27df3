"""``df.write`` and ``df.writeStream`` of ``format("grt")``: a DataFrame, or each micro-batch of a stream, exactly once.

When something upstream fails, when a query is stopped or a task is killed, the iterator that Spark hands to a Python
sink ends cleanly, with part of the rows. So ``write`` cannot know whether it has seen all of them, and nothing may be
finished in it: it stages. Only Spark's driver knows: it calls ``commit`` with the messages of the attempts that
succeeded, one for each task.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from streams.errors import ConfigError, StreamsError
from streams.spark.columns import check_columns
from streams.spark.kafka import identity_of
from streams.spark.writing.batch_encoding import BatchEncoder
from streams.spark.writing.folders import StagingFolder, staging_folder
from streams.spark.writing.marker_log import MarkerLog
from streams.spark.writing.markers import BatchRequest, WriteRequest, written_by
from streams.spark.writing.placing import topic_shapes
from streams.spark.writing.sink_transaction import WriteTarget, read_marker, settle, write_once
from streams.spark.writing.staging import Staged, remove_files, stage, staged_batches
from streams.spark.writing.write_options import SinkOptions, StreamWriteOptions, WriteOptions

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """The result of a write: ``written`` by this run, or (``False``) by an earlier one with the same id; ``rows`` of
    the one that did."""

    write_id: str
    rows: int
    written: bool
    committed_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPart:
    """The part of a write that its tasks must know. ``done``: it was written before, and there is nothing to stage.
    ``streaming``: the folder, and what messages say, end with the query and batch of the task."""

    options: SinkOptions
    doing: str
    folder: StagingFolder | None
    run: str | None = None
    done: bool = False
    streaming: bool = False

    def folder_of(self, query: str | None, batch: int | None) -> StagingFolder | None:
        """Return the folder where a task keeps files."""
        return self.folder if self.folder is None or query is None else self.folder / query / str(batch)


def target_of(options: WriteOptions | StreamWriteOptions) -> WriteTarget:
    """Transactional id and marker group of a write, or of a sink. The topic is in it: one name over two topics is two
    writes, or sinks, which leave each other alone."""
    # Neither a prefix nor a topic's name has a "/", so what comes before the first one is a kind of write: no two
    # targets share an identity.
    prefix = options.id_prefix
    if isinstance(options, WriteOptions):
        return WriteTarget.of(f"{prefix}kes.spark.write.{options.topic or '*'}/{options.write_id}", options)
    return WriteTarget.of(f"{prefix}kes.spark.stream/{options.marker_topic}/{options.sink}", options)


def find_write(options: WriteOptions) -> WriteResult | None:
    """The committed write of this id, or ``None``. Only a read: a run that is about to commit may not show yet."""
    target, doing = target_of(options), f"write {options.write_id!r}"
    stored = read_marker(target, doing)
    if stored is None and target.marker_log is not None:
        stored = MarkerLog(target.marker_log, target.identity, target.kafka, doing).read()
    found = written_by(stored)
    if found is None:
        return None
    written = found.run == options.run_id
    return WriteResult(write_id=options.write_id, rows=found.rows, written=written, committed_at_ms=found.at_ms)


class BatchWriter(DataSourceArrowWriter):
    """One exactly-once write. Built once by Spark, then copied to the tasks and to the process that commits. ``done``:
    what it was found to be when it was planned, where it is made again to be committed."""

    def __init__(
        self, options: WriteOptions, schema: t.StructType, *, one_machine: bool, done: bool | None = None
    ) -> None:
        check_columns(schema, topic_given=options.topic is not None)
        self._options = options
        self._run = options.run_id or uuid.uuid4().hex
        identity = f"{options.id_prefix}{options.topic}\0{options.write_id}"
        self._folder = staging_folder(options.staging_dir, identity, one_machine=one_machine)
        # Only a hint that saves work: what decides is read again at commit time, behind the fence.
        if done is None:
            done = read_marker(target_of(options), f"write {options.write_id!r}", needs_topic=True) is not None
        self._done = done

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of one task. Writes nothing to a broker."""
        if self._done:
            return Staged(0, 0, None)
        part = self.task_part
        encoder = _encoder(self._options, part.doing)
        return stage(iterator, encoder, threshold=self._options.staging_threshold, folder=part.folder)

    @property
    def task_part(self) -> TaskPart:
        """Return what its tasks must know."""
        folder = None if self._folder is None else self._folder / self._run
        doing = f"write {self._options.write_id!r}"
        return TaskPart(options=self._options, doing=doing, folder=folder, run=self._run, done=self._done)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All rows and the marker in one transaction. Called once, in the driver, when every task has succeeded."""
        staged = _all_staged(messages)
        if self._done:  # so nothing is staged, and nothing may be written
            if (done := find_write(self._options)) is None:
                raise StreamsError(
                    f"write {self._options.write_id!r} was done when it was planned, and its marker has gone since; "
                    "nothing was written, run it again"
                )
            _log.warning("write %r was done before (%d rows): nothing was written", done.write_id, done.rows)
            self._clean(only_this_run=False)  # what a task has left that came after the commit
            return
        try:
            target, rows = target_of(self._options), sum(message.rows for message in staged)
            request = WriteRequest(write_id=self._options.write_id, run=self._run, rows=rows)
            found, written = write_once(target, request, lambda: staged_batches(staged), size=_size(staged))
            if written:  # so that readers of committed records see the rows in every partition
                settle(target, request)
        except BaseException:
            self._clean(only_this_run=True)
            raise
        self._clean(only_this_run=False)  # also what killed runs have left, and what others can only throw away now
        if found.run != self._run:
            _log.warning("write %r was done before (%d rows): nothing was written", request.write_id, found.rows)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the staged files: nothing of the write is anywhere else. May be called while tasks are still
        writing."""
        self._clean(only_this_run=True)

    def _clean(self, *, only_this_run: bool) -> None:
        if self._folder is not None:
            (self._folder / self._run if only_this_run else self._folder).remove()


class StreamWriter(DataSourceStreamArrowWriter):
    """Every micro-batch once, all of its rows at one instant: one transaction for each, in the order of the tasks.

    Transactional id and marker belong to the *sink's name*, not to the query: a writer under the name finds the marker
    of the one before it into the same topic, and fences that one. Built anew for every batch, in the driver, and copied
    to the tasks; and once more where the batch is committed. So making one asks no broker anything.
    """

    def __init__(self, options: StreamWriteOptions, schema: t.StructType, *, one_machine: bool) -> None:
        check_columns(schema, topic_given=options.topic is not None)
        self._options = options
        identity = f"{options.id_prefix}stream\0{options.marker_topic}\0{options.sink}"
        self._folder = staging_folder(options.staging_dir, identity, one_machine=one_machine)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of one task. Writes nothing to a broker."""
        query, batch = _task_of_query()
        part = self.task_part
        encoder = _encoder(self._options, f"{part.doing}, batch {batch}")
        folder = part.folder_of(query, batch)
        staged = stage(iterator, encoder, threshold=self._options.staging_threshold, folder=folder)
        staged.query, staged.batch = query, batch
        return staged

    @property
    def task_part(self) -> TaskPart:
        """Return what its tasks must know."""
        return TaskPart(
            options=self._options, doing=f"sink {self._options.sink!r}", folder=self._folder, streaming=True
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All rows and the marker in one transaction. Called in the driver, when every task has succeeded."""
        staged = _all_staged(messages)
        query = _query_of(staged, batchId)
        target = target_of(self._options)
        request = BatchRequest(
            sink=self._options.sink,
            identity=target.identity,
            query=query,
            batch=batchId,
            rows=sum(message.rows for message in staged),
            replaces=self._options.replace_query,
            last_written=self._options.last_written_batch,
            sources=_ids_of(self._options.source_topics, target),
        )
        if batchId == 0:  # so that a query that is refused does not fence the rightful one
            request.written(read_marker(target, request))
        found, written = write_once(target, request, lambda: staged_batches(staged), size=_size(staged))
        if not written:
            _log.info("%s: was written before the restart (%d rows)", request, found.rows)
            if found.rows != request.rows:
                _log.warning(
                    "%s: has %d rows now, and had %s when it was written: what was written stays, as the option "
                    "lastWrittenBatch says",
                    request, request.rows, found.rows,
                )  # fmt: skip
        self._clean(query, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Delete the staged files: nothing of the batch is anywhere else. May be called while tasks are still
        writing."""
        remove_files(message for message in messages if isinstance(message, Staged))

    def _clean(self, query: str, batch: int) -> None:
        """Remove the files of this batch, and what killed attempts of earlier ones have left."""
        if self._folder is None:
            return
        for folder in (self._folder / query).children():
            if folder.names[-1].isdecimal() and int(folder.names[-1]) <= batch:
                folder.remove()


class MicroBatchWriter(DataSourceArrowWriter):
    """One micro-batch, written inside of ``foreachBatch``: by the transaction, the marker and the guards of
    ``StreamWriter``. Its tasks know their query and batch, as those of a streaming sink do."""

    def __init__(self, options: StreamWriteOptions, batch: int, schema: t.StructType, *, one_machine: bool) -> None:
        self._writer = StreamWriter(options, schema, one_machine=one_machine)
        self._batch = batch

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of one task. Writes nothing to a broker."""
        return self._writer.write(iterator)

    @property
    def task_part(self) -> TaskPart:
        """Return what its tasks must know."""
        return self._writer.task_part

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All rows and the marker in one transaction. Called once, in the driver, when every task has succeeded."""
        self._writer.commit(messages, self._batch)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the staged files: nothing of the batch is anywhere else."""
        self._writer.abort(messages, self._batch)


def _ids_of(topics: Iterable[str], target: WriteTarget) -> dict[str, str]:
    """Return the ids that topics have now. Raises ``TopicError`` for one that is gone."""
    return {topic: identity_of(topic, target.kafka)[0] for topic in topics}


def _encoder(options: SinkOptions, doing: str) -> BatchEncoder:
    return BatchEncoder(options.topic, options.kafka, doing, topic_shapes(options.kafka))


def _all_staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    """The messages of a commit, in the order of the tasks; raises ``StreamsError`` when one is missing."""
    staged = [message for message in messages if isinstance(message, Staged)]
    if len(staged) != len(messages):
        raise StreamsError(
            "Spark calls commit without the tasks' messages; nothing was written. It does so with "
            "trigger(continuous=...), which never calls a Python sink with rows: use trigger(processingTime=...)"
        )
    return staged


def _size(staged: Iterable[Staged]) -> int:
    return sum(message.size for message in staged)


def _task_of_query() -> tuple[str, int]:
    """Query id and batch of the task this is called in. Raises ``ConfigError`` where batches may change."""
    context = TaskContext.get()
    query = context.getLocalProperty("sql.streaming.queryId") if context else None
    batch = context.getLocalProperty("streaming.sql.batchId") if context else None
    if query is None or batch is None:
        raise StreamsError("a streaming write outside of a streaming query's task")
    if context and context.getLocalProperty("__is_continuous_processing") == "true":
        raise ConfigError(
            "trigger(continuous=...) cannot be exactly once: rows are sent before Spark has noted what an epoch reads; "
            "use trigger(processingTime=...) or trigger(availableNow=True)"
        )
    return query, int(batch)


def _query_of(staged: list[Staged], batch: int) -> str:
    # Spark gives an empty DataFrame one task, so there is always one to ask.
    found = {(message.query, message.batch) for message in staged}
    if len(found) != 1:
        raise StreamsError(f"batch {batch}: its tasks do not agree which query and batch they are of: {sorted(found)}")
    query, of_tasks = found.pop()
    if query is None or of_tasks != batch:
        raise StreamsError(f"batch {batch}: its tasks are of batch {of_tasks} of query {query}")
    return query
