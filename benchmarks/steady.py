"""Steady load: events come at a fixed rate. How late are the outputs, and does memory stay flat?

Latency is from the generator's clock, right before it hands an event to its producer, to a read_committed reader in a
third process on the same machine. How long the broker took to acknowledge the input is measured beside it: what is late
there is late before any system under test has seen it.
"""

from __future__ import annotations

import os
import statistics
import time

import msgspec

from benchmarks.at_rate import AtRate
from benchmarks.cluster import Cluster
from benchmarks.generator import Load, LoadResult
from benchmarks.reader import Watch, WatchResult
from benchmarks.systems import Failed, Sample, System, running, system_running
from benchmarks.workload import Job

PRIMING_EVENTS = 200
"""Sent before the load, so that group, producers and topics are up when it begins."""
WARM_UP_SECONDS = 3
TIMEOUT_SECONDS = 60
LATE_MS = 1_000.0
"""Later than that at the end of a run: the rate was not held."""


class Memory(msgspec.Struct, frozen=True):
    """RSS over a run: medians of its second and of its last quarter, the highest, and one value a second."""

    second_quarter: int
    last_quarter: int
    highest: int
    series: list[int]


class SteadyResult(AtRate, frozen=True):
    """One run at a fixed rate by one system. Times in ms, memory in bytes. ``quantiles``: at ``committed.SHARES``.
    ``behind``: empty if the rate was held, see ``behind_of``; the figures then tell how long the run was."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    highest: float = 0.0
    quantiles: list[float] = msgspec.field(default_factory=list)
    highest_by_second: list[float] = msgspec.field(default_factory=list)
    generator_behind_p99: float = 0.0
    input_acknowledged_p50: float = 0.0
    input_acknowledged_p99: float = 0.0
    cpu_share: float = 0.0
    memory: Memory | None = None
    load_average: float = 0.0
    p50_at_end: float = 0.0
    behind: str = ""


class Loaded(msgspec.Struct, frozen=True):
    """What generator and reader told of a load, and looks at the system, two a second."""

    sent: LoadResult
    seen: WatchResult
    samples: list[Sample]


def loaded(
    cluster: Cluster, system: System, job: Job, seed: int, rate: int, seconds: float, *, keep: bool = False
) -> Loaded:
    """Have a system work at a job while ``rate`` events a second are sent for ``seconds`` (after a warm-up). ``keep``:
    the reader tells of each output when it came. The system is stopped when this returns. Raises ``Failed``."""
    load = Load(
        bootstrap_servers=job.bootstrap_servers,
        topic=job.source,
        seed=seed,
        skip=PRIMING_EVENTS,
        events=int(rate * (WARM_UP_SECONDS + seconds)),
        rate=rate,
        shape=job.shape,
    )
    cluster.fill(job.source, seed, PRIMING_EVENTS)
    samples: list[Sample] = []
    with system_running(system, job) as child:
        _until_primed(cluster, job, system)
        watch = Watch(
            bootstrap_servers=job.bootstrap_servers,
            topic=job.output,
            seed=seed,
            skip=skipped(rate),
            events=PRIMING_EVENTS + load.events,
            shape=job.shape,
            keep=keep,
        )
        with running("benchmarks.reader", watch) as reader, running("benchmarks.generator", load) as generator:
            began = time.monotonic()
            duration = load.events / rate
            while time.monotonic() - began < duration:
                time.sleep(0.5)
                samples.append(child.sample(began, 0))
            sent = msgspec.json.decode(generator.result(TIMEOUT_SECONDS), type=LoadResult)
            seen = msgspec.json.decode(reader.result(TIMEOUT_SECONDS), type=WatchResult)
    return Loaded(sent, seen, samples)


def skipped(rate: int) -> int:
    """So many events come before those that count."""
    return PRIMING_EVENTS + rate * WARM_UP_SECONDS


def steady(cluster: Cluster, system: System, seed: int, rate: int, seconds: float, turn: int = 1) -> SteadyResult:
    """Send ``rate`` events a second for ``seconds`` (after a warm-up) to a system. Raises ``Failed``."""
    job = cluster.job()
    load = loaded(cluster, system, job, seed, rate, seconds)
    cluster.forget(job, source=True)
    sent, seen, samples = load.sent, load.seen, load.samples
    if seen.fault:
        return SteadyResult(system.label, turn, rate, seconds, seed, seen.fault, load_average=os.getloadavg()[0])
    first, last = samples[0], samples[-1]
    return SteadyResult(
        system=system.label,
        round=turn,
        rate=rate,
        seconds=seconds,
        seed=seed,
        fault="",
        p50=seen.p50,
        p90=seen.p90,
        p99=seen.p99,
        highest=seen.highest,
        quantiles=seen.quantiles,
        highest_by_second=seen.highest_by_second,
        generator_behind_p99=sent.behind_p99 * 1000,
        input_acknowledged_p50=sent.acknowledged_p50 * 1000,
        input_acknowledged_p99=sent.acknowledged_p99 * 1000,
        cpu_share=(last.cpu - first.cpu) / max(last.at - first.at, 0.001),
        memory=memory_of([sample.rss for sample in samples]),
        load_average=os.getloadavg()[0],
        p50_at_end=seen.p50_at_end,
        behind=behind_of(seen.p50_at_end, sent.behind_p99 * 1000),
    )


def behind_of(p50_at_end: float, generator_behind_p99: float) -> str:
    """Who did not hold the rate, from two times in ms: the generator, then nothing is known about the system; or the
    system, when the last tenth of its outputs was late by more than a second in the median. Empty if both did."""
    if generator_behind_p99 > LATE_MS:
        return f"the generator could not send so fast: it was {generator_behind_p99:,.0f} ms late"
    if p50_at_end > LATE_MS:
        return f"could not keep up: in the end outputs were {p50_at_end:,.0f} ms late"
    return ""


def _until_primed(cluster: Cluster, job: Job, system: System) -> None:
    committed = cluster.progress(system, job)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while committed() < PRIMING_EVENTS:
            if time.monotonic() > deadline:
                raise Failed(f"{system.label} did not begin to work in {TIMEOUT_SECONDS} s")
            time.sleep(0.1)
    finally:
        committed.close()


def memory_of(rss: list[int]) -> Memory:
    """Summarize a series of RSS values, two a second."""
    quarter = max(len(rss) // 4, 1)
    return Memory(
        second_quarter=int(statistics.median(rss[quarter : 2 * quarter] or rss)),
        last_quarter=int(statistics.median(rss[-quarter:])),
        highest=max(rss),
        series=rss[::2],
    )
