"""``write_lanes``: exactly once in each lane; another number of lanes, another run, a cut input."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession

from streams.errors import ConfigError, StreamsError
from streams.spark import lanes as lanes_module
from streams.spark.lane import settle, write_lane
from streams.spark.lane_markers import NOTHING, LaneMetadata, LaneRequest, Plan
from streams.spark.lanes import lane_of, write_lanes
from streams.spark.markers import Stored, inherited, left_behind
from streams.spark.write_options import stream_write_options
from tests.spark.conftest import MakeTopic, Read

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(240)]
ROWS = 3000


def plan(batch: int = 5, lanes: int = 2, query: str = "q", **more: Any) -> Plan:
    return Plan(sink="s", query=query, batch=batch, lanes=lanes, token="mine", **more)


def marker(batch: int, lanes: int = 2, most: int = 2, query: str = "q", replaced: tuple[str, ...] = ()) -> Stored:
    return LaneMetadata(query, batch, lanes, most, "old", 1, replaced).stored()


TABLE = [
    # plan, markers, the batches pinned (or what it is refused with)
    (plan(0), [None, None], [NOTHING, NOTHING]),
    (plan(), [marker(4), marker(5)], [4, 5]),
    (plan(lanes=3), [marker(4), marker(4), None], [4, 4, NOTHING]),
    (plan(lanes=2), [marker(4, 1), marker(2)], [4, 2]),  # lane 1 was not used for a while
    (plan(), [None, None], "markers of what was written before are missing"),
    (plan(last_written=("q", 4)), [None, None], [4, 4]),
    (plan(last_written=("q", 5)), [None, None], [5, 5]),
    (plan(last_written=("q", 3)), [None, None], "are missing"),
    (plan(last_written=("x", 5)), [None, None], "are missing"),
    (plan(0), [None, marker(0)], "the marker of lane 0 is missing"),
    (plan(), [marker(4), None], "the marker of lane 1 is missing"),
    (plan(), [marker(3), marker(3)], "lane 0 has written up to batch 3"),
    (plan(), [marker(6), marker(6)], "lane 0 has written up to batch 6"),
    (plan(), [marker(5), marker(6)], "lane 1 has written batch 6 already"),
    (plan(lanes=3), [marker(5), marker(4), None], "written with lanes=2, not 3"),
    (plan(lanes=1), [marker(4), marker(5)], "lane 1 has this batch already, written with lanes=2, not 1"),
    (plan(query="new"), [marker(4), marker(4)], "query q writes into these lanes"),
    (plan(0, query="new"), [marker(4), marker(4)], "give replace_query='q'"),
    (plan(5, query="new", replaces="q"), [marker(4), marker(4)], "query q writes into these lanes"),
    (
        plan(0, query="new", replaces="q"),
        [marker(4, replaced=tuple(str(number) for number in range(64)))] * 2,
        "64 queries were replaced",
    ),
    (plan(0, query="new", replaces="x"), [marker(4), marker(4)], "give replace_query='q'"),
    (plan(0, query="new", replaces="q"), [marker(4), marker(4)], [NOTHING, NOTHING]),
    (
        plan(0, query="new", replaces="q"),
        [marker(NOTHING, query="new", replaced=("q",)), marker(4)],
        [NOTHING, NOTHING],
    ),
    (plan(0, replaces="new"), [marker(3, query="new", replaced=("q",))] * 2, "query new has replaced this one"),
    (plan(), [marker(3, query="new", replaced=("q",))] * 2, "query new has replaced this one"),
    (plan(), [marker(4), marker(4, query="x")], "lane 1 is of query x, lane 0 of q"),
]


@pytest.mark.parametrize(("wanted", "stored", "follows"), TABLE)
def test_what_the_markers_say(wanted: Plan, stored: list[Stored | None], follows: list[int] | str) -> None:
    if isinstance(follows, str):
        with pytest.raises(StreamsError, match=follows):
            wanted.pins(stored, 7)
        return
    pinned = [LaneMetadata(**_fields(each)) for each in wanted.pins(stored, 7)]
    assert [each.batch for each in pinned] == follows
    assert {(each.query, each.token, each.most) for each in pinned} == {(wanted.query, "mine", len(stored))}
    for each, before in zip(pinned, stored, strict=True):
        if before is not None and _fields(before)["query"] == wanted.query:
            assert each.lanes == _fields(before)["lanes"]  # a pin says nothing new about rows


def _fields(stored: Stored) -> dict[str, Any]:
    fields = msgspec.json.decode(stored.metadata)
    return {**fields, "replaced": tuple(fields.get("replaced", ()))}


def test_a_task_writes_only_with_the_token_of_its_own_run() -> None:
    request = LaneRequest(plan=plan(), lane=1)
    for stored in (None, marker(4), marker(5)):
        with pytest.raises(StreamsError, match="another run has taken the lanes over"):
            request.written(stored)
    behind, there = plan().pins([marker(4), marker(5)], 7)
    assert request.written(behind) is None
    assert request.written(there) is not None
    after = _fields(request.marker(behind, 9))
    assert (after["batch"], after["lanes"], after["token"], after["most"]) == (5, 2, "mine", 2)


def test_lanes_that_were_left_behind_let_no_run_write() -> None:
    """Neither a driver of the version before nor a task that it had started."""
    pinned = plan().pins([marker(4), marker(4)], 7)
    left = [left_behind(each, f"kes.spark.lanes/t/s.{number}") for number, each in enumerate(pinned)]
    for number in range(2):
        with pytest.raises(StreamsError, match="another run has taken the lanes over"):
            LaneRequest(plan=plan(), lane=number).written(left[number])
    for wanted in (plan(), plan(0), plan(0, query="new"), plan(0, query="new", replaces="q")):
        with pytest.raises(StreamsError, match="Nothing was written"):
            wanted.pins(left, 7)
    back = [inherited(each, f"kes.spark.lanes/t/s.{number}") for number, each in enumerate(left)]
    assert plan().pins(back, 7) == pinned


def test_lanes_of_the_version_before_go_on_under_their_new_names(
    servers: str, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver has pinned both lanes, and one of its tasks has written."""
    settings = stream_write_options({"bootstrap.servers": servers, "topic": make_topic(), "sink": "s"})
    now = [lane_of(settings, number) for number in range(2)]
    before = [lane for lane in (each.as_former() for each in now) if lane is not None]
    old, new = plan(0), dataclasses.replace(plan(0), token="new")
    with monkeypatch.context() as version:
        version.setattr(lanes_module, "lane_of", lambda options, number: before[number])
        lanes_module._pin(settings, old)
    assert write_lane(before[0], LaneRequest(plan=old, lane=0), list, size=0)[1]
    lanes_module._pin(settings, new)
    assert [write_lane(now[n], LaneRequest(plan=new, lane=n), list, size=0)[1] for n in range(2)] == [False, True]
    with pytest.raises(StreamsError, match="another run has taken the lanes over"):
        write_lane(before[1], LaneRequest(plan=old, lane=1), list, size=0)


