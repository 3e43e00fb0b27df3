"""Work ahead of its turn, against a loop of asyncio and against quixstreams."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec
from rich.table import Table

from benchmarks.async_work.figures import PARTS, Sizes, quick
from benchmarks.async_work.latency import Latency
from benchmarks.async_work.price import Price
from benchmarks.async_work.report import Figures, reference_of, tables
from benchmarks.async_work.run import Bench as AsyncBench
from benchmarks.async_work.run import find_quixstreams, in_short
from benchmarks.async_work.throughput import Throughput
from benchmarks.bench import Bench
from benchmarks.measures import Aim, Measure, Options
from benchmarks.plots import Bars, Plot
from benchmarks.tables import names, of_system, ratios, right, spread

LEAST = 0.8
"""Of the loop's throughput."""


class AsyncRun(msgspec.Struct, frozen=True):
    """One run of one part: exactly one of the last three is there."""

    part: str
    throughput: Throughput | None = None
    latency: Latency | None = None
    price: Price | None = None

    @property
    def run(self) -> Throughput | Latency | Price:
        """The one that is there."""
        found = self.throughput or self.latency or self.price
        assert found is not None
        return found


class AsyncWork(Measure[AsyncRun]):
    """Events that wait for the world."""

    name, title, place = "async", "Async work: events that wait for the world", 70
    result = AsyncRun
    about = """\
Four partitions, 1,000 keys; every event waits 5 ms for the world and one in a hundred 500 ms, then counts in its
key's state, with a changelog, and sends one output, exactly once. `loop, N` is asyncio over confluent-kafka by hand
with a semaphore of N and three producers in turn: the reference. `scheduler, N` is `AsyncJobScheduler`, `handler,
N` `register_event_type(..., concurrency=N)`. quixstreams is synchronous: the wait is a `time.sleep` in its
callback. *Throughput*: every system works for some seconds and is stopped in the middle of it; the filling of the
line is part of the rate. *Gaps*: one event of partition 0 is slow; the longest silence of each partition. *Prices*:
one partition's worker without broker and clients. Outputs of a partition are committed in its order: what comes
behind an event of 500 ms waits for it in every exactly-once system here."""

    def arguments(self, options: Options) -> None:
        """Which parts, how much."""
        options.add("--parts", nargs="+", choices=PARTS, quick=["prices"], default=["prices", "throughputs", "batches"],
                    full=list(PARTS), help="which")  # fmt: skip
        options.add("--concurrency", type=int, nargs="+", quick=[64], default=[64, 256], full=[64, 16, 256],
                    help="events at a time; the first one is that of latencies")  # fmt: skip
        options.add("--async-seconds", type=float, quick=2, default=5, full=10, help="of a throughput run")
        options.add("--async-rounds", type=int, quick=1, default=2, full=3, help="rounds")

    def run(self, bench: Bench) -> Iterator[AsyncRun]:
        """Part by part, all systems in turn."""
        options = bench.options
        sizes = Sizes(
            concurrencies=tuple(options.concurrency),
            seconds=options.async_seconds,
            repeats=options.async_rounds,
            parts=tuple(options.parts),
        )
        sizes = quick(sizes) if options.preset == "quick" else sizes
        with_broker = set(sizes.parts) != {"prices"}
        quix = find_quixstreams(bench.now, bench.facts) if with_broker else None
        if with_broker and quix is None:
            bench.say(f"[red]quixstreams:[/] {bench.facts['quixstreams']}")
        servers = bench.cluster.bootstrap_servers if with_broker else ""
        yield from (
            AsyncRun(part, **{_field(run): run})  # type: ignore[arg-type]  # the field is that of its type
            for part, run in AsyncBench(servers, sizes, bench.seed, quix).runs(bench.now)
        )

    def in_short(self, found: AsyncRun) -> str:
        """Rate, percentiles or price."""
        return f"{found.part} {in_short(found.run)}"

    def fault(self, found: AsyncRun) -> str:
        """By system and round."""
        run = found.run
        name = run.way if isinstance(run, Price) else run.system
        return f"async work, {name}, round {run.round}: {run.fault}" if run.fault else ""

    def renumbered(self, found: AsyncRun, offset: int) -> AsyncRun:
        """The round is that of the run inside."""
        run = msgspec.structs.replace(found.run, round=found.run.round + offset)
        return msgspec.structs.replace(found, **{_field(run): run})

    def tables(self, found: Sequence[AsyncRun]) -> list[Table]:
        """One for each part."""
        return tables(figures_of(found))

    def plots(self, found: Sequence[AsyncRun]) -> list[Plot]:
        """Throughputs side by side."""
        runs = right(figures_of(found).throughputs)
        rates = {name: [run.per_second for run in of_system(runs, name)] for name in names(runs)}
        if not rates:
            return []
        return [
            Bars(
                name="throughput",
                title="Events that wait 10 ms for the world, on average",
                x="events/s",
                bars={name: {"events/s": statistics.median(values)} for name, values in rates.items()},
                ranges={name: (min(values), max(values)) for name, values in rates.items()},
            )
        ]

    def aims(self, found: Sequence[AsyncRun]) -> list[Aim]:
        """To the loop by hand of the same concurrency."""
        runs = figures_of(found).throughputs
        aims = []
        for name in names(runs):
            reference = reference_of(name, names(runs))
            compared = ratios(runs, name, reference, lambda run: run.per_second)
            if compared and name.startswith(("scheduler", "handler")):
                is_met = statistics.median(compared) >= LEAST
                what = f"async work, `{name}` to `{reference}`"
                aims.append(Aim(what, f"at least {LEAST:g}", spread(compared, ".2f"), is_met))
        return aims


def figures_of(found: Sequence[AsyncRun]) -> Figures:
    """By part."""
    figures = Figures()
    for one in found:
        getattr(figures, one.part).append(one.run)
    return figures


def _field(run: Throughput | Latency | Price) -> str:
    return type(run).__name__.lower()


MEASURES = (AsyncWork(),)
