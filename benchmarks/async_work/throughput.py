"""So many events wait; how many does a system handle in a few seconds?

It is stopped while it works, so what it has committed by then is judged too: outputs and offsets must tell the same.
"""

from __future__ import annotations

import os
import signal
import time

import msgspec

from benchmarks.async_work.systems import System, started
from benchmarks.async_work.workload import Answered, Judge, Plan
from benchmarks.cluster import Cluster
from benchmarks.drain import middle_rate
from benchmarks.systems import Failed

START_SECONDS = 60
STOP_SECONDS = 30


class Throughput(msgspec.Struct, frozen=True):
    """One run. ``per_second`` by the broker's clock, between 10 % and 90 % of the outputs; CPU time of the system per
    event while it was watched. ``calls``: of the world, if the system counts them."""

    system: str
    round: int
    handled: int
    per_second: float
    cpu_us_per_event: float
    load_average: float
    fault: str
    calls: int = 0


def throughput(
    cluster: Cluster, system: System, source: str, plan: Plan, events: int, seconds: float, turn: int
) -> Throughput:
    """Let a system work for ``seconds`` on the ``events`` that wait in ``source``. Raises ``Failed``."""
    with started(system, cluster, source) as (child, job):
        committed = cluster.committed(job)
        began = time.monotonic()
        try:
            while not committed():
                child.check()
                if time.monotonic() - began > START_SECONDS:
                    raise Failed(f"{system.label} has committed nothing in {START_SECONDS} s")
                time.sleep(0.1)
            began = time.monotonic()
            first = last = child.sample(began, committed())
            while last.at - first.at < seconds and last.committed < events:
                time.sleep(0.1)
                last = child.sample(began, committed())
            child.send(signal.SIGTERM)
            said = child.result(STOP_SECONDS)
            handled = committed.by_partition()
        finally:
            committed.close()
        judge, appended = Judge(), []
        decode = msgspec.json.Decoder(Answered).decode
        for message in cluster.outputs(job):
            judge.hear((message.key() or b"").decode(), decode(message.value() or b""))
            appended.append(message.timestamp()[1])
    return Throughput(
        system=system.label,
        round=turn,
        handled=sum(handled.values()),
        per_second=middle_rate(appended),
        cpu_us_per_event=(last.cpu - first.cpu) / max(sum(handled.values()) - first.committed, 1) * 1e6,
        load_average=os.getloadavg()[0],
        fault=judge.verdict(plan.due(handled)) if handled else "nothing was handled",
        calls=int(said) if said.isdigit() else 0,
    )