def rows_of(spark: SparkSession, rows: int = ROWS) -> DataFrame:
    return spark.range(0, rows, numPartitions=3).selectExpr(
        "cast(id % 50 as string) key", "cast(id as string) value", "'T' type", "id"
    )


def written(topic: str, options: dict[str, str], read: Read, lanes: int = 4) -> list[Any]:
    settings = stream_write_options({**options, "topic": topic, "sink": topic})
    for number in range(lanes):
        settle(lane_of(settings, number), "test")
    found: list[Any] = read(topic).orderBy("partition", "offset").collect()
    return found


def test_every_row_once_in_order_per_key_and_a_second_time_nothing(
    spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read
) -> None:
    topic = make_topic(partitions=3)
    options = {"bootstrap.servers": servers}
    settings: dict[str, Any] = {"sink": topic, "topic": topic, "order": ["id"]}
    settings["servers"] = servers
    first = write_lanes(rows_of(spark), None, lanes=3, **settings)
    assert sum(first.written.values()) == ROWS
    assert set(first.written) == {0, 1, 2}
    again = write_lanes(rows_of(spark), None, lanes=3, **settings)
    assert again.written == {}
    with pytest.raises(ConfigError, match="written with lanes=3, not 2"):
        write_lanes(rows_of(spark), None, lanes=2, **settings)
    by_key: dict[bytes, list[int]] = {}
    for row in written(topic, options, read):
        by_key.setdefault(bytes(row.key), []).append(int(row.value))
    assert by_key == {str(key).encode(): list(range(key, ROWS, 50)) for key in range(50)}
    with pytest.raises(ConfigError, match="column id is no part of a record, and order does not name it"):
        write_lanes(rows_of(spark), None, lanes=3, **{**settings, "order": []})
    with pytest.raises(ConfigError, match="belongs into foreachBatch"):
        write_lanes(rows_of(spark), 3, lanes=3, **settings)


@pytest.mark.slow
@pytest.mark.nightly
def test_in_a_stream_with_another_number_of_lanes_from_batch_to_batch(
    spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read, tmp_path: Any
) -> None:
    topic = make_topic(partitions=2)
    numbers = iter([2, 4, 1, 3])
    failed: list[str] = []

    def write(df: DataFrame, batch: int) -> None:
        lanes = next(numbers)
        rows = df.selectExpr("cast(value % 50 as string) key", "cast(value as string) value")
        settings: dict[str, Any] = {"sink": topic, "topic": topic, "servers": servers}
        write_lanes(rows, batch, lanes=lanes, **settings)
        assert write_lanes(rows, batch, lanes=lanes, **settings).written == {}
        if lanes > 1:
            try:
                write_lanes(rows, batch, lanes=lanes - 1, **settings)
            except ConfigError as error:
                failed.append(str(error))

    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 500).option("numPartitions", 2).load()
    query = (
        source.writeStream.foreachBatch(write)
        .option("checkpointLocation", str(tmp_path))
        .trigger(processingTime="0 seconds")
        .start()
    )
    deadline = time.monotonic() + 200
    while query.isActive and time.monotonic() < deadline and (query.lastProgress or {}).get("batchId", -1) < 3:
        time.sleep(0.1)
    assert next(numbers, None) is None, query.exception()
    query.stop()
    assert len(failed) == 3
    values = Counter(int(row.value) for row in written(topic, {"bootstrap.servers": servers}, read))
    assert values == Counter(range(2000))


def test_an_input_that_is_cut_writes_nothing_of_its_lane(
    spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream failures end the iterator of a task cleanly: here every lane loses its last rows, with the end row."""
    topic = make_topic()
    routed: Callable[..., DataFrame] = lanes_module._routed
    monkeypatch.setattr(lanes_module, "_routed", lambda *given: routed(*given).where("not _end"))
    settings: dict[str, Any] = {"sink": topic, "topic": topic, "servers": servers}
    rows = rows_of(spark).drop("id")
    with pytest.raises(Exception, match="its rows end without the end row"):
        write_lanes(rows, None, lanes=2, **settings)
    options = {"bootstrap.servers": servers}
    assert written(topic, options, read) == []
    monkeypatch.undo()
    assert sum(write_lanes(rows, None, lanes=2, **settings).written.values()) == ROWS
    assert len(written(topic, options, read)) == ROWS
