"""The Spark benchmark judges rightly, and compares within a round."""

from __future__ import annotations

import random
import zlib
from typing import Any, cast

import pytest
from confluent_kafka import Message

from benchmarks.spark.figures import CpuTimes, SparkRun
from benchmarks.spark.judge import HEADERS, Content, judged
from benchmarks.spark.report import ratio
from tests.unit.benchmarks_kit import rows_of, run_of, shown

NO_CPU = CpuTimes(0.0, 0.0, 0.0)


def records(rows: int) -> list[Any]:
    """What a right side writes: a key's numbers rise."""
    return [
        Message(topic="t", key=b"k%d" % (n % 7), value=b'{"id":%d,"account":"a"}' % n, headers=HEADERS)
        for n in range(rows)
    ]


def due(rows: int) -> Content:
    found = records(rows)
    return Content(rows, sum(zlib.crc32(m.key()) for m in found), sum(zlib.crc32(m.value()) for m in found))


@pytest.mark.parametrize("fault", ["", "lost", "twice", "other value", "other key", "no headers", "swapped"])
def test_the_judge_sees_every_fault(fault: str) -> None:
    heard = records(200)
    place = random.Random(7).randrange(100)
    one = heard[place]
    if fault == "lost":
        del heard[place]
    elif fault == "twice":
        heard.append(one)
    elif fault == "other value":
        heard[place] = Message(topic="t", key=one.key(), value=one.value() + b" ", headers=HEADERS)
    elif fault == "other key":
        heard[place] = Message(topic="t", key=b"k9", value=one.value(), headers=HEADERS)
    elif fault == "no headers":
        heard[place] = Message(topic="t", key=one.key(), value=one.value())
    elif fault == "swapped":
        heard[place], heard[place + 7] = heard[place + 7], heard[place]
    assert bool(judged(cast("list[Message]", heard), due(200), in_order=True)) == bool(fault)
    if fault == "swapped":
        assert not judged(cast("list[Message]", heard), due(200), in_order=False)


def ran(what: str, system: str, turn: int, rate: float, fault: str = "") -> SparkRun:
    return SparkRun(what, system, 2, turn, 1_000, rate, 0.5, NO_CPU, 1.5, fault)


def test_sides_are_compared_within_a_round() -> None:
    runs = [ran("read", name, turn, rate) for turn, pair in enumerate([(100, 200), (1, 2), (50, 25)], 1)
            for name, rate in zip(("connector", "grt"), pair, strict=True)]  # fmt: skip
    assert ratio(runs, "grt", "connector") == 2.0
    assert ratio(runs[1:], "grt", "connector") == 1.25, "the round that only one side has does not count"
    assert ratio(runs, "grt", "somebody") == 0.0


def test_the_first_round_is_not_counted_and_a_fault_shows() -> None:
    found = [ran("stream", "grt", turn, rate) for turn, rate in enumerate([1, 2_000, 3_000, 4_000])]
    found.append(ran("write", "connector", 1, 10, "7 rows instead of 8"))
    run = run_of(spark=found)
    assert run.faults(of_peers=False) == ["write, connector, 2 partitions, round 1: 7 rows instead of 8"]
    row = next(row for row in rows_of(shown(run)) if "grt" in row)
    assert row[2:5] == ["3,000", "2,000", "4,000"]


def test_cpu_time_is_told_a_row() -> None:
    assert CpuTimes(3.0, 2.0, 1.5).per_row(CpuTimes(1.0, 2.0, 1.0), 1_000_000) == CpuTimes(2.0, 0.0, 0.5)
