"""Events come at a fixed rate: how late are their outputs, and how long is each partition silent?

As ``benchmarks.steady``: from the generator's clock to a ``read_committed`` reader, each in a process of its own.
"""

from __future__ import annotations

import os
import time
from itertools import islice

import msgspec

from benchmarks.async_work.generator import Load
from benchmarks.async_work.reader import Watch, WatchResult
from benchmarks.async_work.systems import System, started
from benchmarks.async_work.workload import PARTITIONS, TYPE, Job, Plan, told
from benchmarks.cluster import Cluster
from benchmarks.generator import LoadResult
from benchmarks.systems import Child, Failed, running

PRIMING_EVENTS = 10 * PARTITIONS
"""Sent before the load, so that group, producers and topics are up when it begins."""
WARM_UP_SECONDS = 2
TIMEOUT_SECONDS = 60


class Latency(msgspec.Struct, frozen=True):
    """One run at a fixed rate by one system. Times in ms. ``slow_ms``: what one event of the first partition took; 0:
    the usual share of slow ones. ``gaps``: see ``WatchResult``."""

    system: str
    round: int
    rate: float
    slow_ms: int
    p50: float
    p90: float
    p99: float
    highest: float
    gaps: list[float]
    generator_behind_p99: float
    input_acknowledged_p99: float
    load_average: float
    fault: str


def latency(cluster: Cluster, system: System, plan: Plan, rate: float, seconds: float, turn: int) -> Latency:
    """Send ``rate`` events a second for ``seconds`` (after a warm-up) to a system. Raises ``Failed``."""
    skip = PRIMING_EVENTS + int(rate * WARM_UP_SECONDS)
    total = skip + int(rate * seconds)
    with started(system, cluster) as (child, job):
        cluster.write(told(islice(plan.asks(), PRIMING_EVENTS), job.source), TYPE)
        _until_primed(cluster, job, child, system)
        servers = job.bootstrap_servers
        watch = Watch(bootstrap_servers=servers, topic=job.output, plan=plan, skip=skip, events=total)
        load = Load(
            bootstrap_servers=servers,
            topic=job.source,
            plan=plan,
            skip=PRIMING_EVENTS,
            events=total - PRIMING_EVENTS,
            rate=rate,
        )
        with (
            running("benchmarks.async_work.reader", watch) as reader,
            running("benchmarks.async_work.generator", load) as generator,
        ):
            patience = seconds + WARM_UP_SECONDS + TIMEOUT_SECONDS
            sent = msgspec.json.decode(generator.result(patience), type=LoadResult)
            seen = msgspec.json.decode(reader.result(patience), type=WatchResult)
        child.check()
    return Latency(
        system=system.label,
        round=turn,
        rate=rate,
        slow_ms=plan.slow_ms,
        p50=seen.p50,
        p90=seen.p90,
        p99=seen.p99,
        highest=seen.highest,
        gaps=seen.gaps,
        generator_behind_p99=sent.behind_p99 * 1000,
        input_acknowledged_p99=sent.acknowledged_p99 * 1000,
        load_average=os.getloadavg()[0],
        fault=seen.fault,
    )


def _until_primed(cluster: Cluster, job: Job, child: Child, system: System) -> None:
    committed = cluster.committed(job)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while committed() < PRIMING_EVENTS:
            child.check()
            if time.monotonic() > deadline:
                raise Failed(f"{system.label} did not begin to work in {TIMEOUT_SECONDS} s")
            time.sleep(0.1)
    finally:
        committed.close()
