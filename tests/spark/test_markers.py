"""What a marker says, and what follows from it: one table, no broker."""

from __future__ import annotations

import dataclasses

import pytest

from streams.errors import ConfigError, OffsetError, StreamsError
from streams.spark.writing.markers import BatchRequest, Stored, WriteRequest, Written, written_by

pytestmark = pytest.mark.spark
QUERY, OTHER = "q-1", "q-2"


def asked(
    batch: int, *, query: str = QUERY, replaces: str | None = None, last: tuple[str, int] | None = None
) -> BatchRequest:
    return BatchRequest(
        sink="s", identity="kes.spark.stream.s", query=query, batch=batch, rows=7, replaces=replaces, last_written=last
    )


def marker(batch: int, query: str = QUERY, before: Stored | None = None, rows: int = 7) -> Stored:
    return dataclasses.replace(asked(batch, query=query), rows=rows).marker(before, at_ms=1000)


def test_source_topics_stay_the_ones_they_were() -> None:
    first = dataclasses.replace(asked(0), sources={"in": "a", "old": "x"}).marker(None, at_ms=1000)
    following = dataclasses.replace(asked(1), sources={"in": "a", "new": "b"})
    assert following.written(first) is None
    with pytest.raises(OffsetError, match=r"source topic in was deleted and recreated \(id a then, c now\)"):
        dataclasses.replace(following, sources={"in": "c"}).written(first)
    again = dataclasses.replace(asked(0), sources={"in": "c"})
    assert again.written(first) == THERE, "what is written already was read before"
    assert asked(1).written(first) is None, "the option was taken away"
    assert dataclasses.replace(asked(1), sources={"in": "a"}).written(marker(0)) is None, "it is new"


THERE = Written(rows=7, at_ms=1000)
WRITE = None
# Which of the three follows is asked for all markers in tests/model/test_spark_decisions.py; these are the words.
TABLE = [
    # asked, marker, what follows (None: write it; a text: refused with it)
    (asked(5), marker(5), THERE),
    (asked(5), marker(5, rows=8), "is in Kafka with 8 rows, and has 7 now.*lastWrittenBatch=q-1:5"),
    (asked(5, last=(QUERY, 5)), marker(5, rows=8), Written(rows=8, at_ms=1000)),
    (asked(5), marker(3), "the last batch written is 3, so batches in between are missing.*lastWrittenBatch=q-1:4"),
    (asked(5), marker(6), "has written up to batch 6 already"),
    (asked(5), None, "the marker of what was written before is missing.*lastWrittenBatch=q-1:5 .it is. or q-1:4"),
    (asked(5, last=(QUERY, 5)), None, Written(rows=7, at_ms=0)),
    (asked(5, last=(QUERY, 3)), None, r"is missing \(option lastWrittenBatch=q-1:3\)"),
    (asked(5, last=(QUERY, 6)), None, r"is missing \(option lastWrittenBatch=q-1:6\)"),
    (asked(5, last=(OTHER, 5)), None, r"is missing \(option lastWrittenBatch=q-2:5\)"),
    (asked(0), marker(0, OTHER), "query q-2 has written to this sink before .up to batch 0..*replaceQuery=q-2;"),
    (asked(1), marker(0, OTHER), "query q-2 writes to this sink now"),
    (asked(0), marker(0, OTHER, marker(0)), "query q-2 has replaced this one"),
    (asked(1), Stored(2, ""), "were set by other means"),
    (asked(1), Stored(2, '{"run":"r","rows":1,"at_ms":1}'), "were set by other means"),
]


@pytest.mark.parametrize(("request_", "stored", "follows"), TABLE)
def test_what_follows_for_a_batch(request_: BatchRequest, stored: Stored | None, follows: Written | str | None) -> None:
    if isinstance(follows, str):
        with pytest.raises(StreamsError, match=follows) as refused:
            request_.written(stored)
        assert "sink 's', batch" in str(refused.value) or "group" in str(refused.value)
        assert "Nothing was written" in str(refused.value)
    else:
        assert request_.written(stored) == follows


def test_what_an_operator_can_change_is_a_config_error() -> None:
    for request_, stored in [(asked(5), None), (asked(0), marker(3, OTHER)), (asked(0, last=(QUERY, 3)), None)]:
        with pytest.raises(ConfigError):
            request_.written(stored)


def test_a_named_write_is_written_whoever_did_it() -> None:
    mine, other = (WriteRequest(write_id="w", run=run, rows=3) for run in ("a", "b"))
    assert mine.written(None) is None
    assert mine.written(other.marker(None, 5)) == Written(rows=3, at_ms=5, run="b")
    assert written_by(mine.marker(None, 5)) == Written(rows=3, at_ms=5, run="a")
    with pytest.raises(StreamsError, match="were set by other means"):
        mine.written(Stored(1, "x"))


def test_markers_remember_who_was_replaced_and_fit_into_the_brokers_limit() -> None:
    """Else a query that was replaced, restarted in its first batch with the option left on, would take over again."""
    stored = None
    ids = [f"{number:08d}-0000-0000-0000-000000000000" for number in range(65)]
    for query in ids:
        before, stored = stored, marker(0, query, stored)
        stored = marker(1, query, stored)  # its later markers remember too
        for old in ids[: ids.index(query)]:
            with pytest.raises(StreamsError, match=f"query {query} has replaced this one"):
                asked(0, query=old, replaces=query).written(stored)
        assert len(stored.metadata) < 4096, before
    with pytest.raises(ConfigError, match="64 queries were replaced under this name"):
        asked(0, query="one-more", replaces=ids[-1]).written(stored)
