"""The Spark data source against Spark's own Kafka connector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.measures import Measure, Options
from benchmarks.spark.figures import Sizes, SparkRun
from benchmarks.spark.report import spark_tables
from benchmarks.systems import Failed


class SparkJobs(Measure[SparkRun]):
    """Reads, writes, streams, decoding and encoding."""

    name, title, place = "spark", "Spark: the data source beside Spark's own connector", 90
    presets = frozenset({"full"})
    result = SparkRun
    about = """\
`format("grt")` beside Spark's own Kafka connector: one session of two cores, the same topics, the two in turn. An
event is about 100 bytes of JSON with a key and the type header. Both sides read committed records only and take the
headers along (not `by codec`, which is `read_events` with `decode="python"`: the class's columns, and no headers);
ours writes and streams **exactly once**, the connector at least once. The rate of a stream is that
of its median batch after the first. What was read or written is compared with what is due before a rate is told.
The connector is a mix of versions that nobody supports with this PySpark (`benchmarks/spark/connector.py`)."""

    def arguments(self, options: Options) -> None:
        """How much."""
        options.add("--rows", type=int, quick=50_000, default=400_000, full=400_000, help="of a job")
        options.add(
            "--batch", type=int, quick=20_000, default=200_000, full=200_000, help="rows in a batch of a stream"
        )
        options.add(
            "--partitions", type=int, nargs="+", quick=[2], default=[2], full=[2, 1, 4], help="partitions and tasks"
        )
        options.add("--spark-rounds", type=int, quick=1, default=2, full=3, help="rounds that are counted")

    def run(self, bench: Bench) -> Iterator[SparkRun]:
        """Job by job, both sides in turn."""
        try:
            from py4j.protocol import Py4JError
            from pyspark.errors import StreamingQueryException

            from benchmarks.spark.run import Bench as SparkBench
            from benchmarks.spark.run import session, versions
        except ImportError as error:
            raise Failed(f"the Spark measures need PySpark (extra: spark): {error}") from error
        options, cluster = bench.options, bench.cluster
        bench.now("starting Spark")
        spark, missing = session()
        try:
            bench.facts["spark"] = versions(spark, missing)
            if missing:
                bench.say(f"[red]Spark's own Kafka connector is not measured:[/] {missing}")
            sizes = Sizes(options.rows, options.batch, options.spark_rounds, tuple(options.partitions))
            yield from SparkBench(spark, cluster, bench.broker_pid, sizes, connector=not missing).runs(bench.now)
        except (Py4JError, StreamingQueryException) as error:  # of either side; what was measured until then is kept
            raise Failed(f"a job of Spark failed: {str(error).splitlines()[0]}") from error
        finally:
            spark.stop()

    def in_short(self, found: SparkRun) -> str:
        """The rate."""
        rate = f"{found.per_second:,.0f}/s, first {found.first_seconds:.1f} s, right"
        where = f"{found.what}, {found.partitions} partitions, {found.round}"
        return f"{where} {found.system}: {found.fault or rate}"

    def fault(self, found: SparkRun) -> str:
        """By job and round."""
        where = f"{found.what}, {found.system}, {found.partitions} partitions, round {found.round}"
        return f"{where}: {found.fault}" if found.fault else ""

    def tables(self, found: Sequence[SparkRun]) -> list[Table]:
        """One for each kind of job."""
        return spark_tables(found)


MEASURES = (SparkJobs(),)
