"""A pipeline from files to a report, each of its stages killed while it works, and compared with the truth at the end.

    make pipeline
    python -m examples.pipeline.main --days 5 --no-kill

1. Files arrive in a folder, one for each day of flights.
2. A declarative pipeline of Spark (``project/transformations/flights.py``) makes events of them, exactly once.
3. The workers of an event source (``examples.flights.aircraft``) fold them into the state of each aircraft.
4. The same declarative pipeline has every change of this state in a streaming table, and of that a report.

``spark-pipelines run`` is started again and again, as a scheduler would: each run takes what has come since the last.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import orjson
from matplotlib.figure import Figure
from pyspark.sql import SparkSession
from rich.console import Console
from rich.text import Text

from examples.flights import ends, expected, results, verify
from examples.flights.cluster import CHANGELOGS, Cluster
from examples.flights.events import AIRCRAFT_GROUP, FACTS_TOPIC, FLIGHTS_TOPIC
from examples.flights.fleet import DemoFailed
from examples.flights.view import View
from examples.flights.workers import Workers
from examples.pipeline.arrivals import Arrivals
from examples.pipeline.declared import Declared
from examples.pipeline.stages import Stage, stages
from examples.pipeline.verify import airports_of, check_changes, check_rows
from examples.pipeline.work import Work
from examples.spark.flights_stream import deliver
from streams.broker import KafkaBroker
from streams.errors import StreamsError

DAYS, MOST_DAYS = 10, 59
"""Within January and February no aircraft's flights of one file come after those of the next; later in the year some
do, so that their order over all files is not that of time."""
MOST_RUNS = 12
SHOWN = 25


class Report(msgspec.Struct, kw_only=True):
    """Everything there is to say at the end."""

    flights: int
    seconds: float
    runs: int
    transactions: int
    starting_seconds: float
    """Of ``seconds``, until Spark's drivers had started."""
    killed: dict[str, float | None]
    """Stage -> seconds until it was back."""
    checks: list[verify.Check]
    picture: str

    @property
    def right(self) -> bool:
        """Whether every check found nothing wrong."""
        return all(check.wrong == 0 for check in self.checks)


def run(out: Path | None, *, days: int, kill: bool, json: bool) -> int:
    """Run everything; returns the exit code. Main thread only. Raises ``StreamsError`` for what a user has to solve."""
    return ends.exit_code_of(lambda console: _run(out, console, days=days, kill=kill, json=json))


def _run(asked: Path | None, console: Console, *, days: int, kill: bool, json: bool) -> int:
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(ends.output_folder(asked, Path("out") / "pipeline")).resolve()
        view = stack.enter_context(View(console))
        report = _pipeline(out, view, stack, days=days, kill=kill)
        view.phase("stopping everything")
    results.show_differences(report.checks, console)
    if json:
        sys.stdout.write(orjson.dumps(report, msgspec.to_builtins, orjson.OPT_APPEND_NEWLINE).decode())
    else:
        _show(report)
    return ends.EXIT_OK if report.right else ends.EXIT_WRONG


def _pipeline(out: Path, view: View, stack: contextlib.ExitStack, *, days: int, kill: bool) -> Report:
    for old in ("waiting", "days", "project", "storage", "warehouse", "catalog"):
        shutil.rmtree(out / old, ignore_errors=True)
    files = deliver(out / "waiting", days)  # says at once if the data set is missing
    view.phase("starting Kafka")
    kafka = stack.enter_context(KafkaBroker(progress=view.downloading))
    servers = kafka.bootstrap_servers
    cluster = stack.enter_context(contextlib.closing(Cluster(servers)))
    cluster.create_topics()
    log = stack.enter_context((out / "workers.log").open("wb"))
    workers = Workers("examples.flights.aircraft:source", 2, name=AIRCRAFT_GROUP, servers=servers, log=log)
    stack.callback(workers.stop)
    spark = Declared(out, servers, stack.enter_context((out / "spark.log").open("wb")))
    stack.callback(spark.stop)
    arrivals = stack.enter_context(Arrivals(files, out / "days"))
    work = Work(cluster, spark, workers, arrivals, view)
    work.wait_for_changelog()
    struck = stages(cluster, out) if kill else []
    killed = _to_the_end(work, struck, kill=kill)
    codes = {AIRCRAFT_GROUP: workers.stop()}

    view.phase("Spark computes from the files what the numbers must be")
    session = SparkSession.builder.remote(spark.url).getOrCreate()
    stack.callback(session.stop)
    truth = expected.expect(session, out / "days")
    view.phase("checking every number")
    airports, checks = session.read.table("airports").collect(), []
    for check in _checks(session, cluster, truth, codes, airports):
        checks.append(check)
        view.note(results.verdict(check))
    picture = out / "airports.png"
    draw(airports, picture)
    return Report(
        flights=truth.flights,
        seconds=round(view.elapsed, 1),
        runs=work.runs,
        starting_seconds=round(work.starting_seconds, 1),
        transactions=workers.transactions,
        killed=killed,
        checks=checks,
        picture=str(picture),
    )


