"""What the code of lanes decides in every state that the model of lanes can reach: the driver's pins, and each task."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("pyspark")

from streams.errors import StreamsError
from streams.spark.lane_markers import LaneMetadata, LaneRequest, Plan
from streams.spark.markers import Stored, read_metadata

from . import spark_lanes
from .search import explore
from .spark_lanes import DECIDE, GONE, LANES, READY, Marker, World
from .spark_rules import LaneConfig, LaneModel

MODEL = LaneModel(LaneConfig("other number of lanes", widths=(1, 2)))


def _worlds() -> list[World]:
    found: list[World] = []

    def seen(world: World) -> bool:
        found.append(world)
        return True

    verdict = explore(
        spark_lanes.initial(MODEL),
        successors=lambda world: spark_lanes.successors(world, MODEL),
        done=seen,
        stalled=lambda world: "",
        describe=spark_lanes.describe,
        limit=10_000_000,
    )
    assert verdict.complete
    return found


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return _worlds()


def _plan(driver: int, batch: int, width: int) -> Plan:
    return Plan(sink="s", query="q", batch=batch, lanes=width, token=str(driver))


def _stored(marker: Marker | None) -> Stored | None:
    if marker is None:
        return None
    return LaneMetadata("q", marker.batch, marker.width, LANES, str(marker.token), 0).stored()


def _decisions(worlds: list[World]) -> Iterator[tuple[World, int]]:
    asked = set()
    for world in worlds:
        for index, driver in enumerate(world.drivers):
            case = (index, driver.batch, driver.width, tuple(lane.marker for lane in world.lanes))
            if driver.at == DECIDE and case not in asked:
                asked.add(case)
                yield world, index


def test_a_driver_pins_where_the_model_does_and_leaves_what_the_model_leaves(worlds: list[World]) -> None:
    allowed = refused = 0
    for world, index in _decisions(worlds):
        driver, markers = world.drivers[index], [lane.marker for lane in world.lanes]
        after = [
            state for label, state in spark_lanes.successors(world, MODEL)[0] if label[:2] == ("pin_decide", index)
        ]
        wanted = [Marker(-1, driver.width, index) if m is None else m._replace(token=index) for m in markers]
        try:
            pins = _plan(index, driver.batch, driver.width).pins([_stored(marker) for marker in markers], 0)
        except StreamsError:
            assert not after, (driver, markers)
            refused += 1
            continue
        assert after, (driver, markers)
        assert [_read(pin) for pin in pins] == wanted
        allowed += 1
    assert allowed > 20
    assert refused > 5


def test_a_task_writes_where_the_model_does(worlds: list[World]) -> None:
    answers: dict[str, int] = {}
    asked = set()
    for world in worlds:
        for index, driver in enumerate(world.drivers):
            for number, copies in enumerate(driver.tasks):
                task, lane = copies[0], world.lanes[number]
                case = (index, number, task, driver.batch, driver.width, lane.marker)
                if task.at != READY or lane.holder != (index, number, 0) or case in asked:
                    continue
                asked.add(case)
                answer = _task(world, index, number)
                assert answer == _code(index, number, task.batch, driver.width, lane.marker), case
                answers[answer] = answers.get(answer, 0) + 1
    assert set(answers) == {"write", "there", "refused"}


def _labels(world: World) -> list[tuple[object, ...]]:
    return [label for label, _ in spark_lanes.successors(world, MODEL)[0]]


def _task(world: World, index: int, number: int) -> str:
    steps = [
        (label[0], state) for label, state in spark_lanes.successors(world, MODEL)[0] if label[1:3] == (index, number)
    ]
    told = {str(kind) for kind, _ in steps} & {"begin", "skip", "refused", "stale"}
    return {"begin": "write", "skip": "there"}.get(told.pop(), "refused")


def _code(index: int, number: int, batch: int, width: int, marker: Marker | None) -> str:
    try:
        request = LaneRequest(plan=_plan(index, batch, width), lane=number)
        return "write" if request.written(_stored(marker)) is None else "there"
    except StreamsError:
        return "refused"


def _read(pin: Stored) -> Marker:
    found = read_metadata(pin, LaneMetadata)
    assert found.most == LANES
    return Marker(found.batch, found.lanes, int(found.token))


def test_the_states_are_those_of_the_standard_world(worlds: list[World]) -> None:
    assert len(worlds) > 50_000
    assert any(driver.at == GONE for world in worlds for driver in world.drivers)
