"""How a batch is limited, spread over partitions and cut for tasks; what counts as lost. No Spark, no Kafka."""

from __future__ import annotations

import datetime as dt
import json
import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from streams.errors import OffsetError
from streams.records import TopicPartition
from streams.spark.reading.planning import Bounds, Positions, TopicLog, advance, share, split
from streams.spark.reading.pushed import Pushed
from streams.spark.reading.read_options import read_options
from streams.spark.reading.reader import BatchReader
from streams.spark.reading.stream_source import from_json, to_json

pytestmark = pytest.mark.spark

sizes = st.dictionaries(st.integers(0, 20), st.integers(0, 10**7), max_size=12)


@given(sizes, st.integers(0, 10**7))
def test_a_limit_is_used_up_and_nobody_starves(waiting: dict[int, int], limit: int) -> None:
    given_out = share(waiting, limit)
    hungry = sum(1 for size in waiting.values() if size)
    assert given_out.keys() == waiting.keys()
    assert sum(given_out.values()) == min(sum(waiting.values()), max(limit, hungry))
    assert all(min(1, size) <= given_out[key] <= size for key, size in waiting.items())


@given(sizes, st.integers(1, 10**6))
def test_a_limit_is_spread_in_proportion(waiting: dict[int, int], limit: int) -> None:
    total = sum(waiting.values())
    for key, got in share(waiting, limit).items():
        if total > limit:
            assert abs(got - limit * waiting[key] / total) <= len(waiting) + 1


spans = st.dictionaries(
    st.integers(0, 9),
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)).map(lambda pair: (min(pair), max(pair))),
    max_size=8,
)
maybe = st.none() | st.integers(1, 300)


@given(spans, maybe, st.none() | st.integers(5000, 10**6))
def test_pieces_cover_every_range_once_and_in_order(
    ranges: dict[int, tuple[int, int]], least: int | None, most: int | None
) -> None:
    pieces = split(ranges, min_partitions=least, max_records=most)
    for key, (begin, end) in ranges.items():
        of_key = [(first, last) for found, first, last in pieces if found == key]
        edges = [begin, *(last for _, last in of_key)] if begin < end else [begin]
        assert [first for first, _ in of_key] == edges[:-1]
        assert edges[-1] == (end if begin < end else begin)
    assert all(begin < end for _, begin, end in pieces)
    assert all(end - begin <= most for _, begin, end in pieces) if most else True
    total = sum(end - begin for begin, end in ranges.values())
    assert len(pieces) >= min(total, least or 0)


def test_no_option_no_cut() -> None:
    assert split({"a": (0, 10**9), "b": (5, 5)}, min_partitions=None, max_records=None) == [("a", 0, 10**9)]
    assert split({"a": (0, 100), "b": (0, 300)}, min_partitions=4, max_records=None) == [
        ("a", 0, 100), ("b", 0, 100), ("b", 100, 200), ("b", 200, 300),
    ]  # fmt: skip


P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


def logs(*bounds: tuple[int, int], topic_id: str = "x") -> dict[str, TopicLog]:
    """Topic ``t`` with (first, end) for each partition."""
    return {"t": TopicLog(topic_id, {n: Bounds(first, end, end) for n, (first, end) in enumerate(bounds)})}


def test_a_topic_made_again_begins_where_its_log_does() -> None:
    found = advance(Positions({"t": "x"}, {P0: 5}), logs((2, 9), topic_id="z"))
    assert (found.begin, found.end) == ({P0: 2}, {P0: 9})
    (loss,) = found.losses
    assert "t was deleted and recreated (id x then, z now): it had been read up to t[0] offset 5" in loss


def test_a_new_partition_that_lost_its_beginning_is_a_loss() -> None:
    found = advance(Positions({"t": "x"}, {P0: 5}), logs((0, 9), (4, 6)))
    assert found.begin[P1] == 4
    assert found.losses == ["t[1]: offsets 0 to 3 are gone (retention)"]


def test_what_was_read_of_an_open_transaction_is_no_loss() -> None:
    """A query that read uncommitted records goes on with committed ones: it waits until the transaction has ended."""
    open_one = {"t": TopicLog("x", {0: Bounds(0, 3, 8)})}
    found = advance(Positions({"t": "x"}, {P0: 5}), open_one)
    assert (found.begin, found.end, found.losses) == ({P0: 5}, {P0: 5}, [])


@given(
    st.dictionaries(st.builds(TopicPartition, st.sampled_from("ab"), st.integers(0, 3)), st.integers(0, 99)),
    st.dictionaries(st.sampled_from("ab"), st.dictionaries(st.integers(0, 3), st.tuples(*[st.integers(0, 99)] * 3))),
    st.dictionaries(st.sampled_from("ab"), st.sampled_from("xy")),
)
def test_a_range_is_always_one_that_the_log_has(
    at: dict[TopicPartition, int], now: dict[str, dict[int, tuple[int, int, int]]], ids: dict[str, str]
) -> None:
    there = {topic: TopicLog("x", {p: Bounds(*sorted(b)) for p, b in parts.items()}) for topic, parts in now.items()}
    found = advance(Positions(ids, at), there)
    for topic, log in there.items():
        for partition, bounds in log.partitions.items():
            place = TopicPartition(topic, partition)
            assert bounds.first <= found.begin[place] <= found.end[place] <= bounds.high
            lost = ids.get(topic, "x") != "x" or not bounds.first <= at.get(place, 0) <= bounds.high
            if not lost:
                assert found.begin[place] == at.get(place, 0)
            else:
                assert found.losses