def _to_the_end(work: Work, struck: Sequence[Stage], *, kill: bool) -> dict[str, float | None]:
    """Run the declarative pipeline until a run began when all was folded, and each stage has been killed."""
    is_folded = False
    while work.runs < MOST_RUNS:
        waiting = [stage for stage in struck if stage.struck_at is None]
        all_is_there, was_folded = work.all_arrived, is_folded
        if not work.run(waiting, kill_a_worker=kill):
            continue
        for stage in struck:
            stage.is_back()
        if was_folded and not waiting:
            return {stage.name: stage.back_seconds for stage in struck} | work.killed_worker()
        if all_is_there and not is_folded:
            work.fold(kill_a_worker=kill)
            is_folded = True
    names = ", ".join(stage.name for stage in struck if stage.struck_at is None)
    raise DemoFailed(f"after {work.runs} runs there was no moment to kill: {names or 'nothing more'}; try more --days")


def _checks(
    session: SparkSession, cluster: Cluster, truth: expected.Expected, codes: Mapping[str, int], airports: list[Any]
) -> Iterator[verify.Check]:
    changelog = CHANGELOGS[AIRCRAFT_GROUP]
    yield verify.check_flights(cluster.read(FLIGHTS_TOPIC), truth)
    yield verify.check_facts(cluster.read(FACTS_TOPIC), truth)
    yield verify.check_aircraft(cluster.read(changelog), truth)
    yield check_changes(session.read.table("aircraft_changes"), cluster.read(changelog))
    yield check_rows("table of the aircraft", session.read.table("aircraft").collect(), "key", truth.aircraft)
    yield check_rows("report of the airports", airports, "airport", airports_of(truth))
    yield verify.check_ends(cluster, codes)


def draw(airports: Sequence[Any], target: Path) -> None:
    """A PNG of the report: how late the aircraft arrive that were seen last at an airport, the most flown on top."""
    shown = sorted(airports, key=lambda row: row.flights)[-SHOWN:]
    figure = Figure(figsize=(9, 1.2 + 0.28 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    labels = [f"{row.airport} ({row.aircraft:,} aircraft)" for row in shown]
    axes.barh(labels, [row.minutes_late / max(1, row.arrived) for row in shown])
    axes.set_xlabel("mean minutes late on arrival, of the aircraft that were seen there last")
    figure.savefig(target, dpi=120, format="png")


def _show(report: Report) -> None:
    answers = Console(highlight=False)
    answers.print()
    for check in report.checks:
        mark = ("ok   ", "green") if check.wrong == 0 else ("WRONG", "bold red")
        answers.print(Text.assemble(mark, " ", results.verdict(check)), soft_wrap=True)
    back = ", ".join(f"{name} (back after {seconds or 0:.0f} s)" for name, seconds in report.killed.items())
    answers.print(
        f"{report.flights:,} flights, {report.runs} runs of the declarative pipeline, {report.transactions:,} "
        f"transactions of the event source, {report.seconds:.0f} s in all, {report.starting_seconds:.0f} s of them "
        f"until Spark had started. Killed: {back or 'nothing'}.",
        soft_wrap=True,
    )
    answers.print(f"aircraft by airport: {report.picture}", soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for what stays; default: out/pipeline, or the next free")
    parser.add_argument("--days", type=int, default=DAYS, choices=range(1, MOST_DAYS + 1), metavar="N", help="1 to 59")
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="kill nothing")
    parser.add_argument("--json", action="store_true", help="the summary as one line of JSON on stdout")
    given = parser.parse_args()
    try:
        if missing := [name for name in ("yaml", "grpc_status", "pandas") if find_spec(name) is None]:
            raise DemoFailed(f"{', '.join(missing)} is missing: pip install 'kafka-event-source[demo]'")
        return run(given.out, days=given.days, kill=given.kill, json=given.json)
    except StreamsError as error:
        print(f"pipeline: {error}", file=sys.stderr)
        return ends.EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
