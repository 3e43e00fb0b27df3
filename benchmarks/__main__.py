"""``python -m benchmarks``: one broker, several systems, interleaved; a table, and everything as JSON in ``out/``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.status import Status

from benchmarks.async_work.figures import PARTS, quick
from benchmarks.async_work.figures import Sizes as AsyncSizes
from benchmarks.async_work.run import Bench as AsyncBench
from benchmarks.async_work.run import find_quixstreams
from benchmarks.async_work.run import in_short as async_in_short
from benchmarks.cluster import Cluster
from benchmarks.drain import drain
from benchmarks.report import MIB, Run, machine_facts, show
from benchmarks.restore.run import SHAPES, Log
from benchmarks.restore.run import SYSTEMS as RESTORERS
from benchmarks.spark.figures import Sizes
from benchmarks.stalls.report import in_short
from benchmarks.stalls.scenarios import SCENARIOS, play
from benchmarks.steady import steady
from benchmarks.systems import DEFAULT, Failed, System
from streams.broker import KafkaBroker
from streams.errors import StreamsError

MEASURES = ("drain", "latency", "memory", "restore", "stalls", "spark", "async")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks",
        description="Measures the event source against a hand-written confluent-kafka loop that does the same work, "
        "work ahead of its turn against a loop of asyncio and against quixstreams, and the Spark data source against "
        "Spark's own Kafka connector.",
        epilog="A system is NAME[@FOLDER][:OPTION=VALUE,...]: engine, handwritten:events=1000, engine@../other, "
        "engine:pool.batch_delay_seconds=0.005,client.linger.ms=1. The first one is what ratios refer to.",
    )
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {', '.join(MEASURES)}; default: all")
    parser.add_argument("--systems", nargs="+", type=System.parse, default=[System.parse(text) for text in DEFAULT])
    parser.add_argument("--records", type=int, default=300_000, help="of a drain (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the systems in turn (default: %(default)s)")
    parser.add_argument("--rates", type=int, nargs="+", default=[2_000, 20_000], help="events/s, for latency")
    parser.add_argument("--seconds", type=float, default=20, help="of a latency run (default: %(default)s)")
    parser.add_argument("--memory-seconds", type=float, default=60, help="of the memory run, at the first rate")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="of stalls")
    parser.add_argument("--stall-rate", type=int, default=1_000, help="events/s during stalls (default: %(default)s)")
    parser.add_argument("--traces", type=Path, help="folder in which what members wrote during stalls is kept")
    parser.add_argument("--rows", type=int, default=400_000, help="of a job of Spark (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=200_000, help="rows in a batch of a Spark stream")
    parser.add_argument("--partitions", type=int, nargs="+", default=[2, 1, 4], help="and tasks, of Spark's jobs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="of async")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 16, 256], help="of async work")
    parser.add_argument("--async-seconds", type=float, default=6, help="of a throughput run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=20_130_101)
    parser.add_argument("--quick", action="store_true", help="one short round: does it work, and about how fast?")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for JSON (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    unknown = set(parsed.measures) - set(MEASURES)
    if unknown:
        parser.error(f"unknown measure: {', '.join(sorted(unknown))}; there are: {', '.join(MEASURES)}")
    parsed.measures = parsed.measures or list(MEASURES)
    if parsed.quick:
        parsed.records, parsed.repeats, parsed.seconds, parsed.memory_seconds = 60_000, 1, 5, 10
        parsed.rates, parsed.rows, parsed.batch = parsed.rates[:1], 50_000, 20_000
        parsed.partitions = parsed.partitions[:1]
    sizes = AsyncSizes(
        concurrencies=tuple(parsed.concurrency),
        seconds=parsed.async_seconds,
        repeats=parsed.repeats,
        parts=tuple(parsed.parts),
    )
    parsed.async_sizes = quick(sizes) if parsed.quick else sizes
    parsed.shapes = SHAPES[:2] if parsed.quick else SHAPES
    return parsed


def measure(options: argparse.Namespace, run: Run, console: Console) -> None:
    """Fill ``run``. Raises ``Failed``."""
    console.print(
        f"machine: {run.facts['cpu']}, {run.facts['cores']} cores; load {run.facts['load_average_before'][0]:.1f}"
    )
    with (
        console.status("starting a Kafka broker") as status,
        KafkaBroker(
            durable=True,
            heap_mb=1024,
            properties={"broker.session.timeout.ms": "30000"},  # a busy machine is no reason to give the only broker up
            progress=lambda what, done, total: status.update(f"{what}: {done // MIB} of {total // MIB} MiB"),
        ) as kafka,
    ):
        cluster = Cluster(kafka.bootstrap_servers)
        assert kafka.pid is not None
        progress = Progress(console, status)
        if {"drain", "latency", "memory"} & set(options.measures):
            _speed(options, run, cluster, kafka.pid, progress)
        if "restore" in options.measures:
            _restore(options, run, cluster, progress)
        if "stalls" in options.measures:
            _stalls(options, run, cluster, progress)
        if "async" in options.measures:
            _async(options, run, cluster, progress)
        if "spark" in options.measures:
            _spark(options, run, cluster, kafka.pid, progress)


class Progress:
    """Says what is being measured, and what came of it."""

    def __init__(self, console: Console, status: Status) -> None:
        self.say, self.now = console.print, status.update


def _speed(options: argparse.Namespace, run: Run, cluster: Cluster, broker_pid: int, progress: Progress) -> None:
    progress.now(f"writing {options.records:,} records")
    source = cluster.source("drain-in")
    cluster.fill(source, options.seed, options.records)
    for text in DEFAULT[1:]:  # a cold Java machine is the first run's handicap
        progress.now(f"warming the broker up, not counted: {text}")
        drain(cluster, System.parse(text), source, options.seed, options.records, broker_pid)
    if "drain" in options.measures:
        for turn in range(options.repeats):
            for system in options.systems:
                progress.now(f"drain {turn + 1}/{options.repeats}: {system.label}")
                found = drain(cluster, system, source, options.seed, options.records, broker_pid)
                run.drains.append(found)
                progress.say(
                    f"drain {turn + 1}/{options.repeats} {system.label}: {found.per_second:,.0f}/s, "
                    f"{found.cpu_us_per_record:.1f} us CPU/record, {found.fault or 'exactly once'}"
                )
    for rate, seconds, repeats in _loads(options):
        for turn in range(repeats):
            for system in options.systems:
                progress.now(f"{rate:,}/s for {seconds:g} s, {turn + 1}/{repeats}: {system.label}")
                late = steady(cluster, system, options.seed + turn, rate, seconds)
                run.steadies.append(late)
                progress.say(
                    f"{rate:,}/s {turn + 1}/{repeats} {system.label}: p50 {late.p50:.1f} p99 {late.p99:.1f} "
                    f"max {late.highest:.1f} ms, RSS {late.memory.last_quarter / MIB:.0f} MiB, "
                    f"{late.fault or 'exactly once'}"
                )


def _restore(options: argparse.Namespace, run: Run, cluster: Cluster, progress: Progress) -> None:
    for records, partitions in options.shapes:
        progress.now(f"writing {records:,} changes")
        log = Log(cluster, records, partitions, options.seed)
        for turn in range(options.repeats):
            for system in RESTORERS:
                progress.now(f"restore of {records:,} from {partitions}, {turn + 1}/{options.repeats}: {system}")
                found = log.restored(system, turn)
                run.restores.append(found)
                progress.say(
                    f"restore of {records:,} from {partitions} {turn + 1}/{options.repeats} {system}: "
                    f"{found.per_second:,.0f}/s, {found.megabytes_per_second:.0f} MB/s, {found.fault or 'right'}"
                )
        log.forget()


def _stalls(options: argparse.Namespace, run: Run, cluster: Cluster, progress: Progress) -> None:
    warm_up = options.scenarios[0]
    progress.now(f"warming the broker up, not counted: {warm_up}")
    play(cluster, warm_up, 0, options.stall_rate)
    for turn in range(options.repeats):
        for name in options.scenarios:
            progress.now(f"stalls {turn + 1}/{options.repeats}: {name}")
            for stall in play(cluster, name, turn, options.stall_rate, options.traces):
                run.stalls.append(stall)
                progress.say(f"{turn + 1}/{options.repeats} {in_short(stall)}")


def _async(options: argparse.Namespace, run: Run, cluster: Cluster, progress: Progress) -> None:
    quix = find_quixstreams(progress.now, run.facts)
    if quix is None:
        progress.say(f"[red]quixstreams:[/] {run.facts['quixstreams']}")
    bench = AsyncBench(cluster.bootstrap_servers, options.async_sizes, options.seed, quix)
    for found in bench.runs(progress.now, run.async_work):
        progress.say(async_in_short(found))


def _spark(options: argparse.Namespace, run: Run, cluster: Cluster, broker_pid: int, progress: Progress) -> None:
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import StreamingQueryException

        from benchmarks.spark.run import Bench, session, versions
    except ImportError as error:
        raise Failed(f"the Spark measures need PySpark (extra: spark): {error}") from error
    progress.now("starting Spark")
    spark, missing = session()
    try:
        run.facts["spark"] = versions(spark, missing)
        progress.say(f"Spark: {run.facts['spark']}")
        if missing:
            progress.say(f"[red]Spark's own Kafka connector is not measured:[/] {missing}")
        sizes = Sizes(options.rows, options.batch, options.repeats, tuple(options.partitions))
        bench = Bench(spark, cluster, broker_pid, sizes, connector=not missing)
        for found in bench.runs(progress.now):
            run.sparks.append(found)
            progress.say(
                f"{found.what}, {found.partitions} partitions, {found.round}/{options.repeats} {found.system}: "
                f"{found.per_second:,.0f}/s, first {found.first_seconds:.1f} s, load {found.load:.1f}, "
                f"{found.fault or 'right'}"
            )
    except (Py4JError, StreamingQueryException) as error:  # of either side; what was measured until then is kept
        raise Failed(f"a job of Spark failed: {str(error).splitlines()[0]}") from error
    finally:
        spark.stop()


def _loads(options: argparse.Namespace) -> list[tuple[int, float, int]]:
    loads = []
    if "latency" in options.measures:
        loads += [(rate, options.seconds, options.repeats) for rate in options.rates]
    if "memory" in options.measures:
        loads.append((options.rates[0], options.memory_seconds, 1))
    return loads


def main(arguments: list[str]) -> int:
    """Measure, show, write. 1: something failed, or was not exactly once."""
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)
    run = Run(machine_facts(options.seed, arguments))
    began = time.strftime("%Y-%m-%dT%H-%M-%S")
    failed = ""
    try:
        measure(options, run, console)
    except (Failed, StreamsError) as error:
        failed = str(error)
    except KeyboardInterrupt:
        failed = "interrupted; what was measured until then is kept"
    show(console, run)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{began}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1))
    console.print(f"everything measured: {path}")
    if failed:
        console.print(f"[red]{failed}[/]")
    return 1 if failed or run.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
