"""The Spark data source beside Spark's own Kafka connector."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.reader import percentiles
from benchmarks.systems import Failed
from benchmarks.tables import by_what, loads, names, of_rounds, of_system, ratios, right, spread, table, verdict

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES = 5
"""Of a stream."""
CORES = 2
CONNECTOR, FLOOR, BARE, NOTHING = "connector", "rate to noop", "bare Python", "nothing"
DRIVER = "driver"
"""The driver's part of a write: batches that are made already are put into one transaction."""
COMMIT, COMMIT_ROWS, COMMITS = "commit", 200, 30
"""The same for small batches of one query: the time of the median of so many commits."""
WIDE, MANY, WIDE_ROWS = "one batch", 400, 2_000
"""A micro-batch of few rows in a topic of many partitions, by its number of partitions and of rows."""
BACK_TO_BACK, EVERY, IDLE = "back to back", "every 500 ms", "idle, every 500 ms"
BY_CONNECTOR = "grt, connector reads"
LEAST = {("stream", "grt"): 1.0, ("stream", BY_CONNECTOR): 1.2, ("write", "grt"): 1.8}
LEAST_TYPED = 0.9
MOST_CPU = {"grt": 0.7, BY_CONNECTOR: 0.7}
MOST_COMMIT_MS, MOST_WIDE_SECONDS = 15, 3
MOST_NS, MOST_ABOVE_FLOOR_MS, MOST_IDLE_PERCENT = 50, 80, 10


class SparkRun(msgspec.Struct, frozen=True):
    """One job. ``round`` 0 is not counted: it is the first of its kind in the session. ``cpu_us``: per row.

    ``per_second`` of a stream is that of the median batch after the first, ``first_seconds`` that of its first batch,
    of a commit the median's.
    """

    what: str
    system: str
    partitions: int
    round: int
    rows: int
    per_second: float
    first_seconds: float
    cpu_us: float
    load_average: float
    fault: str = ""

    @property
    def where(self) -> str:
        """Name the job."""
        return f"{self.what}, {self.system}, {self.partitions} partitions, round {self.round}"


