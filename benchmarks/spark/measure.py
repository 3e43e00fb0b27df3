"""The Spark data source beside Spark's own Kafka connector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import ClassVar

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.measures import Measure
from benchmarks.systems import Failed
from benchmarks.tables import loads, names, of_system, ratios, right, spread, table, verdict

BATCHES = 5
"""Of a stream."""


class SparkRun(msgspec.Struct, frozen=True):
    """One job. ``round`` 0 is not counted: it is the first of its kind in the session. ``cpu_us``: per row.

    ``per_second`` of a stream is that of the median batch after the first, ``first_seconds`` that of its first batch.
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
        try:
            from py4j.protocol import Py4JError
            from pyspark.errors import StreamingQueryException

            from benchmarks.spark.run import SparkBench, session, versions
        except ImportError as error:
            raise Failed(f"the Spark measures need PySpark (extra: spark): {error}") from error
        bench.now("starting Spark")
        spark, missing = session()
        try:
            bench.facts["spark"] = versions(missing)
            if missing:
                bench.say(f"[red]Spark's own Kafka connector is not measured:[/] {missing}")
            jobs = SparkBench(spark, bench.cluster, bench.broker_pid, bench.sizes(self), connector=not missing)
            yield from jobs.runs(bench.now)
        except (Py4JError, StreamingQueryException) as error:  # of either side; finished runs are kept
            raise Failed(f"a job of Spark failed: {str(error).splitlines()[0]}") from error
        finally:
            spark.stop()

    def in_short(self, found: SparkRun) -> str:
        return f"{found.where}: {found.fault or f'{found.per_second:,.0f}/s, right'}"

    def fault(self, found: SparkRun) -> str:
        return f"{found.where}: {found.fault}" if found.fault else ""

    def tables(self, found: Sequence[SparkRun]) -> list[Table]:
        """One for each kind of job and number of partitions."""

        def place(one: SparkRun) -> tuple[int, str]:
            return one.partitions, one.what

        return [_table(list(here)) for _, here in groupby(sorted(found, key=place), place)]


def _table(found: Sequence[SparkRun]) -> Table:
    one = found[0]
    each = "the median batch after the first" if one.what == "stream" else "the whole job"
    shown = table(
        f"Spark, {one.what} of {one.rows:,} rows in {one.partitions} partitions: {each}; {loads(found)}",
        ["system"],
        ["rows/s", "to the connector", "CPU us/row", "first s", "correct"],
    )
    for system in names(found):
        mine = of_system(found, system)
        counted = right(mine)
        first = counted if one.what == "stream" else mine[:1]
        shown.add_row(
            system,
            spread(run.per_second for run in counted),
            spread(ratios(found, system, "connector", lambda run: run.per_second), ".2f"),
            spread((run.cpu_us for run in counted), ".2f"),
            spread((run.first_seconds for run in first if not run.fault), ".1f"),
            verdict(mine),
        )
    return shown


MEASURES = (SparkJobs(),)
