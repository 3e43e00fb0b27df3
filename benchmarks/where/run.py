"""One run at a fixed rate of a system that tells when which events had come how far."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import msgspec

from benchmarks import tracing
from benchmarks.at_rate import AtRate
from benchmarks.cluster import Cluster
from benchmarks.committed import percentiles
from benchmarks.steady import behind_of, loaded, skipped
from benchmarks.systems import Failed, System
from benchmarks.where.ways import Mismatch, Sent, Stretch, slowest, summed_up, transactions, ways
from benchmarks.workload import Deposited, Job

ABLE = ("handwritten", "engine", "engine_batch")
"""Kinds of systems that know the option."""
HALF_A_MILLISECOND = 0.0005
"""The broker's clock is told in whole milliseconds, rounded down."""


class Where(AtRate, frozen=True):
    """One run. ``events`` of which ``p50`` and ``p99`` of the whole way (ms) and the ``stretches`` are; so many of them
    ``per_transaction``, on average; the slowest 1 % lie in ``slowest_transactions``. ``behind``: as in
    ``SteadyResult``."""

    events: int = 0
    p50: float = 0.0
    p99: float = 0.0
    per_transaction: float = 0.0
    slowest_transactions: int = 0
    stretches: dict[str, Stretch] = msgspec.field(default_factory=dict)
    load_average: float = 0.0
    behind: str = ""


def where(cluster: Cluster, system: System, seed: int, rate: int, seconds: float, turn: int = 1) -> Where:
    """Send ``rate`` events a second for ``seconds`` (after a warm-up) to a system. Raises ``Failed``."""
    source = f"where-{uuid4().hex[:12]}-in"
    cluster.create(source, cluster.partitions, {"message.timestamp.type": "LogAppendTime"})
    job = cluster.job(source)
    with TemporaryDirectory(prefix="bench-where-") as folder:
        path = Path(folder) / "trace.json"
        telling = msgspec.structs.replace(system, options={**system.options, tracing.OPTION: str(path)})
        load = loaded(cluster, telling, job, seed, rate, seconds, keep=True)
        try:
            marks = tracing.read(path)
        except (OSError, msgspec.DecodeError) as error:
            raise Failed(f"{system.label} does not tell when events had come how far: {error}") from error
    events = _events(cluster, job)
    cluster.forget(job, source=True)
    average = os.getloadavg()[0]
    if load.seen.fault:
        return Where(system.label, turn, rate, seconds, seed, load.seen.fault, load_average=average)
    try:
        found = ways(events, marks, load.seen.seen, skipped(rate))
    except Mismatch as error:
        raise Failed(f"{system.label}: {error}") from error
    p50, _, p99, _ = percentiles([way.whole for way in found])
    return Where(
        system=system.label,
        round=turn,
        rate=rate,
        seconds=seconds,
        seed=seed,
        fault="",
        events=len(found),
        p50=p50,
        p99=p99,
        per_transaction=len(found) / transactions(found),
        slowest_transactions=transactions(slowest(found)),
        stretches=summed_up(found),
        load_average=average,
        behind=behind_of(load.seen.p50_at_end, load.sent.behind_p99 * 1000),
    )


def _events(cluster: Cluster, job: Job) -> dict[int, list[Sent]]:
    """The input as it lies in the log, by partition."""
    decode = msgspec.json.Decoder(Deposited).decode
    found: dict[int, list[Sent]] = {}
    for message in cluster.outputs(msgspec.structs.replace(job, output=job.source)):
        appended = message.timestamp()[1] / 1000 + HALF_A_MILLISECOND
        sent = decode(message.value() or b"").sent
        found.setdefault(message.partition() or 0, []).append(Sent(message.offset() or 0, sent, appended))
    return found
