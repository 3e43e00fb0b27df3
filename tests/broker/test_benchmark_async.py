"""The benchmark of work ahead of its turn runs, on tiny sizes, and sees a system that is wrong. No speed is asserted.

quixstreams is not here: nothing is installed by a test.
"""

from __future__ import annotations

import pytest

from benchmarks.async_work.figures import Sizes
from benchmarks.async_work.latency import Latency
from benchmarks.async_work.report import Figures, tables
from benchmarks.async_work.run import Bench
from benchmarks.async_work.throughput import Throughput
from streams.testing.fixtures import BrokerAddress

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

SIZES = Sizes(
    concurrencies=(8,),
    seconds=0.5,
    pauses_ms=(700,),
    gap_seconds=2,
    repeats=1,
    parts=("throughputs", "gaps", "batches"),
)


def test_every_measure_runs_and_is_right(kafka_broker: BrokerAddress) -> None:
    said = list[str]()
    parts = list(Bench(kafka_broker.bootstrap_servers, SIZES, 5, None).runs(said.append))
    figures, found = Figures(), [run for _, run in parts]
    for part, run in parts:
        getattr(figures, part).append(run)
    assert not [run for run in found if run.fault]
    assert [run.system for run in figures.throughputs] == ["loop, 8", "scheduler, 8", "handler, 8"]
    rates = [run.per_second for run in found if isinstance(run, Throughput)]
    assert len(rates) == 6
    assert min(rates) > 0
    (slow,) = figures.gaps
    assert isinstance(slow, Latency)
    assert slow.gaps[0] >= 600, "the slow event holds its own partition up"
    assert slow.highest >= 700
    alone, batcher, _ = figures.batches
    assert alone.calls >= alone.handled > 0, "one call per event, and those that were not waited for"
    assert 0 < batcher.calls < batcher.handled
    assert len(tables(figures)) == 3
    assert said
