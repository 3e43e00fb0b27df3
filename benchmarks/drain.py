"""Drain: so many records wait; how fast are they handled, and for how much of a processor?

The rate is that of the outputs by the broker's own clock (log-append time), between 10 % and 90 % of them, so neither
the start of a process nor its end counts. The CPU time is the process's, over the same stretch of committed offsets.
What comes before only to fill the state (``Shape.stored``) does not count either.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec
import psutil

from benchmarks.cluster import Cluster
from benchmarks.systems import Failed, Sample, System, system_running
from benchmarks.workload import STORED, Balance, Job, Judge

TIMEOUT_SECONDS = 180
SAMPLE_SECONDS = 0.2


class Sampled(Protocol):
    """One process, or several that share the work."""

    def sample(self, began: float, committed: int) -> Sample:
        """Look at it now; CPU time and memory are of all together. Raises ``Failed`` if one is gone."""


Running = Callable[[System, Job], AbstractContextManager[Sampled]]


class DrainResult(msgspec.Struct, frozen=True):
    """One drain by one system. ``fault`` is empty if every event was counted exactly once; else there is no rate."""

    system: str
    round: int
    records: int
    seed: int
    fault: str
    per_second: float = 0.0
    cpu_us_per_record: float = 0.0
    broker_cpu_us_per_record: float = 0.0
    start_seconds: float = 0.0
    rss_first: int = 0
    rss_last: int = 0
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
    running: Running = system_running,
) -> DrainResult:
    """Let a system handle ``records`` records of ``source`` (and what fills the state, before them), from a new group.
    Raises ``Failed``."""
    stored = cluster.shape.stored
    total = stored + records
    job = cluster.job(source)
    committed = cluster.progress(system, job)
    broker = psutil.Process(broker_pid)
    samples: list[Sample] = []
    broker_cpu: list[float] = []
    began = time.monotonic()
    try:
        with running(system, job) as child:
            done = 0
            while done < total:
                done = committed()
                samples.append(child.sample(began, done))
                times = broker.cpu_times()
                broker_cpu.append(times.user + times.system)
                if time.monotonic() - began > TIMEOUT_SECONDS:
                    raise Failed(f"{system.label}: {done} of {total} records after {TIMEOUT_SECONDS} s")
                time.sleep(SAMPLE_SECONDS)
    finally:
        committed.close()
    judge, appended = Judge(cluster.shape), []
    decode = msgspec.json.Decoder(Balance).decode
    for message in cluster.outputs(job):
        balance = decode(message.value() or b"")
        judge.hear((message.key() or b"").decode(), balance)
        if not balance.account.startswith(STORED):
            appended.append(message.timestamp()[1])
    fault = judge.verdict(seed, total)
    cluster.forget(job, source=False)
    if fault:
        return DrainResult(system.label, turn, records, seed, fault, load_average=os.getloadavg()[0])
    low, high = stretch([sample.committed - stored for sample in samples], records)
    span = max(samples[high].committed - samples[low].committed, 1)
    return DrainResult(
        system=system.label,
        round=turn,
        records=records,
        seed=seed,
        fault="",
        per_second=middle_rate(appended),
        cpu_us_per_record=(samples[high].cpu - samples[low].cpu) / span * 1e6,
        broker_cpu_us_per_record=(broker_cpu[high] - broker_cpu[low]) / span * 1e6,
        start_seconds=next(sample.at for sample in samples if sample.committed),
        rss_first=samples[low].rss,
        rss_last=samples[high].rss,
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
