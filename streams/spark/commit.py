"""A batch write as a lane write: once for each ``writeId``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from streams.spark.lane import Lane, look, settle, write_lane
from streams.spark.marker_log import MarkerLog
from streams.spark.markers import WriteRequest, Written, written_by
from streams.spark.write_options import WriteOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """How a write ended: ``written`` by this run, or (``False``) by an earlier one with the same id; ``rows`` of the
    one that did."""

    write_id: str
    rows: int
    written: bool
    committed_at_ms: int


def lane_of(options: WriteOptions) -> Lane:
    """Transactional id and marker group of a write. The topic is in it: one id for two topics is two writes."""
    # A topic's name has no "/": so no two writes have one identity.
    return Lane.of(f"kes.spark.write.{options.topic or '*'}/{options.write_id}", options)


def find_write(options: WriteOptions) -> WriteResult | None:
    """The committed write of this id, or ``None``. Only a look: a run that is about to commit may not show yet."""
    lane, doing = lane_of(options), f"write {options.write_id!r}"
    stored = look(lane, doing)
    if stored is None and lane.marker_log is not None:
        stored = MarkerLog(lane.marker_log, lane.identity, lane.kafka, doing).read()
    found = written_by(stored)
    return None if found is None else _result(options, found, options.run_id)


def commit_once(
    options: WriteOptions, run: str, *, rows: int, size: int, batches: Callable[[], Iterable[Any]]
) -> WriteResult:
    """Write ``batches()`` (Arrow, ``rows`` rows, ``size`` bytes as staged) unless this id is written. Blocks; driver
    only.

    When it returns, the rows are visible to readers of committed records in every partition. Raises what
    ``write_lane`` raises.
    """
    lane = lane_of(options)
    request = WriteRequest(write_id=options.write_id, run=run, rows=rows)
    found, written = write_lane(lane, request, batches, size=size)
    if written:
        settle(lane, request)
    return _result(options, found, run)


def _result(options: WriteOptions, found: Written, run: str | None) -> WriteResult:
    return WriteResult(
        write_id=options.write_id, rows=found.rows, written=found.run == run, committed_at_ms=found.at_ms
    )
