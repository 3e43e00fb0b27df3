"""Very large batches: several transactions at once, one for each *lane*.

The streaming sink and a batch write put all rows through one transaction in the driver, so that they become visible at
one instant. Here tasks write, each its lane in a transaction of its own: exactly once in each lane, but **the lanes
become visible one by one**, and after a failure some may have a batch that others get only with the next attempt. (This
is no two-phase commit: Kafka's clients have none.) A key is in one lane, so order per key is kept.

    def write(df, batch):
        write_lanes(df, batch, sink="flights", lanes=4, topic="flights", order=["scheduled"])

    df.writeStream.foreachBatch(write).option("checkpointLocation", ...).start()
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as _compute
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from streams.errors import ConfigError, StreamsError
from streams.spark.columns import SINK_COLUMNS, check_columns
from streams.spark.lane import Lane, hold, write_lane
from streams.spark.lane_markers import LaneRequest, Plan
from streams.spark.options import addressed, agreed
from streams.spark.write_options import StreamWriteOptions, stream_write_options

pc: Any = _compute  # its functions are made at run time

_LANE, _END = "_lane", "_end"
_BATCH_WRITE: Final = "batch write"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesResult:
    """``written``: the lanes this call wrote, with their rows; the others had the batch before."""

    lanes: int
    written: dict[int, int]


def write_lanes(
    df: DataFrame,
    batch_id: int | None,
    *,
    sink: str,
    lanes: int,
    order: Sequence[str] = (),
    topic: str | None = None,
    servers: str | None = None,
    options: Mapping[str, str] | None = None,
    replace_query: str | None = None,
    last_written: tuple[str, int] | None = None,
) -> LanesResult:
    """Write a batch of encoded events in ``lanes`` transactions at once, exactly once in each. Call it in
    ``foreachBatch``, with the batch's id; or with ``None`` for one write of its own, of which ``sink`` is the name.

    Rows go to lanes by their key (without key: by their value), in the order of the columns ``order`` (which are left
    out of the records when they are no record's). **A row must have the same key, or value, each time the batch is
    computed**: with ``rand()``, ``uuid()`` or the time of day in them, a repeated attempt would send rows into other
    lanes than the ones that are written already, and rows would be lost or doubled. ``lanes`` may change between
    batches, not for one that is half written. ``replace_query`` and ``last_written`` are the options ``replaceQuery``
    and ``lastWrittenBatch`` of the streaming sink; ``options`` the others (``kafka.*``, ``markerTopic``,
    ``markerLog``).

    Needs ``lanes`` tasks of Spark; each may be tried again. Raises ``ConfigError`` and ``StreamsError`` before anything
    is written when a marker says no; Spark's own exceptions when a task fails. After those, call it again with the
    same batch (a restarted query does): lanes that are written are left alone.
    """
    if lanes < 1:
        raise ConfigError(f"lanes must be at least 1, not {lanes}")
    named = agreed(options or {}, {"sink": sink, "topic": topic or None})
    settings = stream_write_options(addressed(named, servers))
    records = [name for name in df.columns if name in SINK_COLUMNS]
    check_columns(df.select(records).schema, topic_given=settings.topic is not None)
    if unknown := [name for name in df.columns if name not in SINK_COLUMNS and name not in order]:
        raise ConfigError(f"column {unknown[0]} is no part of a record, and order does not name it: drop it")
    plan = Plan(
        sink=sink,
        query=_BATCH_WRITE if batch_id is None else _query_of(df),
        batch=batch_id or 0,
        lanes=lanes,
        token=uuid.uuid4().hex,
        replaces=replace_query or settings.replace_query,
        last_written=last_written or settings.last_written_batch,
    )
    _pin(settings, plan)

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        yield _write_lane(settings, plan, batches)

    answers = _routed(df, lanes, order).mapInArrow(write, "lane int, rows long, written boolean").collect()
    if sorted(answer.lane for answer in answers) != list(range(lanes)):
        raise StreamsError(f"{plan}: {len(answers)} of {lanes} lanes have answered; call it again")
    return LanesResult(lanes=lanes, written={answer.lane: answer.rows for answer in answers if answer.written})


def lane_of(options: StreamWriteOptions, number: int) -> Lane:
    """Transactional id and marker group of one lane. The topic of the marker is in it, as in a stream's."""
    identity = f"kes.spark.lanes/{options.marker_topic}/{options.sink}.{number}"
    return Lane.of(identity, options, former=f"kes.spark.lanes.{options.sink}.{number}")


def _query_of(df: DataFrame) -> str:
    query = df.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    if query is None:
        raise ConfigError("write_lanes with a batch_id belongs into foreachBatch; outside of it give batch_id=None")
    return query


def _pin(options: StreamWriteOptions, plan: Plan) -> None:
    """Fence every lane there ever was, and put the plan's token into each."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(hold(lane_of(options, 0), plan))]
        first = held[0].marker()
        lanes = plan.most(first)
        held += [stack.enter_context(hold(lane_of(options, number), plan)) for number in range(1, lanes)]
        markers = plan.pins([first, *(each.marker() for each in held[1:])], int(time.time() * 1000))
        for each, marker in zip(held, markers, strict=True):
            each.put(marker)


def _routed(df: DataFrame, lanes: int, order: Sequence[str]) -> DataFrame:
    """The rows, each lane in one task, sorted there, and after its last row one that says so."""
    by = f.coalesce(*(f.col(name).cast("binary") for name in ("key", "value") if name in df.columns), f.lit(b""))
    rows = df.withColumns({_LANE: f.pmod(f.crc32(by), f.lit(lanes)).cast("int"), _END: f.lit(False)})
    ends = df.sparkSession.range(lanes).select(
        *(f.lit(None).cast(field.dataType).alias(field.name) for field in df.schema.fields),
        f.col("id").cast("int").alias(_LANE),
        f.lit(True).alias(_END),
    )
    both = rows.unionByName(ends)
    return both.repartitionById(lanes, f.col(_LANE)).sortWithinPartitions(_END, *order)


def _write_lane(options: StreamWriteOptions, plan: Plan, batches: Iterator[Any]) -> Any:
    """Write one lane, in a task. The transaction is committed only after the end row, because an input that failed
    somewhere before ends cleanly, too, with part of the rows."""
    context = TaskContext.get()
    assert context is not None
    number = context.partitionId()
    request = LaneRequest(plan=plan, lane=number)
    rows = _Rows(request, batches)
    # How much comes is not known: as long as a broker allows. What a dead attempt leaves open, the next one ends.
    _, written = write_lane(lane_of(options, number), request, lambda: rows, size=1 << 40)
    for _ in batches:  # the rest of the input, or Spark sees a broken pipe
        pass
    return pa.record_batch(
        {
            "lane": pa.array([number], pa.int32()),
            "rows": pa.array([rows.count], pa.int64()),
            "written": pa.array([written]),
        }
    )


class _Rows:
    """The rows of a lane without its end row; raises ``StreamsError`` when that is not the last."""

    def __init__(self, request: LaneRequest, batches: Iterator[Any]) -> None:
        self._request = request
        self._batches: Iterator[Any] | None = batches
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        batches, self._batches = self._batches, None
        if batches is None:
            raise StreamsError(f"{self._request}: its rows were used up by an attempt without a clear answer; again")
        ended = False
        for batch in batches:
            if not batch.num_rows:
                continue
            if ended or pc.any(pc.not_equal(batch.column(_LANE), self._request.lane)).as_py():
                raise StreamsError(f"{self._request}: rows of another lane, or after the end")
            ended = bool(batch.column(_END)[-1].as_py())
            rows = batch.slice(0, batch.num_rows - 1) if ended else batch
            self.count += rows.num_rows
            if rows.num_rows:
                yield rows.select([name for name in rows.schema.names if name in SINK_COLUMNS])
        if not ended:
            raise StreamsError(f"{self._request}: its rows end without the end row: something before it has failed")
