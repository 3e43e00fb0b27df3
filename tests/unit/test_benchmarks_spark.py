"""The Spark benchmark judges rightly, and compares within a round."""

from __future__ import annotations

import random
import zlib
from typing import Any, cast

import pytest
from confluent_kafka import Message

from benchmarks.spark.measure import SparkRun
from benchmarks.spark.run import HEADERS, judged
from tests.unit.benchmarks_kit import rows_of, run_of, shown


def records(rows: int) -> list[Any]:
    """The records of a right side: a key's numbers rise."""
    return [
        Message(topic="t", key=b"k%d" % (n % 7), value=b'{"id":%d,"account":"a"}' % n, headers=HEADERS)
        for n in range(rows)
    ]


@pytest.mark.parametrize("fault", ["", "lost", "twice", "other value", "other key", "no headers", "swapped"])
def test_the_judge_sees_every_fault(fault: str) -> None:
    found = records(200)
    due = len(found), sum(zlib.crc32(one.key()) for one in found), sum(zlib.crc32(one.value()) for one in found)
    place = random.Random(7).randrange(100)
    one = found[place]
    if fault == "lost":
        del found[place]
    elif fault == "twice":
        found.append(one)
    elif fault == "other value":
        found[place] = Message(topic="t", key=one.key(), value=one.value() + b" ", headers=HEADERS)
    elif fault == "other key":
        found[place] = Message(topic="t", key=b"k9", value=one.value(), headers=HEADERS)
    elif fault == "no headers":
        found[place] = Message(topic="t", key=one.key(), value=one.value())
    elif fault == "swapped":
        found[place], found[place + 7] = found[place + 7], found[place]
    assert bool(judged(cast("list[Message]", found), due, in_order=True)) == bool(fault)
    if fault == "swapped":
        assert not judged(cast("list[Message]", found), due, in_order=False)


def ran(what: str, system: str, turn: int, rate: float, fault: str = "") -> SparkRun:
    return SparkRun(what, system, 2, turn, 1_000, rate, 0.5, 2.0, 1.5, fault)


def test_the_first_round_is_not_counted_and_a_fault_shows() -> None:
    found = [ran("stream", name, turn, rate * turn) for turn in range(4)
             for name, rate in (("connector", 500), ("grt", 1_000))]  # fmt: skip
    found.append(ran("write", "connector", 1, 10, "7 rows instead of 8"))
    run = run_of(spark=found)
    assert run.faults(of_peers=False) == ["write, connector, 2 partitions, round 1: 7 rows instead of 8"]
    row = next(row for row in rows_of(shown(run)) if "grt" in row)
    assert row[1:3] == ["2,000 (1,000; 3,000)", "2.00 (2.00; 2.00)"]