@given(
    st.dictionaries(
        st.builds(TopicPartition, st.sampled_from(["b", "a", "version"]), st.integers(0, 12)), st.integers(0)
    )
)
def test_positions_survive_as_json_and_equal_ones_are_equal_texts(at: dict[TopicPartition, int]) -> None:
    ids = dict.fromkeys(sorted({place.topic for place in at}, reverse=True), "id")
    text = json.dumps(to_json(Positions(ids, at)))
    back = from_json(json.loads(text))
    assert (dict(back.ids), dict(back.at)) == (ids, at)
    assert json.dumps(to_json(Positions(ids, dict(reversed(at.items()))))) == text


def test_the_text_in_a_checkpoint_stays_as_it_is() -> None:
    """Changing it strands every query there is: make a new version, and go on reading this one."""
    assert json.dumps(to_json(Positions({"t": "x"}, {P1: 7, P0: 5}))) == (
        '{"version": 1, "topics": {"t": {"id": "x", "offsets": {"0": 5, "1": 7}}}}'
    )


def test_the_connectors_positions_are_understood() -> None:
    assert from_json({"t": {"0": 5, "1": 7}}) == Positions({}, {P0: 5, P1: 7})
    assert from_json({"version": {"0": 5}}) == Positions({}, {TopicPartition("version", 0): 5})


@pytest.mark.parametrize("raw", [{"version": 1}, {"version": 1, "topics": {"t": 5}}, {"t": 5}, {"t": {"x": 5}}, [1], 7])
def test_other_positions_are_refused(raw: object) -> None:
    with pytest.raises(OffsetError, match="not those of a Kafka source"):
        from_json(raw)


def test_positions_of_a_later_version_are_refused() -> None:
    with pytest.raises(OffsetError, match="positions of version 2, this package reads 1"):
        from_json({"version": 2, "topics": {}})


def pushed(*filters: Any) -> Pushed:
    reading = BatchReader(read_options({"kafka.bootstrap.servers": "b:1", "subscribe": "t"}))
    given: Any = list(filters)
    assert reading.pushFilters(given) == given, "all of them are left to Spark, too"
    copy: BatchReader = pickle.loads(pickle.dumps(reading))
    assert copy.pushFilters.__func__ is DataSourceReader.pushFilters, "else Spark refuses it where push-down is off"
    return copy._pushed


def test_filters_that_are_understood_cut_ranges_and_rows() -> None:
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    assert pushed(GreaterThan(("offset",), 4), LessThanOrEqual(("offset",), 9)).clipped(0, 100) == (5, 10)
    assert pushed(In(("offset",), (7, 3))).clipped(5, 100) == (5, 8)
    assert pushed(LessThan(("offset",), 3)).clipped(5, 100) == (5, 5)
    assert pushed(EqualTo(("offset",), 3), GreaterThanOrEqual(("offset",), 3)).clipped(0, 9) == (3, 4)
    assert [pushed(In(("partition",), (1, 2))).reads(TopicPartition("t", p)) for p in (0, 2)] == [False, True]
    assert [pushed(EqualTo(("topic",), "t")).reads(TopicPartition(t, 0)) for t in "tu"] == [True, False]
    assert pushed(GreaterThan(("timestamp",), at)).since_ms() == int(at.timestamp() * 1000) - 1
    assert pushed(LessThan(("timestamp",), at)).since_ms() is None
    batch = pa.record_batch({"key": [b"a", None, b"b"], "type": ["A", "B", None], "timestamp": [at] * 3})
    assert pushed(EqualTo(("key",), b"b")).kept(batch).column("key").to_pylist() == [b"b"]
    assert pushed(In(("type",), ("A", "B")), LessThan(("timestamp",), at)).kept(batch).num_rows == 0
    assert pushed(In(("type",), ("A", "B")), LessThanOrEqual(("timestamp",), at)).kept(batch).num_rows == 2


@pytest.mark.parametrize(
    "one",
    [
        EqualTo(("value",), b"x"), EqualTo(("_meta", "offset"), 3), EqualTo(("offset",), None),
        In(("key",), (b"a", None)),
        In(("type",), ()), GreaterThan(("key",), b"a"), Not(EqualTo(("type",), "A")), IsNull(("key",)),
        EqualTo(("offset",), True), GreaterThan(("timestamp",), dt.datetime(2026, 1, 1)),
    ],
)  # fmt: skip
def test_filters_that_are_not_understood_are_left_to_spark(one: Any) -> None:
    assert pushed(one) == Pushed()
