"""The planner of a stream against logs made up here: what Spark asks of it, and in which order. No Spark, no Kafka."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows

from streams.errors import ConfigError, OffsetError, TopicError
from streams.records import TopicPartition
from streams.spark.reading import stream_source
from streams.spark.reading.planning import Bounds, Logs, Positions, TopicLog
from streams.spark.reading.read_options import Edge, read_options
from streams.spark.reading.reader import Range
from streams.spark.reading.record_batches import READ_SCHEMA
from streams.spark.reading.stream_source import StreamReader, stream_reader, to_json
from tests.unit.waiting import give_own

pytestmark = pytest.mark.spark

ALL = ReadAllAvailable()


def log(*ends: int, first: int = 0, topic_id: str = "x") -> TopicLog:
    return TopicLog(topic_id, {n: Bounds(first, end, end) for n, end in enumerate(ends)})


class View:
    """Stands in for the cluster: ``now`` is what it holds; ``told`` what was committed for lag tools."""

    now: ClassVar[Logs] = {}

    def __init__(self, options: Any) -> None:
        self.told: list[dict[TopicPartition, int]] = []

    def logs(self) -> Logs:
        return copy.deepcopy(self.now)

    def resolve(self, edge: Edge, logs: Logs) -> Positions:
        at = {
            TopicPartition(topic, p): bounds.first if edge.at == "earliest" else bounds.end
            for topic, entry in logs.items()
            for p, bounds in entry.partitions.items()
        }
        return Positions({topic: entry.id for topic, entry in logs.items()}, at)

    def commit(self, at: dict[TopicPartition, int]) -> None:
        self.told.append(dict(at))

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _view(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stream_source, "LogView", View)
    monkeypatch.setattr(stream_source, "_BELIEVE_SECONDS", 0)
    yield
    View.now = {}


def reader(**options: str) -> StreamReader:
    given = {"kafka.bootstrap.servers": "b:1", "subscribe": "t", "startingOffsets": "earliest", **options}
    if "subscribePattern" in options:
        del given["subscribe"]
    return StreamReader(read_options(given, stream=True), READ_SCHEMA)


def offsets(raw: dict[str, Any], topic: str = "t") -> dict[str, int]:
    found: dict[str, int] = raw["topics"][topic]["offsets"]
    return found


def ranges(found: Any) -> list[tuple[str, int, int, int]]:
    assert all(isinstance(span, Range) for span in found)
    return [(span.topic, span.partition, span.start, span.end) for span in found]


def test_from_the_beginning_to_what_is_there() -> None:
    View.now = {"t": log(5, 3)}
    source = reader()
    start = source.initialOffset()
    end = source.latestOffset(start, ALL)
    assert (offsets(start), offsets(end)) == ({"0": 0, "1": 0}, {"0": 5, "1": 3})
    assert source.reportLatestOffset() == end
    assert ranges(source.partitions(start, end)) == [("t", 0, 0, 5), ("t", 1, 0, 3)]
    assert source.latestOffset(end, ALL) is end
    assert ranges(source.partitions(end, end)) == []


def test_a_limit_holds_and_the_lag_is_told() -> None:
    View.now = {"t": log(60, 30, 0)}
    source = reader(maxOffsetsPerTrigger="30", minPartitions="6")
    limit = source.getDefaultReadLimit()
    assert limit == ReadMaxRows(30)
    end = source.latestOffset(source.initialOffset(), limit)
    assert offsets(end) == {"0": 20, "1": 10, "2": 0}
    assert offsets(source.reportLatestOffset() or {}) == {"0": 60, "1": 30, "2": 0}
    assert len(source.partitions(source.initialOffset(), end)) == 6
    assert offsets(source.latestOffset(end, ALL)) == {"0": 60, "1": 30, "2": 0}, "Spark said: all"


def test_a_batch_waits_for_enough_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    give_own(monkeypatch, "time", stream_source, monotonic=lambda: now)
    View.now = {"t": log(3)}
    source = reader(minOffsetsPerTrigger="10", maxTriggerDelay="60s")
    limit = source.getDefaultReadLimit()
    assert limit == ReadMinRows(10)
    first = source.latestOffset(source.initialOffset(), limit)
    assert offsets(first) == {"0": 3}, "the first one does not wait, as the connector's does not"
    View.now = {"t": log(12)}
    assert source.latestOffset(first, limit) is first
    assert offsets(source.reportLatestOffset() or {}) == {"0": 12}
    now += 61
    second = source.latestOffset(first, limit)
    assert offsets(second) == {"0": 12}
    View.now = {"t": log(22)}
    assert offsets(source.latestOffset(second, limit)) == {"0": 22}


@pytest.mark.parametrize("limit", [ReadMaxRows(4), ReadMinRows(2)])
def test_both_limits_count_whichever_spark_hands_back(limit: ReadLimit) -> None:
    View.now = {"t": log(20)}
    source = reader(minOffsetsPerTrigger="2", maxOffsetsPerTrigger="4")
    assert source.getDefaultReadLimit() == ReadMaxRows(4)
    first = source.latestOffset(source.initialOffset(), limit)
    assert offsets(first) == {"0": 4 if isinstance(limit, ReadMaxRows) else 20}
    View.now = {"t": log(offsets(first)["0"] + 1)}
    assert source.latestOffset(first, limit) is first


def test_available_now_ends_where_it_was_pinned() -> None:
    View.now = {"t": log(10)}
    source = reader(maxOffsetsPerTrigger="6", minOffsetsPerTrigger="6")
    source.prepareForTriggerAvailableNow()
    View.now = {"t": log(50, 7)}  # more records, and a partition more
    at = source.initialOffset()
    seen = []
    while (following := source.latestOffset(at, ReadMaxRows(6))) is not at:
        at = following
        seen.append(offsets(at))
    assert seen == [{"0": 6}, {"0": 10}], "the rest is not waited for"
    again = reader()
    again.prepareForTriggerAvailableNow()
    assert offsets(again.latestOffset(at, ALL)) == {"0": 50, "1": 7}


def test_available_now_from_the_end_has_nothing_to_do() -> None:
    View.now = {"t": log(10)}
    source = reader(startingOffsets="latest")
    source.prepareForTriggerAvailableNow()
    View.now = {"t": log(50)}
    start = source.initialOffset()
    assert offsets(start) == {"0": 10}
    assert source.latestOffset(start, ALL) is start


def test_a_new_partition_and_a_new_topic_are_read_from_their_beginning() -> None:
    View.now = {"t1": log(10)}
    source = reader(subscribePattern="t.*", startingOffsets="latest")
    start = source.initialOffset()
    View.now = {"t1": log(10, 4), "t2": log(2, topic_id="y")}
    assert source.latestOffset(start, ALL) is start
    end = source.latestOffset(start, ALL)
    assert ranges(source.partitions(start, end)) == [("t1", 1, 0, 4), ("t2", 0, 0, 2)]
    assert end["topics"]["t2"]["id"] == "y"


T10 = {"t": log(10)}
LOSSES = [
    # before, now, what is told, what is left without failOnDataLoss
    (T10, {"t": log(20, first=12)}, r"t\[0\]: offsets 10 to 11 are gone", {"t": {"0": 20}}, [("t", 0, 10, 20)]),
    (T10, {"t": log(8)}, r"t\[0\]: the log ends at 8, but had been read up to 10", {"t": {"0": 8}}, []),
    (T10, {"t": log(4, topic_id="z")}, r"recreated \(id x then, z now\)", {"t": {"0": 4}}, [("t", 0, 0, 4)]),
    (T10, {"t": log(40, topic_id="z")}, "t was deleted and recreated", {"t": {"0": 40}}, [("t", 0, 0, 40)]),
    (
        {"t1": log(10), "t2": log(5, topic_id="y")},
        {"t1": log(11)},
        r"t2 was deleted: it had been read up to t2\[0\] offset 5",
        {"t1": {"0": 11}},
        [("t1", 0, 10, 11)],
    ),
    # A partition that is not there is never just forgotten: a broker may not have heard of it yet. The checkpoint would
    # not know it, and it would be read from its beginning when it comes back.
    (
        {"t": log(10, 20)},
        {"t": log(11)},
        r"t\[1\] is not there any more, or not chosen: it had been read up to 20",
        {"t": {"0": 11}},
        [("t", 0, 10, 11)],
    ),
]


@pytest.mark.parametrize(("before", "now", "told", "end", "spans"), LOSSES)
def test_what_is_gone_stops_the_query_or_is_told(
    before: Logs, now: Logs, told: str, end: Any, spans: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    View.now = before
    strict, lax = (reader(subscribe=",".join(before), failOnDataLoss=value) for value in ("true", "false"))
    at = strict.latestOffset(strict.initialOffset(), ALL)
    View.now = now
    with pytest.raises(OffsetError, match=told + r".*failOnDataLoss=false"):
        strict.latestOffset(at, ALL)
    following = lax.latestOffset(at, ALL)
    assert {topic: offsets(following, topic) for topic in following["topics"]} == end
    assert ranges(lax.partitions(at, following)) == spans
    assert len([record for record in caplog.records if "records are gone" in record.message]) == 1


@pytest.mark.parametrize("now", [{}, {"t": TopicLog("x", {})}, {"t": log(8)}, {"t": log(12, topic_id="z")}])
def test_a_loss_is_believed_only_when_it_lasts(monkeypatch: pytest.MonkeyPatch, now: dict[str, TopicLog]) -> None:
    """A broker that has just come up, or lags behind the others, may not know the topic, or all of its log, yet."""
    monkeypatch.setattr(stream_source, "_BELIEVE_SECONDS", 60)
    View.now = {"t": log(10)}
    source = reader()
    at = source.latestOffset(source.initialOffset(), ALL)
    View.now = now

    def wait(seconds: float) -> None:
        View.now = {"t": log(11)}

    give_own(monkeypatch, "time", stream_source, sleep=wait)
    assert offsets(source.latestOffset(at, ALL)) == {"0": 11}


@pytest.mark.parametrize(
    ("now", "told", "left"),
    [
        ({"t": log(30, first=4)}, r"t\[0\]: offsets 2 to 3 are gone", [("t", 0, 4, 10)]),
        ({"t": log(30, first=40)}, r"t\[0\]: offsets 2 to 9 are gone", []),
        ({"t": log(6)}, r"t\[0\]: the log ends at 6, below 10", [("t", 0, 2, 6)]),
        ({"t": log(30, topic_id="z")}, r"t was deleted and recreated \(id x then, z now\) before offsets 2 to 9", []),
        ({}, r"t\[0\] was deleted before offsets 2 to 9 were read", []),
    ],
)
def test_a_batch_of_an_earlier_run_is_checked_when_it_is_done_again(
    now: dict[str, TopicLog], told: str, left: list[tuple[str, int, int, int]]
) -> None:
    """Without ``failOnDataLoss`` no range may end where the log does not reach: a task would wait there in vain."""
    View.now = {"t": log(10)}
    start = to_json(Positions({"t": "x"}, {TopicPartition("t", 0): 2}))
    end = json.loads(json.dumps(reader().latestOffset(start, ALL)))
    assert ranges(reader().partitions(start, end)) == [("t", 0, 2, 10)]
    View.now = now
    with pytest.raises(OffsetError, match=told):
        reader().partitions(start, end)
    assert ranges(reader(failOnDataLoss="false").partitions(start, end)) == left


LATEST = {"startingOffsets": "latest"}
LATEST_OF_ONE = {"startingOffsets": '{"t": {"0": -1}}'}
LATEST_OF_A_TIME = {"startingTimestamp": "5", "startingOffsetsByTimestampStrategy": "latest"}


@pytest.mark.parametrize("options", [LATEST, LATEST_OF_ONE, LATEST_OF_A_TIME])
def test_nothing_is_lost_when_the_first_batch_from_the_end_is_done_again(options: dict[str, str]) -> None:
    """Its start is nowhere but in the planner that is no more, and ``latest`` is later for the next one."""
    View.now = {"t": log(10)}
    earlier = reader(**options)
    start = earlier.initialOffset()
    View.now = {"t": log(12)}
    end = json.loads(json.dumps(earlier.latestOffset(start, ALL)))
    assert ranges(earlier.partitions(start, end)) == []
    View.now = {"t": log(15)}
    later = reader(**options)
    assert ranges(later.partitions(later.initialOffset(), end)) == []
    assert ranges(later.partitions(end, later.latestOffset(end, ALL))) == [("t", 0, 10, 15)]


def test_a_topic_that_was_named_must_be_there_at_the_start() -> None:
    with pytest.raises(TopicError, match="topic 't' does not exist at b:1"):
        reader().initialOffset()
    assert reader(subscribePattern="t").initialOffset() == {"version": 1, "topics": {}}


def test_positions_of_the_connector_go_on() -> None:
    View.now = {"t": log(10)}
    source = reader()
    end = source.latestOffset({"t": {"0": 4}}, ALL)
    for again in (source.partitions({"t": {"0": 4}}, end), reader().partitions({"t": {"0": 4}}, {"t": {"0": 10}})):
        assert ranges(again) == [("t", 0, 4, 10)]
        assert [span.topic_id for span in again if isinstance(span, Range)] == ["x"]  # which its checkpoint cannot say


def test_finished_positions_are_told_once_to_lag_tools() -> None:
    View.now = {"t": log(10)}
    source = reader(commitOffsetsTo="g")
    start = source.initialOffset()
    end = source.latestOffset(start, ALL)
    source.latestOffset(end, ALL)
    source.latestOffset(end, ALL)
    assert isinstance(source._view, View)
    assert source._view.told == [{("t", 0): 0}, {("t", 0): 10}]


def test_tasks_get_only_what_reads() -> None:
    View.now = {"t": log(10)}
    source = reader()
    source.latestOffset(source.initialOffset(), ALL)
    copied = pickle.loads(pickle.dumps(source))
    assert not isinstance(copied, StreamReader)
    assert callable(copied.read)


def test_wrong_options_are_told_when_spark_begins_not_when_it_makes_the_reader() -> None:
    refused = stream_reader({"subscribe": "t", "endingOffsets": "latest", "bootstrap.servers": "b:1"}, READ_SCHEMA)
    copied = pickle.loads(pickle.dumps(refused))
    for ask in (copied.initialOffset, lambda: copied.latestOffset({}, ALL), lambda: copied.partitions({}, {})):
        with pytest.raises(ConfigError, match="option endingOffsets is for batch reads"):
            ask()