class SparkJobs(Measure[SparkRun]):
    """Reads, typed reads, writes and streams."""

    name, title, place = "spark", "Spark: the data source beside Spark's own connector", 90
    presets = frozenset({"full"})
    result = SparkRun
    about = """\
`format("grt")` beside Spark's own Kafka connector: one session of two cores, the same topics, the two in turn. An
event is about 100 bytes of JSON with a key and the type header. Both sides read committed records only and take the
headers along; ours writes and streams **exactly once**, the connector at least once. *Decode* reads typed columns: by
`events` and by `from_json`; `grt, typed` is `read_events` with `decode="python"`, and a stream that carries the type as
a column instead of headers. The rate of a stream is that of its median batch after the first. Before a rate is shown,
the rows are compared with those that are due. The connector is a mix of versions that is not supported with this
PySpark (`benchmarks/spark/run.py`)."""

    sizes: ClassVar = {
        "rows": (50_000, 400_000, 400_000),
        "batch": (20_000, 200_000, 200_000),
        "partitions": ([2], [2], [2, 1, 4]),
        "rounds": (1, 2, 3),
    }

    def run(self, bench: Bench) -> Iterator[SparkRun]:
        """Job by job, both sides in turn."""
        with _session(bench) as (spark, connector):
            from benchmarks.spark.run import SparkBench

            jobs = SparkBench(spark, bench.cluster, bench.broker_pid, bench.sizes(self), connector=connector)
            yield from jobs.runs(bench.now)

    def in_short(self, found: SparkRun) -> str:
        return f"{found.where}: {found.fault or f'{found.per_second:,.0f}/s, right'}"

    def fault(self, found: SparkRun) -> str:
        return f"{found.where}: {found.fault}" if found.fault else ""

    def tables(self, found: Sequence[SparkRun]) -> list[Table]:
        """One for each kind of job and number of partitions."""

        def place(one: SparkRun) -> tuple[int, str]:
            return one.partitions, one.what

        return [_table(list(here)) for _, here in groupby(sorted(found, key=place), place)]

    def aims(self, found: Sequence[SparkRun]) -> list[Aim]:
        """Compare in two partitions, one for each core."""
        kinds = by_what([one for one in found if one.partitions == CORES])
        aims = [
            at_least(f"Spark: {what} of {system}, rows/s of the connector's", least, compared)
            for (what, system), least in LEAST.items()
            if (compared := ratios(kinds.get(what, []), system, CONNECTOR, _rate))
        ]
        streams = kinds.get("stream", [])
        aims += [
            at_most(f"Spark: stream of {system}, CPU time a row of the connector's", most, compared)
            for system, most in MOST_CPU.items()
            if (compared := ratios(streams, system, CONNECTOR, lambda one: one.cpu_us))
        ]
        read = {one.round: one.per_second for one in right(of_system(kinds.get("read", []), "grt"))}
        decoded = [one for one in right(of_system(kinds.get("decode", []), "grt, typed")) if one.round in read]
        if decoded:
            of_read = [one.per_second / read[one.round] for one in decoded]
            aims.append(at_least("Spark: typed by codec, rows/s of the plain read", LEAST_TYPED, of_read))
        if driven := right(kinds.get(DRIVER, [])):
            nanoseconds = [one.cpu_us * 1e3 for one in driven]
            aims.append(at_most("Spark: the driver's processor time", MOST_NS, nanoseconds, "ns a row"))
        if commits := right(kinds.get(COMMIT, [])):
            took = [one.first_seconds * 1e3 for one in commits]
            aims.append(at_most(f"Spark: a commit of {COMMIT_ROWS} rows, warm", MOST_COMMIT_MS, took, "ms"))
        wide = [one for one in right(found) if one.what == WIDE]
        for system in names(wide):
            took = [one.first_seconds for one in of_system(wide, system)]
            what = f"Spark: a micro-batch of {WIDE_ROWS:,} rows in {MANY} partitions, {system}"
            aims.append(at_most(what, MOST_WIDE_SECONDS, took, "s"))
        return aims


def _table(found: Sequence[SparkRun]) -> Table:
    one = found[0]
    each = {"stream": "the median batch after the first", COMMIT: f"the median of {COMMITS}"}.get(
        one.what, "the whole job"
    )
    shown = table(
        f"Spark, {one.what} of {one.rows:,} rows in {one.partitions} partitions: {each}; {loads(found)}",
        ["system"],
        ["rows/s", "to the connector", "CPU us/row", "first s", "correct"],
    )
    for system in names(found):
        mine = of_system(found, system)
        counted = right(mine)
        first = counted if one.what in {"stream", COMMIT, WIDE} else mine[:1]
        shown.add_row(
            system,
            spread(run.per_second for run in counted),
            spread(ratios(found, system, "connector", lambda run: run.per_second), ".2f"),
            spread((run.cpu_us for run in counted), ".2f"),
            spread((run.first_seconds for run in first if not run.fault), ".3f" if one.what == COMMIT else ".1f"),
            verdict(mine),
        )
    return shown


class PacedRun(msgspec.Struct, frozen=True):
    """One query under a load, or none. Times in ms: of the median batch with rows, and from sender to reader.
    ``cpu_share``: of a core, by driver, Java and Python workers, and by the sender and the reader of the measure."""

    what: str
    system: str
    round: int
    fault: str = ""
    batches: int = 0
    batch_ms: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    cpu_share: float = 0.0
    load_average: float = 0.0

    def of(self, batch_ms: Sequence[float], late: Sequence[float] = (), fault: str = "") -> PacedRun:
        """Complete the run with what its batches and rows took."""
        p50, p99, _ = percentiles(late)
        middle = statistics.median(batch_ms or [0.0])
        return msgspec.structs.replace(self, batches=len(batch_ms), batch_ms=middle, p50=p50, p99=p99, fault=fault)


