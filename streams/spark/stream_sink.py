"""``df.writeStream.format("grt")``: every micro-batch once, all of its rows at one instant.

Tasks stage (see ``sink.py`` for why they must not send), and the driver's ``commit`` is one lane write for each batch,
in the order of the tasks. The lane belongs to the *sink's name*, not to the query: a writer under the name finds
the marker of the one before it into the same topic, and fences that one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from streams.errors import ConfigError, StreamsError
from streams.spark.columns import check_columns
from streams.spark.lane import Lane, look, write_lane
from streams.spark.markers import BatchRequest
from streams.spark.sink import all_staged, root_of
from streams.spark.staging import Staged, remove, remove_files, stage, staged_batches, staging_folder
from streams.spark.write_options import StreamWriteOptions

_log = logging.getLogger(__name__)


class StreamWriter(DataSourceStreamArrowWriter):
    """Built anew for every batch, in the driver, and copied to the tasks; and once more where the batch is committed.

    So making one asks no broker anything.
    """

    def __init__(self, options: StreamWriteOptions, schema: t.StructType, *, one_machine: bool) -> None:
        check_columns(schema, topic_given=options.topic is not None)
        self._options = options
        identity = f"stream\0{options.marker_topic}\0{options.sink}"
        self._folder = staging_folder(options.staging_dir, identity, one_machine=one_machine)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of one task. Talks to no broker."""
        query, batch = _task_of_query()
        folder = None if self._folder is None else self._folder / query / str(batch)
        staged = stage(iterator, threshold=self._options.staging_threshold, folder=folder)
        staged.query, staged.batch = query, batch
        return staged

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All rows and the marker in one transaction. Called in the driver, when every task has succeeded."""
        staged = all_staged(messages)
        query = _query_of(staged, batchId)
        lane = lane_of(self._options)
        request = BatchRequest(
            sink=self._options.sink,
            lane=lane.identity,
            query=query,
            batch=batchId,
            rows=sum(message.rows for message in staged),
            replaces=self._options.replace_query,
            last_written=self._options.last_written_batch,
        )
        if batchId == 0:  # so that a query that is refused does not fence the rightful one
            request.written(look(lane, request))
        found, written = write_lane(
            lane,
            request,
            lambda: staged_batches(staged),
            size=sum(message.size for message in staged),
        )
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
        """Nothing of the batch is anywhere but in staged files. May be called while tasks are still writing."""
        remove_files(message for message in messages if isinstance(message, Staged))

    def _clean(self, query: str, batch: int) -> None:
        """Remove the files of this batch, and what killed attempts of earlier ones have left."""
        if self._folder is None:
            return
        for folder in _batches_in(self._folder / query, up_to=batch):
            remove(folder, up_to=root_of(self._folder))


def lane_of(options: StreamWriteOptions) -> Lane:
    """Transactional id and marker group of a sink. The topic of the marker is in it: one name over two topics is two
    sinks, which leave each other alone."""
    # A topic's name has no "/", and the form without a topic goes on with a ".": no two sinks have one identity.
    identity = f"kes.spark.stream/{options.marker_topic}/{options.sink}"
    return Lane.of(identity, options, former=f"kes.spark.stream.{options.sink}")


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


def _batches_in(folder: Path, *, up_to: int) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.name.isdecimal() and int(path.name) <= up_to]
    except OSError:
        return []
