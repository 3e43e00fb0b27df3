"""What the model decides by a marker is what the sink's code decides: every combination of a small world."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("pyspark")

from streams.errors import StreamsError
from streams.spark.writing.markers import BatchRequest, Stored

from .spark_driver import Verdict, decide, marker_of
from .spark_rules import Config, Model
from .spark_state import NOBODY, Driver, Marker

MODEL = Model(Config("any", queries=3))
QUERIES = BATCHES = range(3)
MARKERS = [
    Marker(*one)
    for one in itertools.product(QUERIES, BATCHES, range(8), (1, 2))
    if not one[2] >> one[0] & 1  # who writes was never replaced
]
LAST = [None, *((query, batch) for query in QUERIES for batch in range(-1, 3))]


def _request(driver: Driver) -> BatchRequest:
    return BatchRequest(
        sink="s", identity="l", query=f"query-{driver.query}", batch=driver.batch, rows=driver.end - driver.start,
        replaces=None if driver.names == NOBODY else f"query-{driver.names}",
        last_written=None if driver.last is None else (f"query-{driver.last[0]}", driver.last[1]),
    )  # fmt: skip


def _stored(marker: Marker | None) -> Stored | None:
    """The marker as the code writes it: its last commit on top of those that it replaced, one after the other."""
    stored = None
    if marker is not None:
        for query in [query for query in QUERIES if marker.replaced >> query & 1 and query != marker.query]:
            stored = _request(Driver(query, end=0)).marker(stored, 0)
        stored = _request(Driver(marker.query, marker.batch, end=marker.rows)).marker(stored, 0)
    return stored


def _by_the_code(request: BatchRequest, stored: Stored | None) -> Verdict | str:
    try:
        return Verdict.WRITE if request.written(stored) is None else Verdict.SKIP
    except StreamsError:
        return "refused"


@pytest.mark.parametrize("batch", BATCHES)
def test_the_code_decides_as_the_model_does(batch: int) -> None:
    for names, last, marker in itertools.product((NOBODY, 1, 2), LAST, [None, *MARKERS]):
        driver = Driver(0, batch, end=1, names=names, last=last)
        verdict = decide(driver, marker, MODEL)
        wanted = verdict if verdict in (Verdict.WRITE, Verdict.SKIP) else "refused"
        assert _by_the_code(_request(driver), _stored(marker)) == wanted, (driver, marker)


@pytest.mark.parametrize("before", [Marker(0, 1, 0b100), Marker(1, 1, 0), Marker(1, 1, 0b100)], ids=str)
def test_the_code_leaves_the_marker_that_the_model_leaves(before: Marker) -> None:
    driver = Driver(0, 2, end=1, names=1, seen=before)
    after = marker_of(driver)
    written = _request(driver).marker(_stored(before), 0)
    replaced = written.metadata.partition("replaced")[2]
    assert [f'"query-{query}"' in replaced for query in QUERIES] == [bool(after.replaced >> q & 1) for q in QUERIES]
    assert written.offset == after.batch + 1
