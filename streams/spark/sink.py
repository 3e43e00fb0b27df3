"""``df.write.format("grt")``: one exactly-once write of a DataFrame.

When something upstream fails, when a query is stopped or a task is killed, the iterator that Spark hands to a Python
sink ends cleanly, with part of the rows. So ``write`` cannot know whether it has seen all of them, and nothing may be
finished in it: it stages. Only Spark's driver knows: it calls ``commit`` with the messages of the attempts that
succeeded, one for each task.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from streams.errors import StreamsError
from streams.spark.columns import check_columns
from streams.spark.commit import commit_once, find_write, lane_of
from streams.spark.kafka import client, partitions_of
from streams.spark.lane import look
from streams.spark.staging import Staged, remove, stage, staged_batches, staging_folder
from streams.spark.write_options import WriteOptions

_log = logging.getLogger(__name__)


class BatchWriter(DataSourceArrowWriter):
    """One exactly-once write. Built once by Spark, then copied to the tasks and to the process that commits."""

    def __init__(self, options: WriteOptions, schema: t.StructType, *, one_machine: bool) -> None:
        check_columns(schema, topic_given=options.topic is not None)
        self._options = options
        partitions_of(client(AdminClient, options.kafka), {options.marker_topic}, options.kafka)  # before any work
        self._run = options.run_id or uuid.uuid4().hex
        identity = f"{options.topic}\0{options.write_id}"
        self._folder = staging_folder(options.staging_dir, identity, one_machine=one_machine)
        # Only a hint that saves work: what decides is read again at commit time, behind the fence.
        self._done = look(lane_of(options), f"write {options.write_id!r}") is not None

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of one task. Talks to no broker."""
        if self._done:
            return Staged(0, 0, None, None)
        folder = None if self._folder is None else self._folder / self._run
        return stage(iterator, threshold=self._options.staging_threshold, folder=folder)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All rows and the marker in one transaction. Called once, in the driver, when every task has succeeded."""
        staged = all_staged(messages)
        if self._done:  # so nothing is staged, and nothing may be written
            if (done := find_write(self._options)) is None:
                raise StreamsError(
                    f"write {self._options.write_id!r} was done when it was planned, and its marker has gone since; "
                    "nothing was written, run it again"
                )
            _log.warning("write %r was done before (%d rows): nothing was written", done.write_id, done.rows)
            return
        try:
            result = commit_once(
                self._options,
                self._run,
                rows=sum(message.rows for message in staged),
                size=sum(message.size for message in staged),
                batches=lambda: staged_batches(staged),
            )
        except BaseException:
            self._clean(only_this_run=True)
            raise
        self._clean(only_this_run=False)  # also what killed runs have left, and what others can only throw away now
        if not result.written:
            _log.warning("write %r was done before (%d rows): nothing was written", result.write_id, result.rows)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing of the write is anywhere but in staged files. May be called while tasks are still writing."""
        self._clean(only_this_run=True)

    def _clean(self, *, only_this_run: bool) -> None:
        if self._folder is not None:
            folder = self._folder / self._run if only_this_run else self._folder
            remove(folder, up_to=root_of(self._folder))


def root_of(folder: Path) -> Path:
    """The folder that was there before anything was staged."""
    return folder.parent.parent


def all_staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    """The messages of a commit, in the order of the tasks; raises ``StreamsError`` when one is missing."""
    staged = [message for message in messages if isinstance(message, Staged)]
    if len(staged) != len(messages):
        raise StreamsError(
            "Spark calls commit without the tasks' messages; nothing was written. It does so with "
            "trigger(continuous=...), which never calls a Python sink with rows: use trigger(processingTime=...)"
        )
    return staged
