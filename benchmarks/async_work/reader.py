"""A process that reads the committed outputs as they come, times them, and judges them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from benchmarks.async_work.workload import PARTITIONS, Answered, Judge, Plan, partition_of, shares
from benchmarks.child import job_of
from benchmarks.committed import batches, percentiles


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Read the outputs of the plan's first ``events``; the first ``skip`` outputs are not timed."""

    bootstrap_servers: str
    topic: str
    plan: Plan
    skip: int
    events: int


class WatchResult(msgspec.Struct, frozen=True):
    """Milliseconds from the generator's clock to this reader. ``gaps``: the longest time without an output of each
    input partition, in milliseconds. ``fault``: see ``Judge``."""

    p50: float
    p90: float
    p99: float
    highest: float
    gaps: list[float]
    fault: str


def watch(job: Watch) -> WatchResult:
    """Read until all are there, or nothing comes any more."""
    decode = msgspec.json.Decoder(Answered).decode
    judge = Judge()
    late: list[float] = []
    arrivals: list[list[float]] = [[] for _ in range(PARTITIONS)]
    for now, messages in batches(job.bootstrap_servers, job.topic, PARTITIONS, lambda: judge.outputs >= job.events):
        for message in messages:
            answer = decode(message.value() or b"")
            judge.hear((message.key() or b"").decode(), answer)
            if judge.outputs > job.skip:
                late.append((now - answer.sent) * 1000)
                arrivals[partition_of(answer.key)].append(now)
    p50, p90, p99, highest = percentiles(late)
    fault = judge.verdict(job.plan.due(shares(job.events)))
    return WatchResult(p50, p90, p99, highest, [longest_gap(times) for times in arrivals], fault)


def longest_gap(times: Sequence[float]) -> float:
    """The longest time between two neighbours, in milliseconds, of times in seconds."""
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0) * 1000


if __name__ == "__main__":
    result = watch(job_of(Watch))
    sys.stdout.buffer.write(msgspec.json.encode(result))
