"""``spark.readStream.format("grt")``: a stream's positions, batch after batch.

One object plans: it lives in a Python process beside the driver as long as the query runs. From it Spark learns where
to begin, how far the next batch may go, and which ranges that makes. Copies of it, sent to the tasks by pickle, only
read ranges.
Positions are in Spark's checkpoint and nowhere else. When the planner fails the query fails: whatever passes by itself
(a broker that restarts) is waited for here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from streams.errors import ConfigError, OffsetError
from streams.records import TopicPartition
from streams.spark.reading.planning import Advance, Logs, Positions, advance, between, share, still_there
from streams.spark.reading.read_options import ReadOptions, read_options
from streams.spark.reading.reader import batches, ranges
from streams.spark.reading.record_batches import check_schema
from streams.spark.reading.topic_logs import LogView, require

_BELIEVE_SECONDS: Final = 3.0
_AGAIN_SECONDS: Final = 0.3
_VERSION: Final = 1

_log = logging.getLogger(__name__)


class ReaderOfTasks(DataSourceStreamReader):
    """The part of the reader that tasks get: enough to read a range."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return batches(partition, self._options)


class StreamReader(ReaderOfTasks, SupportsTriggerAvailableNow):
    """A stream over topics. Method names are Spark's. One thread."""

    def __init__(self, options: ReadOptions, schema: t.StructType) -> None:
        super().__init__(options)
        check_schema(schema, options)
        self._view = LogView(options)
        self._ends: Logs | None = None  # the ends of trigger(availableNow=True): pinned once
        self._latest: dict[str, Any] | None = None
        self._planned: tuple[Positions, Positions] | None = None  # start and end that were looked at just now
        self._last_batch: float | None = None
        self._first: dict[str, Any] | None = None  # where the query begins, until its first batch is planned
        self._told: Mapping[TopicPartition, int] | None = None  # committed for lag tools

    def __reduce__(self) -> Any:
        return ReaderOfTasks, (self._options,)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        logs = self._ends or self._view.logs()
        require(logs, self._options)
        start = to_json(self._view.resolve(self._options.starting, logs))
        if self._options.starts_at_the_end:
            self._first = start
        return start

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._ends = self._view.logs()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        # Spark's own limits come one at a time. The other one is applied where this one comes back.
        if self._options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.min_offsets_per_trigger is not None:
            return ReadMinRows(self._options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch: ``start`` itself when there is nothing to do, or not enough yet.

        The first batch of a query that begins at the end is empty. Spark keeps where batches end, not where the first
        one began; if it had records and were done again by another run, the end would be another one by then.
        """
        # Once: the next call has the same start, and may bring records.
        first, self._first = self._first, None
        if start == first:
            self._latest = start
            return start
        begun = from_json(start)
        self._tell_lag_tools(begun)
        logs, found = self._judged(lambda logs: advance(begun, logs))
        self._check(found)
        ids = {topic: log.id for topic, log in logs.items()}
        if self._ends is not None:
            found = _up_to(found, ids, self._ends, begun)
        self._latest = to_json(Positions(ids, found.end))
        waiting = {where: found.end[where] - begin for where, begin in found.begin.items()}
        if not isinstance(limit, ReadAllAvailable):
            if self._waits_for_more(sum(waiting.values())):
                return start
            if isinstance(limit, ReadMaxRows):
                waiting = share(waiting, limit.max_rows)
        end = Positions(ids, {where: begin + waiting[where] for where, begin in found.begin.items()})
        if end.at == begun.at and set(begun.ids.items()) <= set(ids.items()):
            return start
        self._last_batch = time.monotonic()
        # So that ``partitions`` need not look again: any other batch is one of an earlier run.
        self._planned = begun, end
        return to_json(end)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The ends as they were when the last batch was planned, so that a query's progress shows its lag."""
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begun, ended = from_json(start), from_json(end)
        spans, ids = between(begun, ended), ended.ids
        if self._planned != (begun, ended):  # a batch of an earlier run is done again
            planned = spans
            logs, spans = self._judged(lambda logs: still_there(planned, ended.ids, logs))
            self._check(spans)
            ids = {topic: log.id for topic, log in logs.items()}  # the connector's checkpoints have none
        return ranges(spans, ids, self._options)

    def stop(self) -> None:
        self._view.close()

    def _tell_lag_tools(self, finished: Positions) -> None:
        # Not in `commit`: Spark calls that one batch late, and never for the last one of a run. When it asks where the
        # next batch ends, everything before is finished.
        if finished.at != self._told:
            self._view.commit(finished.at)
            self._told = finished.at

    def _waits_for_more(self, waiting: int) -> bool:
        """Check whether a batch is put off because of minOffsetsPerTrigger. Never at the end of availableNow."""
        least = self._options.min_offsets_per_trigger
        if least is None or waiting >= least or self._ends is not None:
            return False
        if self._last_batch is None:  # as the connector does: the first batch of a run does not wait
            return False
        return time.monotonic() - self._last_batch < self._options.max_trigger_delay_seconds

    def _judged(self, judge: Callable[[Logs], Advance]) -> tuple[Logs, Advance]:
        """Look at the logs as they are now, and plan from there.

        A loss is only believed when it lasts: a broker that has just come up, or that does not know a new topic
        yet, may report one that is none.
        """
        deadline = time.monotonic() + _BELIEVE_SECONDS
        while True:
            logs = self._view.logs()
            found = judge(logs)
            if not found.losses or time.monotonic() >= deadline:
                return logs, found
            time.sleep(_AGAIN_SECONDS)

    def _check(self, found: Advance) -> None:
        if not found.losses:
            return
        losses = "; ".join(found.losses)
        if self._options.fail_on_data_loss:
            raise OffsetError(
                f"records that this query has not read are gone: {losses}. The query stops where its checkpoint stands."
                " Set failOnDataLoss=false to go on with what is there (the gap is then logged; a recreated topic is "
                "read from its beginning), or start over with another checkpointLocation"
            )
        _log.warning("failOnDataLoss=false: goes on although records are gone: %s", losses)


class RefusedStream(DataSourceStreamReader):
    """The stand-in for a reader whose options are wrong: raises ``error`` when it has to begin.

    An error that is raised while a reader is made comes out of Spark behind one of Spark's own (4.3).
    """

    def __init__(self, error: ConfigError) -> None:
        self._error = error

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._error

    initialOffset = partitions = latestOffset = read = _refuse  # noqa: N815


def stream_reader(options: Mapping[str, str], schema: t.StructType) -> DataSourceStreamReader:
    """The reader of a stream with these options, or one that reports what is wrong with them."""
    try:
        return StreamReader(read_options(options, stream=True), schema)
    except ConfigError as error:
        return RefusedStream(error)


def _up_to(found: Advance, ids: dict[str, str], pinned: Logs, begun: Positions) -> Advance:
    """Never beyond the pinned ends; what is newer than them is as if it were not there."""
    kept = Advance(losses=found.losses)
    for where, begin in found.begin.items():
        log = pinned.get(where.topic)
        bounds = log.partitions.get(where.partition) if log is not None and log.id == ids[where.topic] else None
        if bounds is not None:
            kept.begin[where] = begin
            kept.end[where] = max(begin, min(found.end[where], bounds.end))
        elif where in begun.at:
            kept.begin[where] = kept.end[where] = begin
    return kept


def to_json(positions: Positions) -> dict[str, Any]:
    """The positions as Spark writes them into its checkpoint, and shows them in a query's progress.

        {"version": 1, "topics": {"flights": {"id": "q8L...", "offsets": {"0": 1201, "1": 1187}}}}

    An offset is the next one to read. ``id`` is the topic's own, given by the broker when it was created. Topics and
    partitions are sorted, so that equal positions are equal texts, which is how Spark compares them.
    """
    topics: dict[str, Any] = {
        topic: {"id": positions.ids.get(topic, ""), "offsets": {}}
        for topic in sorted({where.topic for where in positions.at} | set(positions.ids))
    }
    for where, offset in sorted(positions.at.items()):
        topics[where.topic]["offsets"][str(where.partition)] = offset
    return {"version": _VERSION, "topics": topics}


def from_json(raw: Any) -> Positions:
    """Read the output of ``to_json``, or the form of Spark's own Kafka connector: ``{"flights": {"0": 1201}}``.

    Raises ``OffsetError`` for anything else.
    """
    ids: dict[str, str] = {}
    at: dict[TopicPartition, int] = {}
    try:
        if isinstance(raw.get("version"), int):
            if raw["version"] != _VERSION:
                raise OffsetError(
                    f"the checkpoint holds positions of version {raw['version']}, this package reads {_VERSION}: "
                    "use the package that wrote it, or a newer one"
                )
            offsets = {topic: entry["offsets"] for topic, entry in raw["topics"].items()}
            ids = {topic: str(entry["id"]) for topic, entry in raw["topics"].items() if entry["id"]}
        else:
            offsets = raw
        for topic, partitions in offsets.items():
            for partition, offset in partitions.items():
                at[TopicPartition(str(topic), int(partition))] = int(offset)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise OffsetError(f"the checkpoint's positions are not those of a Kafka source: {str(raw)[:200]}") from None
    return Positions(ids, at)
