"""The benchmarks of Spark: their judge, and their aims."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
from confluent_kafka import Message

from benchmarks.spark.measure import (
    BACK_TO_BACK,
    COMMIT,
    CONNECTOR,
    DRIVER,
    FLOOR,
    IDLE,
    WIDE,
    PacedRun,
    SparkJobs,
    SparkPaced,
    SparkRun,
)
from benchmarks.spark.run import HEADERS, judged


def of_spark(number: int, key: bytes = b"", end: bytes = b"", headers: Any = HEADERS) -> Any:
    """A record of a right side: a key's numbers rise."""
    value = b'{"id":%d,"account":"a"}' % number + end
    return Message(topic="t", key=key or b"k%d" % (number % 7), value=value, headers=headers)


@pytest.mark.parametrize("fault", ["", "lost", "twice", "other value", "other key", "no headers", "swapped"])
def test_the_judge_of_spark_sees_every_fault(fault: str) -> None:
    found = [of_spark(number) for number in range(200)]
    due = len(found), sum(zlib.crc32(one.key()) for one in found), sum(zlib.crc32(one.value()) for one in found)
    place = random.Random(7).randrange(100)
    one = found[place]
    found[place : place + 1] = {
        "lost": [],
        "twice": [one, one],
        "other value": [of_spark(place, end=b" ")],
        "other key": [of_spark(place, key=b"k9")],
        "no headers": [of_spark(place, headers=None)],
    }.get(fault, [one])
    if fault == "swapped":
        found[place], found[place + 7] = found[place + 7], found[place]
    assert bool(judged(found, due, in_order=True)) == bool(fault)
    assert not judged(found, due, in_order=False) or fault != "swapped"


def test_aims_of_spark_are_those_of_one_round() -> None:
    rates = {("read", "grt"): 100, ("decode", "grt, typed"): 95, (DRIVER, "grt"): 7}
    rates |= {(what, system): rate for what in ("stream", "write") for system, rate in (("grt", 120), (CONNECTOR, 100))}
    jobs = [SparkRun(*job, 2, turn, 1, rate, 0.1, 0.04, 0.1) for job, rate in rates.items() for turn in (0, 1)]
    jobs += [SparkRun(COMMIT, "grt", 2, 1, 200, 1, 0.016, 0.04, 0.1), SparkRun(WIDE, "grt", 400, 1, 1, 1, 2.0, 1, 0.1)]
    queries = {(BACK_TO_BACK, FLOOR): 250.0, (BACK_TO_BACK, "grt"): 300.0, (IDLE, "grt"): 0.0}
    paced = [PacedRun(*query, 1, batch_ms=took, cpu_share=0.2) for query, took in queries.items()]
    found = [(aim.found, aim.is_met) for aim in (*SparkJobs().aims(jobs), *SparkPaced().aims(paced))]
    assert found == [
        ("1.20", True), ("1.20", False), ("1.00", False), ("0.95", True), ("40.0 ns a row", True),
        ("16.0 ms", False), ("2.0 s", True), ("50.0 ms", True), ("20.0 % of a core", False),
    ]  # fmt: skip