class SparkPaced(Measure[PacedRun]):
    """Small micro-batches, a trigger, and a query that waits."""

    name, title, place = "paced", "Spark: small micro-batches, and a query that waits", 91
    presets = frozenset({"full"})
    result = PacedRun
    about = """\
A query from topic to topic (2 partitions, 500 rows/s), by `format("grt")` exactly once and by Spark's own connector at
least once. *Back to back*: a batch begins when the one before has ended. Its floor is Spark's rate source into its sink
for nothing; `bare Python` is a source and a sink in Python that do nothing, as any data source in Python begins. *Every
500 ms*: with that trigger, from the clock before a row is sent to a reader of committed rows. *Idle*: the same trigger,
and no rows; `nothing` is the session alone. Right is a run after which every row is in the target once, in the order of
its key."""

    sizes: ClassVar = {"rate": (500, 500, 500), "seconds": (5, 15, 15), "rounds": (1, 3, 5)}

    def run(self, bench: Bench) -> Iterator[PacedRun]:
        """Query by query."""
        with _session(bench) as (spark, connector):
            from benchmarks.spark.paced import PacedBench

            paced = PacedBench(spark, bench.cluster, bench.broker_pid, bench.sizes(self), connector=connector)
            yield from paced.runs(bench.now)

    def in_short(self, found: PacedRun) -> str:
        figures = (
            f"{found.batches} batches of {found.batch_ms:.0f} ms, p50 {found.p50:.0f} ms, {found.cpu_share:.2f} cores"
        )
        return f"{found.what}, {found.system}, round {found.round}: {found.fault or figures}"

    def tables(self, found: Sequence[PacedRun]) -> list[Table]:
        shown = table(
            f"Spark, queries under a load: {of_rounds(found)}; {loads(found)}",
            ["query", "system"],
            ["batch, ms", "p50, ms", "p99, ms", "of a core", "correct"],
        )
        for what, runs in by_what(sorted(found, key=lambda one: one.what)).items():
            for system in names(runs):
                mine = of_system(runs, system)
                kept = right(mine)
                shown.add_row(
                    what,
                    system,
                    spread(one.batch_ms for one in kept if one.batches),
                    spread(one.p50 for one in kept if one.p50),
                    spread(one.p99 for one in kept if one.p99),
                    spread((one.cpu_share for one in kept), ".2f"),
                    verdict(mine),
                )
        return [shown]

    def aims(self, found: Sequence[PacedRun]) -> list[Aim]:
        kinds, aims = by_what(found), list[Aim]()
        small = kinds.get(BACK_TO_BACK, [])
        floor = {one.round: one.batch_ms for one in right(of_system(small, FLOOR))}
        for system in ("grt", BY_CONNECTOR):
            if mine := [one for one in right(of_system(small, system)) if one.round in floor]:
                above = [one.batch_ms - floor[one.round] for one in mine]
                what = f"Spark: a small micro-batch of {system}, above Spark's floor"
                aims.append(at_most(what, MOST_ABOVE_FLOOR_MS, above, "ms"))
        if idle := right(of_system(kinds.get(IDLE, []), "grt")):
            shares = [one.cpu_share * 100 for one in idle]
            aims.append(at_most("Spark: a query that waits", MOST_IDLE_PERCENT, shares, "% of a core"))
        return aims


@contextmanager
def _session(bench: Bench) -> Iterator[tuple[SparkSession, bool]]:
    """Start Spark; and whether its own connector is on board. Raises ``Failed``."""
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import StreamingQueryException

        from benchmarks.spark.run import session, versions
    except ImportError as error:
        raise Failed(f"the Spark measures need PySpark (extra: spark): {error}") from error
    bench.now("starting Spark")
    spark, missing = session()
    try:
        bench.facts["spark"] = versions(missing)
        bench.say(f"tasks of the sink: {bench.facts['spark']['tasks of the sink']}")
        if missing:
            bench.say(f"[red]Spark's own Kafka connector is not measured:[/] {missing}")
        yield spark, not missing
    except (Py4JError, StreamingQueryException) as error:  # of either side; finished runs are kept
        raise Failed(f"a job of Spark failed: {str(error).splitlines()[0]}") from error
    finally:
        spark.stop()


def _rate(run: SparkRun) -> float:
    return run.per_second


MEASURES = (SparkJobs(), SparkPaced())
