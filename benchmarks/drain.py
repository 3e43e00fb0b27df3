"""Drain: so many records wait; how fast are they handled, and for how much of a processor?

The rate is that of the outputs by the broker's own clock (log-append time), between 10 % and 90 % of them, so neither
the start of a process nor its end counts. The CPU time is the process's, over the same stretch of committed offsets.
"""

from __future__ import annotations

import os
import time

import msgspec
import psutil

from benchmarks.cluster import Cluster
from benchmarks.systems import Failed, Sample, System, system_running

TIMEOUT_SECONDS = 180
SAMPLE_SECONDS = 0.2


class DrainResult(msgspec.Struct, frozen=True):
    """One drain by one system. ``fault`` is empty if every event was counted exactly once."""

    system: str
    round: int
    fault: str = ""
    records: int = 0
    per_second: float = 0.0
    cpu_us_per_record: float = 0.0
    broker_cpu_us_per_record: float = 0.0
    rss_highest: int = 0
    load_average: float = 0.0


def drain(
    cluster: Cluster,
    system: System,
    source: str,
    seed: int,
    records: int,
    broker_pid: int,
    turn: int = 1,
    seconds: float = 0,
) -> DrainResult:
    """Let a system handle the ``records`` records of ``source``, from a new group, or as many as it can in ``seconds``
    from its first commit on; then it is stopped in the middle of its work. Raises ``Failed``."""
    job = cluster.job(source)
    committed = cluster.progress(job, system)
    broker = psutil.Process(broker_pid)
    samples: list[Sample] = []
    broker_cpu: list[float] = []
    until = float("inf")
    try:
        with system_running(system, job) as child:
            began, done = time.monotonic(), 0
            while done < records and time.monotonic() < until:
                done = committed()
                samples.append(child.sample(began, done))
                times = broker.cpu_times()
                broker_cpu.append(times.user + times.system)
                if seconds and done:
                    until = min(until, time.monotonic() + seconds)
                if time.monotonic() - began > TIMEOUT_SECONDS:
                    raise Failed(f"{system.label}: {done} of {records} records after {TIMEOUT_SECONDS} s")
                time.sleep(SAMPLE_SECONDS)
        handled = committed()
    finally:
        committed.close()
    judge, appended = cluster.judged(job)
    fault = judge.verdict(seed, handled, records)
    cluster.forget(job, source=False)
    low, high = stretch([sample.committed for sample in samples], handled)
    span = max(samples[high].committed - samples[low].committed, 1)
    return DrainResult(
        system=system.label,
        round=turn,
        fault=fault,
        records=records,
        per_second=middle_rate(appended),
        cpu_us_per_record=(samples[high].cpu - samples[low].cpu) / span * 1e6,
        broker_cpu_us_per_record=(broker_cpu[high] - broker_cpu[low]) / span * 1e6,
        rss_highest=max(sample.rss for sample in samples),
        load_average=os.getloadavg()[0],
    )


def middle_rate(times_ms: list[int]) -> float:
    """Records per second between the moments at which 10 % and 90 % of them were there."""
    if len(times_ms) < 10:
        return 0.0
    ordered = sorted(times_ms)
    low, high = len(ordered) // 10, len(ordered) * 9 // 10
    return (high - low) / max(ordered[high] - ordered[low], 1) * 1000


def stretch(committed: list[int], records: int) -> tuple[int, int]:
    """Indexes of the last sample before 10 % and of the first with 90 % or more: the whole if there are few samples."""
    low = max((n for n, done in enumerate(committed) if done <= records * 0.1), default=0)
    high = next((n for n, done in enumerate(committed) if done >= records * 0.9), len(committed) - 1)
    return (low, high) if high > low else (0, len(committed) - 1)
