"""What the models decide by a marker is what the sink's code decides: every combination of a small world of the one,
every reachable state of the other."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

pytest.importorskip("pyspark")

from streams.errors import StreamsError
from streams.spark.lane_markers import LaneMetadata, LaneRequest, Plan
from streams.spark.markers import BatchRequest, Stored, read_metadata

from . import spark_lanes as lanes
from .search import search
from .spark_driver import Verdict, decide, marker_of
from .spark_lanes import LANES, Lanes
from .spark_rules import Config, LaneConfig, Model
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
        sink="s", lane="l", query=f"query-{driver.query}", batch=driver.batch, rows=driver.end - driver.start,
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


def _by_the_code(request: BatchRequest | LaneRequest, stored: Stored | None) -> Verdict | str:
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


class _Seen(Lanes):
    """Keeps the worlds that a search meets."""

    def done(self, world: lanes.World) -> bool:
        WORLDS.append(world)
        return super().done(world)


WORLDS: list[lanes.World] = []


@pytest.fixture(scope="module")
def worlds() -> list[lanes.World]:
    if not WORLDS:
        assert search(_Seen(LaneConfig("other number of lanes", widths=(1, 2)))).complete
    assert len(WORLDS) > 50_000
    assert any(driver.at == lanes.GONE for world in WORLDS for driver in world.drivers)
    return WORLDS


def _plan(driver: int, batch: int, width: int) -> Plan:
    return Plan(sink="s", query="q", batch=batch, lanes=width, token=str(driver))


def _stored_in_lane(marker: lanes.Marker | None) -> Stored | None:
    if marker is None:
        return None
    return LaneMetadata("q", marker.batch, marker.width, LANES, str(marker.token), 0).stored()


def _read(pin: Stored) -> lanes.Marker:
    found = read_metadata(pin, LaneMetadata)
    assert found.most == LANES
    return lanes.Marker(found.batch, found.lanes, int(found.token))


def test_a_driver_pins_where_the_model_does_and_leaves_what_the_model_leaves(worlds: list[lanes.World]) -> None:
    cases = {
        (index, driver.batch, driver.width, tuple(lane.marker for lane in world.lanes))
        for world in worlds
        for index, driver in enumerate(world.drivers)
        if driver.at == lanes.DECIDE
    }
    answers: Counter[bool] = Counter()
    for index, batch, width, markers in cases:
        allowed = lanes.may_pin(list(markers), batch, width)
        answers[allowed] += 1
        try:
            pins = _plan(index, batch, width).pins([_stored_in_lane(marker) for marker in markers], 0)
        except StreamsError:
            assert not allowed, (index, batch, width, markers)
        else:
            assert allowed, (index, batch, width, markers)
            assert [_read(pin) for pin in pins] == [lanes.pinned(marker, index, width) for marker in markers]
    assert answers[True] > 20
    assert answers[False] > 5


def test_a_task_writes_where_the_model_does(worlds: list[lanes.World]) -> None:
    cases = {
        (world.lanes[number].marker, index, copies[0].batch, driver.width, number)
        for world in worlds
        for index, driver in enumerate(world.drivers)
        for number, copies in enumerate(driver.tasks)
        if copies[0].at == lanes.READY and world.lanes[number].holder == (index, number, 0)
    }
    answers = set()
    for marker, index, batch, width, number in cases:
        request = LaneRequest(plan=_plan(index, batch, width), lane=number)
        answer = {True: Verdict.WRITE, False: Verdict.SKIP}.get(lanes.may_write(marker, index, batch, width), "refused")  # type: ignore[arg-type]
        assert _by_the_code(request, _stored_in_lane(marker)) == answer, (marker, index, batch, width, number)
        answers.add(answer)
    assert answers == {Verdict.WRITE, Verdict.SKIP, "refused"}
