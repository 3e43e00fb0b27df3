"""Steady load: events come at a fixed rate. How late are the outputs?

Latency is from the generator's clock, right before it hands an event to its producer, to a read_committed reader in a
third process on the same machine. The time until the broker had acknowledged the input is measured beside it: the part
of the latency that lies before any system under test.
"""

from __future__ import annotations

import os
import time

import msgspec

from benchmarks.cluster import Cluster
from benchmarks.generator import Load, LoadResult
from benchmarks.reader import Watch, WatchResult
from benchmarks.systems import Sample, System, running, system_running
from benchmarks.workload import PARTITIONS

PRIMING_EVENTS = 200
"""Sent before the load, so that group, producers and topics are up when it begins."""
WARM_UP_SECONDS = 3
TIMEOUT_SECONDS = 60
LATE_MS = 1_000.0
"""Later than that at the end of a run: the rate was not held."""


class SteadyResult(msgspec.Struct, frozen=True):
    """One run at a fixed rate by one system. Times in ms. ``fault``: a violation of exactly-once, or the failure of the
    system. ``behind``: empty if the rate was held, see ``behind_of``; else the figures depend on the length of the run.
    """

    system: str
    round: int
    fault: str = ""
    rate: int = 0
    partitions: int = PARTITIONS
    seconds: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    highest: float = 0.0
    input_acknowledged_p99: float = 0.0
    cpu_share: float = 0.0
    load_average: float = 0.0
    behind: str = ""

    @property
    def cpu_us_per_event(self) -> float:
        """Processor time of the system's process, all threads."""
        return self.cpu_share / self.rate * 1e6


def steady(cluster: Cluster, system: System, seed: int, rate: int, seconds: float, turn: int = 1) -> SteadyResult:
    """Send ``rate`` events a second for ``seconds`` (after a warm-up) to a system. Raises ``Failed``."""
    job = cluster.job()
    servers, events = job.bootstrap_servers, int(rate * (WARM_UP_SECONDS + seconds))
    load = Load(bootstrap_servers=servers, topic=job.source, seed=seed, skip=PRIMING_EVENTS, events=events, rate=rate)
    watch = Watch(
        bootstrap_servers=servers,
        topic=job.output,
        seed=seed,
        skip=PRIMING_EVENTS + rate * WARM_UP_SECONDS,
        events=PRIMING_EVENTS + events,
        partitions=job.partitions,
    )
    cluster.fill(job.source, seed, PRIMING_EVENTS)
    samples: list[Sample] = []
    with system_running(system, job) as child:
        cluster.wait_committed(job, PRIMING_EVENTS, child.check, TIMEOUT_SECONDS, system)
        with running("benchmarks.reader", watch) as reader, running("benchmarks.generator", load) as generator:
            began = time.monotonic()
            while time.monotonic() - began < events / rate:
                time.sleep(0.5)
                samples.append(child.sample(began, 0))
            sent = msgspec.json.decode(generator.result(TIMEOUT_SECONDS), type=LoadResult)
            seen = msgspec.json.decode(reader.result(TIMEOUT_SECONDS), type=WatchResult)
    cluster.forget(job, source=True)
    first, last = samples[0], samples[-1]
    return SteadyResult(
        system=system.label,
        round=turn,
        fault=seen.fault,
        rate=rate,
        partitions=job.partitions,
        seconds=seconds,
        p50=seen.p50,
        p99=seen.p99,
        highest=seen.highest,
        input_acknowledged_p99=sent.acknowledged_p99 * 1000,
        cpu_share=(last.cpu - first.cpu) / max(last.at - first.at, 0.001),
        load_average=os.getloadavg()[0],
        behind=behind_of(seen.p50_at_end, sent.behind_p99 * 1000),
    )


def behind_of(p50_at_end: float, generator_behind_p99: float) -> str:
    """Explain why the rate was not held, from two times in ms: the generator was too slow, and nothing is known about
    the system; or the last tenth of the system's outputs was late by more than a second in the median. Empty if it was
    held."""
    if generator_behind_p99 > LATE_MS:
        return f"the generator could not send so fast: it was {generator_behind_p99:,.0f} ms late"
    if p50_at_end > LATE_MS:
        return f"could not keep up: in the end outputs were {p50_at_end:,.0f} ms late"
    return ""
