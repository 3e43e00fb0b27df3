"""A process that reads the committed outputs as they come, times them, and judges them."""

from __future__ import annotations

import sys

import msgspec

from benchmarks.child import job_of
from benchmarks.committed import batches, percentiles, quantiles
from benchmarks.workload import USUAL, Balance, Judge, Shape


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Read ``events`` outputs of the seed; time those after the first ``skip``. ``keep``: tell of each one when it was
    seen."""

    bootstrap_servers: str
    topic: str
    seed: int
    skip: int
    events: int
    shape: Shape = USUAL
    keep: bool = False


class WatchResult(msgspec.Struct, frozen=True):
    """Milliseconds from the generator's clock to this reader; the worst by second; the median of the last tenth, which
    tells whether the system fell behind. ``fault``: see ``Judge``. ``seen``: by partition, of every output in its
    order, when its event was sent and when it was here; empty if nobody asked."""

    timed: int
    p50: float
    p90: float
    p99: float
    highest: float
    quantiles: list[float]
    highest_by_second: list[float]
    p50_at_end: float
    fault: str
    seen: dict[int, list[tuple[float, float]]] = {}


def watch(job: Watch) -> WatchResult:
    """Read until all are there, or nothing comes any more."""
    decode = msgspec.json.Decoder(Balance).decode
    judge = Judge(job.shape)
    late: list[float] = []
    by_second: dict[int, float] = {}
    seen: dict[int, list[tuple[float, float]]] = {}
    found = batches(
        job.bootstrap_servers,
        job.topic,
        job.shape.partitions,
        lambda: judge.outputs >= job.events,
        queued_min_messages=1_000_000,
    )
    for now, messages in found:
        for message in messages:
            balance = decode(message.value() or b"")
            judge.hear((message.key() or b"").decode(), balance)
            if job.keep:
                seen.setdefault(message.partition() or 0, []).append((balance.sent, now))
            if judge.outputs > job.skip:
                late.append((now - balance.sent) * 1000)
                second = int(balance.sent)
                by_second[second] = max(by_second.get(second, 0.0), late[-1])
    worst = [by_second[second] for second in sorted(by_second)]
    at_end, *_ = percentiles(late[-max(len(late) // 10, 1) :])
    fault = judge.verdict(job.seed, job.events)
    return WatchResult(len(late), *percentiles(late), quantiles(late), worst, at_end, fault, seen)


if __name__ == "__main__":
    result = watch(job_of(Watch))
    sys.stdout.buffer.write(msgspec.json.encode(result))
