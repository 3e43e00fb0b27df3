"""What the model's driver decides by a marker is what the sink's code decides: every combination of a small world."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("pyspark")

from streams.errors import StreamsError
from streams.spark.markers import BatchRequest

from .spark_driver import Verdict, decide, marker_of
from .spark_rules import Config, Model
from .spark_state import NOBODY, Driver, Marker

MODEL = Model(Config("any", queries=3))
QUERIES = range(3)
BATCHES = range(3)
ROWS = (1, 2)
MARKERS = [
    None,
    *(Marker(query, batch, bits, rows) for query in QUERIES for batch in BATCHES for bits in range(8) for rows in ROWS),
]
LAST = [None, *((query, batch) for query in QUERIES for batch in range(-1, 3))]


def _name(query: int) -> str:
    return f"query-{query}"


def _bits(queries: int) -> tuple[str, ...]:
    return tuple(_name(query) for query in QUERIES if queries >> query & 1)


def _request(driver: Driver) -> BatchRequest:
    return BatchRequest(
        sink="s", lane="l", query=_name(driver.query), batch=driver.batch, rows=driver.end - driver.start,
        replaces=None if driver.names == NOBODY else _name(driver.names),
        last_written=None if driver.last is None else (_name(driver.last[0]), driver.last[1]),
    )  # fmt: skip


def _request_of(marker: Marker) -> BatchRequest:
    return BatchRequest(sink="s", lane="l", query=_name(marker.query), batch=marker.batch, rows=marker.rows)


def _stored(marker: Marker | None) -> object:
    """The marker as the code writes it: its last commit on top of those that it replaced, one after the other."""
    if marker is None:
        return None
    stored = None
    for query in [query for query in QUERIES if marker.replaced >> query & 1 and query != marker.query]:
        stored = _request_of(Marker(query, 0)).marker(stored, 0)
    return _request_of(marker).marker(stored, 0)


def _code(driver: Driver, marker: Marker | None) -> str:
    try:
        return "go on" if _request(driver).written(_stored(marker)) is None else "written"  # type: ignore[arg-type]
    except StreamsError:
        return "refused"


def _model(driver: Driver, marker: Marker | None) -> str:
    verdict = decide(driver, marker, MODEL)
    return {Verdict.WRITE: "go on", Verdict.SKIP: "written"}.get(verdict, "refused")


@pytest.mark.parametrize("batch", BATCHES)
def test_the_code_decides_as_the_model_does(batch: int) -> None:
    asked = 0
    for names, last, marker in itertools.product((NOBODY, 1, 2), LAST, MARKERS):
        if marker is not None and marker.replaced >> marker.query & 1:
            continue  # who writes was never replaced
        driver = Driver(0, batch, end=1, names=names, last=last)
        assert _code(driver, marker) == _model(driver, marker), (driver, marker)
        asked += 1
    assert asked > 1000


@pytest.mark.parametrize("before", [Marker(0, 1, 0b100), Marker(1, 1, 0), Marker(1, 1, 0b100)], ids=str)
def test_the_code_leaves_the_marker_that_the_model_leaves(before: Marker) -> None:
    driver = Driver(0, 2, end=1, names=1, seen=before)
    after = marker_of(driver)
    written = _request(driver).marker(_stored(before), 0)  # type: ignore[arg-type]
    kept = [query for query in _bits(after.replaced) if f'"{query}"' in written.metadata.partition("replaced")[2]]
    assert kept == list(_bits(after.replaced))
    assert written.offset == after.batch + 1
