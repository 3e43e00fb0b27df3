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
from benchmarks.workload import Balance, Judge

TIMEOUT_SECONDS = 180
SAMPLE_SECONDS = 0.2


class DrainResult(msgspec.Struct, frozen=True):
    """One drain by one system. ``fault`` is empty if every event was counted exactly once."""

    system: str
    records: int
    seed: int
    per_second: float
    cpu_us_per_record: float
    broker_cpu_us_per_record: float
    start_seconds: float
    rss_first: int
    rss_last: int
    rss_highest: int
    load_average: float
    fault: str


def drain(cluster: Cluster, system: System, source: str, seed: int, records: int, broker_pid: int) -> DrainResult:
    """Let a system handle ``records`` records of ``source``, from a new group. Raises ``Failed``."""
    job = cluster.job(source)
    committed = cluster.committed(job)
    broker = psutil.Process(broker_pid)
    samples: list[Sample] = []
    broker_cpu: list[float] = []
    began = time.monotonic()
    try:
        with system_running(system, job) as child:
            done = 0
            while done < records:
                done = committed()
                samples.append(child.sample(began, done))
                times = broker.cpu_times()
                broker_cpu.append(times.user + times.system)
                if time.monotonic() - began > TIMEOUT_SECONDS:
                    raise Failed(f"{system.label}: {done} of {records} records after {TIMEOUT_SECONDS} s")
                time.sleep(SAMPLE_SECONDS)
    finally:
        committed.close()
    judge, appended = Judge(), []
    decode = msgspec.json.Decoder(Balance).decode
    for message in cluster.outputs(job):
        judge.hear((message.key() or b"").decode(), decode(message.value() or b""))
        appended.append(message.timestamp()[1])
    fault = judge.verdict(seed, records)
    cluster.forget(job, source=False)
    low, high = stretch([sample.committed for sample in samples], records)
    span = max(samples[high].committed - samples[low].committed, 1)
    return DrainResult(
        system=system.label,
        records=records,
        seed=seed,
        per_second=middle_rate(appended),
        cpu_us_per_record=(samples[high].cpu - samples[low].cpu) / span * 1e6,
        broker_cpu_us_per_record=(broker_cpu[high] - broker_cpu[low]) / span * 1e6,
        start_seconds=next(sample.at for sample in samples if sample.committed),
        rss_first=samples[low].rss,
        rss_last=samples[high].rss,
        rss_highest=max(sample.rss for sample in samples),
        load_average=os.getloadavg()[0],
        fault=fault,
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
