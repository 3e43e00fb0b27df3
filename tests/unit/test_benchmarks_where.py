"""Where the milliseconds go: that what several processes tell is put together rightly. Nothing here asserts a speed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from benchmarks import handwritten, page, tracing
from benchmarks.engine import source_of
from benchmarks.instructions.drive import JOB, by_engine
from benchmarks.instructions.scripted import PARTITIONS, Feed, ScriptedConsumer, ScriptedProducer, messages
from benchmarks.measures import measures
from benchmarks.tracing import POINTS, Marks, Trace
from benchmarks.where.measure import WhereMeasure
from benchmarks.where.run import Where
from benchmarks.where.ways import STRETCHES, Mismatch, Sent, Stretch, Way, slowest, summed_up, transactions, ways
from tests.unit.benchmarks_kit import rows_of, run_of, shown

ONE = 1_000.0
"""When the first event is sent."""


def marks_of(steps: Iterable[tuple[int, float]]) -> Marks:
    """A system that has each point 1 ms after the one before, for one partition: (next offset, when received)."""
    return {
        point: {0: [(offset, received + number * 0.001) for offset, received in steps]}
        for number, point in enumerate(POINTS)
    }


def three() -> tuple[dict[int, list[Sent]], Marks, dict[int, list[tuple[float, float]]]]:
    """Three events, 10 ms apart; the first two are received and committed together, 20 ms after the first was sent."""
    sent = [ONE, ONE + 0.010, ONE + 0.020]
    events = {0: [Sent(number, at, at + 0.002) for number, at in enumerate(sent)]}
    marks = marks_of([(2, ONE + 0.020), (3, ONE + 0.040)])
    seen = {0: [(sent[0], ONE + 0.030), (sent[1], ONE + 0.030), (sent[2], ONE + 0.050)]}
    return events, marks, seen


# ----------------------------------------------------------------------------------------------- the way of an event


def test_each_event_has_the_times_of_what_it_travelled_with() -> None:
    first, second, third = ways(*three(), skip=0)
    assert first.stretches == pytest.approx((2, 18, 1, 1, 1, 1, 1, 1, 1, 3))
    assert second.stretches == pytest.approx((2, 8, 1, 1, 1, 1, 1, 1, 1, 3))
    assert third.stretches == pytest.approx((2, 18, 1, 1, 1, 1, 1, 1, 1, 3))
    assert [way.whole for way in (first, second, third)] == pytest.approx([30, 20, 30])
    assert first.committed == second.committed != third.committed
    assert transactions((first, second, third)) == 2
    assert len(first.stretches) == len(STRETCHES)


def test_the_first_events_are_left_out_whatever_their_partition() -> None:
    events, marks, seen = three()
    events[1], seen[1] = [events[0].pop(0)], [seen[0].pop(0)]
    marks = {point: {0: found[0], 1: found[0]} for point, found in marks.items()}
    assert [way.sent for way in ways(events, marks, seen, skip=1)] == [ONE + 0.010, ONE + 0.020]


def test_a_point_is_passed_at_the_first_mark_beyond_the_event() -> None:
    events, marks, seen = three()
    # told twice, and once more from before, as after a restart
    again = {point: {0: [found[0][0], found[0][0], (1, found[0][0][1] + 0.001), found[0][1]]}
             for point, found in marks.items()}  # fmt: skip
    assert ways(events, again, seen, skip=0) == ways(events, marks, seen, skip=0)


def test_an_answer_that_comes_after_the_reader_has_no_time_of_its_own() -> None:
    events, marks, seen = three()
    marks["committed"][0][1] = (3, ONE + 0.060)
    assert ways(events, marks, seen, skip=2)[0].stretches == pytest.approx((2, 18, 1, 1, 1, 1, 1, 1, 4, 0))


def test_the_clock_of_the_log_cannot_be_before_that_of_the_generator() -> None:
    events, marks, seen = three()
    events[0][0] = Sent(0, ONE, ONE - 0.0005)
    assert ways(events, marks, seen, skip=0)[0].stretches[:2] == pytest.approx((0, 20))


@pytest.mark.parametrize("fault", ["output missing", "swapped", "one too many", "point missing", "ends too early"])
def test_what_does_not_belong_together_is_no_result(fault: str) -> None:
    events, marks, seen = three()
    if fault == "output missing":
        seen[0].pop()
    elif fault == "swapped":
        seen[0][0], seen[0][1] = seen[0][1], seen[0][0]
    elif fault == "one too many":
        seen[0].append((ONE, ONE))
    elif fault == "point missing":
        del marks["flushed"]
    else:
        marks["offsets"][0].pop()
    with pytest.raises(Mismatch):
        ways(events, marks, seen, skip=0)


def way(number: int, *stretches: float) -> Way:
    return Way(float(number), stretches + (0.0,) * (len(STRETCHES) - len(stretches)), 0.0)


def test_groups_are_of_whole_ways_and_add_up() -> None:
    # the longer the way, the shorter its first stretch; and the earlier it begins
    found = [way(1_001 - number, 100.0 - number / 10, float(number)) for number in range(1, 1_001)]
    told = summed_up(found)
    assert (told["input"].p50, told["input"].p99) == (pytest.approx(50.0), pytest.approx(99.0))
    assert told["input"].slowest < told["input"].middle < told["input"].p99
    assert sum(stretch.slowest for stretch in told.values()) == pytest.approx(
        sum(one.whole for one in found[990:]) / 10
    )
    assert told["read"] == Stretch(0.0, 0.0, 0.0, 0.0)
    assert [len(slowest(found[:count])) for count in (1, 50, 200)] == [1, 1, 2]


# ------------------------------------------------------------------------------------------------- what systems tell


class Quiet:
    """Measures nothing."""

    def begin(self) -> None: ...

    end = begin


def test_the_engine_tells_every_point_of_every_event_in_order() -> None:
    trace, events = Trace(), 2_000
    with tracing.engine_traced(trace):
        by_engine(source_of, Quiet(), 500, events - 500)
    _tells_all(trace.marks(), events)
    untraced = Trace()
    by_engine(source_of, Quiet(), 100, 100)
    assert not any(untraced.marks().values())


def test_the_loop_by_hand_tells_the_same_points(tmp_path: Path) -> None:
    events, path = 1_000, tmp_path / "trace.json"
    feed = Feed(messages(events))
    feed.allowed = events
    done = threading.Event()

    class Producer(ScriptedProducer):
        def commit_transaction(self, *_: object) -> None:
            commits.append(1)
            if len(commits) == events // 250:
                done.set()

    commits: list[int] = []
    consumer = type("Consumer", (ScriptedConsumer,), {"feed": feed, "pause": lambda *_: None})
    job = msgspec.structs.replace(JOB, options={"events": "250", "delay_ms": "100000", "trace": str(path)})
    with mock.patch.object(handwritten, "Consumer", consumer), mock.patch.object(handwritten, "Producer", Producer):
        loop = handwritten.Loop(job)
        handle, handled_at = loop._handle, list[float]()

        def timed(producer: Any, message: Any) -> None:
            handled_at.append(time.time())
            handle(producer, message)

        loop._handle = timed  # type: ignore[method-assign]
        running = threading.Thread(target=loop.run)
        running.start()
        try:
            assert done.wait(30)
        finally:
            loop.stop()
            running.join(30)
    assert loop.trace is not None
    loop.trace.write(path)
    marks = tracing.read(path)
    _tells_all(marks, events)
    assert min(seconds for found in marks["received"].values() for _, seconds in found) <= handled_at[0]
    assert handwritten_untraced(consumer).trace is None


def handwritten_untraced(consumer: Any) -> handwritten.Loop:
    with (
        mock.patch.object(handwritten, "Consumer", consumer),
        mock.patch.object(handwritten, "Producer", ScriptedProducer),
    ):
        return handwritten.Loop(JOB)


def _tells_all(marks: Marks, events: int) -> None:
    """Every event has every point, none before the one before."""
    assert list(marks) == list(POINTS)
    for point in POINTS:
        assert sum(max(offset for offset, _ in marks[point][partition]) for partition in range(PARTITIONS)) == events
    sent = {
        partition: [Sent(offset, 1.0, 1.0) for offset in range(max(offset for offset, _ in found))]
        for partition, found in marks["committed"].items()
    }
    seen = {partition: [(1.0, 1e12)] * len(mine) for partition, mine in sent.items()}
    found = ways(sent, marks, seen, skip=0)
    assert len(found) == events
    # what is later than the point after it makes the sum of the stretches end behind the last point
    assert max(abs(1.0 + sum(way.stretches[:-1]) / 1000 - way.committed) for way in found) < 1e-5


def test_marks_are_handed_over_as_json(tmp_path: Path) -> None:
    trace = Trace()
    offsets = {0: 5, 3: 1}
    trace.at("sealed", offsets, 7.5)
    offsets[0] = 9  # what was told does not change any more
    trace.at("sealed", offsets)
    trace.write(tmp_path / "trace.json")
    marks = tracing.read(tmp_path / "trace.json")
    assert marks["sealed"][3][0] == (1, 7.5)
    assert [offset for offset, _ in marks["sealed"][0]] == [5, 9]
    assert set(json.loads((tmp_path / "trace.json").read_text())) == set(POINTS)


# -------------------------------------------------------------------------------------------------- what is shown


def found(system: str, turn: int, *, fault: str = "", behind: str = "") -> Where:
    stretches = {name: Stretch(turn, turn * 2.0, turn + 0.5, turn * 10.0) for name in STRETCHES}
    return Where(
        system, turn, 2_000, 5, 1, fault, 10_000, 9.0, 19.0, 40.0, 3, {} if fault else stretches, 0.5, behind=behind
    )


def test_tables_and_pictures_tell_medians_of_runs_that_are_right() -> None:
    runs = [found("engine", 1), found("engine", 3), found("engine", 9, behind="late"), found("b", 1, fault="1 lost")]
    text = shown(run_of(where=runs))
    rows = [row for row in rows_of(text) if row[0] in {"flush", "all"}]
    assert rows[0][2:] == ["2.0 (1.0; 3.0)", "4.0 (2.0; 6.0)", "2.5 (1.5; 3.5)", "20.0 (10.0; 30.0)"]
    count = len(STRETCHES)
    assert rows[1][2:4] == ["9.0 (9.0; 9.0)", "19.0 (19.0; 19.0)"]
    assert rows[1][5] == f"{20 * count}.0 ({10 * count}.0; {30 * count}.0)"
    assert [row[2] for row in rows[2:]] == ["-", "-"]
    assert "not right: b: 1 lost" in text
    (drawn,) = WhereMeasure().plots(runs)
    assert list(drawn.bars) == ["engine, about the median", "engine, slowest 1 %"]  # type: ignore[union-attr]
    assert drawn.bars["engine, slowest 1 %"] == dict.fromkeys(STRETCHES, 20.0)  # type: ignore[union-attr]
    assert not WhereMeasure().plots([found("b", 1, fault="1 lost")])[0]


def test_one_line_names_the_longest_stretches_and_no_figure_of_a_fault() -> None:
    measure = next(measure for measure in measures() if measure.name == "where")
    one = found("engine", 1)
    one.stretches["flush"] = Stretch(1, 1, 1, 70.0)
    assert "flush 70.0, input 10.0" in measure.in_short(one)
    assert measure.in_short(found("engine", 1, fault="1 lost")).endswith("engine: 1 lost")


def test_the_page_shows_it(tmp_path: Path) -> None:
    run = run_of(where=[found("engine", 1)])
    run.write(tmp_path / "run.json")
    assert page.main([str(tmp_path / "run.json"), "--docs", str(tmp_path)]) == 0
    text = (tmp_path / "results.md").read_text()
    assert "![Where the milliseconds go at 2,000 events/s" in text
    assert "(results/where-2000.svg)" in text
    assert "| flush | all of the transaction is acknowledged | 1.0 | 2.0 | 1.5 | 10.0 |" in text
    assert "10,000 events a run, 40.0 of them per transaction; transactions of the slowest 1 %: 3." in text
