"""One broker, all systems in turn: throughput, latency, and what one slow event does to the other partitions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.async_work.figures import Sizes
from benchmarks.async_work.latency import PRIMING_EVENTS, WARM_UP_SECONDS, Latency, latency
from benchmarks.async_work.price import BARE, WAYS, Price, price
from benchmarks.async_work.quix_environment import NoQuixstreams, quixstreams_python, versions
from benchmarks.async_work.systems import System, all_of, handwritten, of_batches, ours, quixstreams
from benchmarks.async_work.throughput import Throughput, throughput
from benchmarks.async_work.workload import MEAN_MS, PARTITIONS, TYPE, Plan, told
from benchmarks.cluster import Cluster

Say = Callable[[str], None]
AnyRun = Throughput | Latency | Price
QUEUED = 5_000
"""Events of a partition that wait in the line, as many as its inbox holds by default."""
FASTEST = 10_000
"""Events a second that no system here reaches: so much input is there at least."""


class Bench:
    """Makes the runs. ``quix``: the interpreter that has quixstreams; without it that is left out."""

    def __init__(self, bootstrap_servers: str, sizes: Sizes, seed: int, quix: Path | None) -> None:
        self._servers, self._sizes, self._plan, self._quix = bootstrap_servers, sizes, Plan(seed), quix

    @functools.cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self._servers, PARTITIONS, "async")

    def runs(self, say: Say) -> Iterator[tuple[str, AnyRun]]:
        """Everything: (part, run)."""
        sizes = self._sizes
        if set(sizes.parts) != {"prices"}:
            warm = handwritten(sizes.concurrencies[0])
            say(f"warming the broker up, not counted: {warm.label}")
            latency(self._cluster, warm, self._plan, sizes.gap_rate, min(5, sizes.gap_seconds), 0)
        parts: dict[str, Callable[[Say], Iterator[AnyRun]]] = {
            "prices": self.prices,
            "throughputs": self.throughputs,
            "latencies": self.latencies,
            "gaps": self.gaps,
            "batches": self.batches,
        }
        for part, measured in parts.items():
            for run in measured(say) if part in sizes.parts else ():
                yield part, run

    def prices(self, say: Say) -> Iterator[Price]:
        """Without a broker."""
        for turn in range(1, self._sizes.repeats + 1):
            for way in (*WAYS, BARE):
                say(f"price {turn}/{self._sizes.repeats}: {way}")
                yield price(way, self._plan, self._sizes.price_events, QUEUED, turn)

    def batches(self, say: Say) -> Iterator[Throughput]:
        """One call per event, and one for many; nothing is slow."""
        plan = Plan(self._plan.seed, slow_share=0)
        yield from self._moved(say, of_batches(), plan, self._input("batches-in", plan, FASTEST))

    def throughputs(self, say: Say) -> Iterator[Throughput]:
        """Everything waits."""
        sizes = self._sizes
        fastest = min(max(sizes.concurrencies) / MEAN_MS * 1000, FASTEST)
        source = self._input("async-in", self._plan, fastest)
        yield from self._moved(say, all_of(sizes.concurrencies, self._quix), self._plan, source)

    def _input(self, name: str, plan: Plan, per_second: float) -> tuple[str, int]:
        events = PARTITIONS * int(per_second * (self._sizes.seconds + 2) / PARTITIONS)
        source = self._cluster.source(name)
        self._cluster.write(told(islice(plan.asks(), events), source), TYPE)
        return source, events

    def _moved(self, say: Say, systems: Sequence[System], plan: Plan, source: tuple[str, int]) -> Iterator[Throughput]:
        repeats, seconds = self._sizes.repeats, self._sizes.seconds
        for turn in range(1, repeats + 1):
            for system in systems:
                say(f"throughput {turn}/{repeats}: {system.label}")
                yield throughput(self._cluster, system, source[0], plan, source[1], seconds, turn)
        self._cluster.delete(source[0])

    def latencies(self, say: Say) -> Iterator[Latency]:
        """A fixed rate."""
        sizes = self._sizes
        for rate in sizes.rates:
            for turn in range(1, sizes.repeats + 1):
                quix = self._quix if rate == sizes.rates[0] else None
                for system in all_of(sizes.concurrencies[:1], quix):
                    say(f"{rate:,.0f}/s, {turn}/{sizes.repeats}: {system.label}")
                    yield latency(self._cluster, system, self._plan, rate, sizes.latency_seconds, turn)

    def gaps(self, say: Say) -> Iterator[Latency]:
        """One event of the first partition is slow; nothing else is."""
        sizes = self._sizes
        before = PRIMING_EVENTS + int(sizes.gap_rate * (WARM_UP_SECONDS + min(2, sizes.gap_seconds / 3)))
        slow_at = before - before % PARTITIONS
        for turn in range(1, sizes.repeats + 1):
            for milliseconds in sizes.pauses_ms:
                plan = Plan(self._plan.seed, slow_share=0, slow_at=slow_at, slow_ms=milliseconds)
                for system in self._of_gaps():
                    say(f"one event of {milliseconds} ms, {turn}/{sizes.repeats}: {system.label}")
                    yield latency(self._cluster, system, plan, sizes.gap_rate, sizes.gap_seconds, turn)

    def _of_gaps(self) -> list[System]:
        first = ours("scheduler", self._sizes.concurrencies[0])
        return [first, *([] if self._quix is None else quixstreams(self._quix)[:1])]


def find_quixstreams(say: Say, facts: dict[str, Any]) -> Path | None:
    """The interpreter that has it; why not, and what it is, is added to the facts."""
    try:
        python = quixstreams_python(say)
        facts["quixstreams"] = versions(python)
    except NoQuixstreams as error:
        facts["quixstreams"] = f"not measured: {error}"
        return None
    return python


def in_short(run: AnyRun) -> str:
    """One line."""
    if isinstance(run, Price):
        return f"{run.round} {run.way}: {run.us:.1f} us/event, {run.us_without_gc:.1f} without garbage collection"
    if isinstance(run, Throughput):
        told = f"{run.per_second:,.0f}/s, {run.cpu_us_per_event:,.0f} us CPU/event"
    else:
        gaps = " ".join(f"{gap:,.0f}" for gap in run.gaps)
        told = f"{run.rate:,.0f}/s: p50 {run.p50:,.0f} p99 {run.p99:,.0f} max {run.highest:,.0f} ms, silences {gaps} ms"
    return f"{run.round} {run.system}: {told}, load {run.load_average:.1f}, {run.fault or 'right'}"
