"""One Spark session, one broker, both sides in turn: how fast they read, write, stream, decode and encode.

Every figure is of a job that did the right thing: what a read gives is compared with what was written before it is
timed, what a write or stream has written is read back by a plain consumer afterwards.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from benchmarks.cluster import Cluster
from benchmarks.jars import NoJar
from benchmarks.spark.connector import COORDINATES, connector_jars
from benchmarks.spark.figures import BATCHES, CpuTimes, Sizes, SparkRun
from benchmarks.spark.judge import Content, Topics
from benchmarks.spark.sides import Connector, Grt, GrtTyped, Side, all_of
from benchmarks.spark.workload import content_of, typed_rows
from benchmarks.systems import Failed
from streams.broker.jars import pinned

CORES = 2

Say = Callable[[str], None]


class Cpu:
    """Seconds of CPU time that this process's Java machines, its Python processes and the broker have used."""

    def __init__(self, broker_pid: int | None) -> None:
        self._me = psutil.Process()
        self._broker = psutil.Process(broker_pid) if broker_pid else None

    def __call__(self) -> CpuTimes:
        java = python = 0.0
        for process in [self._me, *self._me.children(recursive=True)]:
            try:
                times, name = process.cpu_times(), process.name()
            except psutil.Error:
                continue
            own = times.user + times.system
            if self._broker and process.pid == self._broker.pid:
                continue
            if "java" in name:
                java += own
            elif process.pid == self._me.pid:
                python += own
            else:  # with the forks that have ended
                python += own + times.children_user + times.children_system
        broker = self._broker.cpu_times() if self._broker else None
        return CpuTimes(java, python, broker.user + broker.system if broker else 0.0)


def session() -> tuple[SparkSession, str]:
    """A session with the connector on board, and, when it is not, why."""
    settings = {"spark.sql.streaming.numRecentProgressUpdates": "1000"}
    active, missing = SparkSession.getActiveSession(), ""
    if active is not None:
        return active, "the session was there before, without the connector's jars"
    try:
        settings["spark.jars"] = ",".join(map(str, connector_jars()))
    except (NoJar, OSError) as error:
        missing = str(error)
    return kes_spark.local_session("bench", cores=CORES, memory="1g", settings=settings), missing


def versions(spark: SparkSession, missing: str) -> dict[str, Any]:
    """What the figures depend on, beside the machine."""
    jvm: Any = spark._jvm  # the session tells no versions of what it runs on
    connector = "not measured: " + missing if missing else sorted(COORDINATES)
    return {
        "pyspark": version("pyspark"),
        "pyarrow": version("pyarrow"),
        "java": jvm.java.lang.System.getProperty("java.version"),
        "kafka": pinned()[0],
        "cores": CORES,
        "connector": connector,
        "note": "connector and its dependencies are of other versions than Spark: for measuring, supported by nobody",
    }


class Bench:
    """Makes the jobs and times them."""

    def __init__(
        self, spark: SparkSession, cluster: Cluster, broker_pid: int | None, sizes: Sizes, *, connector: bool
    ) -> None:
        servers = cluster.bootstrap_servers
        self._spark, self._cluster, self._sizes = spark, cluster, sizes
        self._cpu, self._topics = Cpu(broker_pid), Topics(servers)
        self._numbers = itertools.count(1)
        self.sides: list[Side] = [Connector(spark, servers)] if connector else []
        self.sides.append(Grt(spark, servers))
        self._lean = Connector(spark, servers, headers=False) if connector else None
        self._by_type = GrtTyped(spark, servers)

    def runs(self, say: Say) -> Iterator[SparkRun]:
        """Everything, job by job. Raises ``Failed`` when the input cannot be made right."""
        for partitions in self._sizes.partitions:
            say(f"writing input, {partitions} partitions")
            source, due = self._input(self._sizes.rows, partitions)
            long_source, all_due = self._input(self._sizes.batch * BATCHES, partitions)
            yield from self._in_turn(say, "read", self._reads(source), due, partitions)
            if partitions == self._sizes.partitions[0]:
                yield from self._in_turn(say, "decode", self._decodes(source), due, partitions)
                yield from self._in_turn(say, "encode", self._encodes(partitions), due, partitions)
            for what, job in (("write", self._write), ("stream", self._stream)):
                given = (due, source) if what == "write" else (all_due, long_source)
                sides = self.sides if what == "write" else [*self.sides, self._by_type]
                for turn in range(self._sizes.repeats + 1):
                    for side in sides:
                        say(f"{what}, {partitions} partitions, {turn}/{self._sizes.repeats}: {side.name}")
                        yield job(side, turn, partitions, *given)
            self._cluster.delete(source, long_source)

    def _in_turn(
        self, say: Say, what: str, jobs: dict[str, tuple[DataFrame, str]], due: Content, partitions: int
    ) -> Iterator[SparkRun]:
        for turn in range(self._sizes.repeats + 1):
            for name, (frame, fault) in jobs.items():
                say(f"{what}, {partitions} partitions, {turn}/{self._sizes.repeats}: {name}")
                seconds, cpu, load = self._timed(partial(all_of, frame), due.rows)
                rate = due.rows / seconds
                yield SparkRun(what, name, partitions, turn, due.rows, rate, seconds, cpu, load, fault)

    def _reads(self, source: str) -> dict[str, tuple[DataFrame, str]]:
        due = content_of(self.sides[-1].encoded(self._typed(1)))
        found = {}
        for side in self.sides:
            records = side.read(source)
            content = content_of(side.known(records))
            found[side.name] = records, "" if content == due else f"read {content} instead of {due}"
        if self._lean:
            records = self._lean.read(source)
            fault = "" if content_of(records) == due else "read something else"
            found["connector, no headers"] = records, fault
        return found

    def _decodes(self, source: str) -> dict[str, tuple[DataFrame, str]]:
        due = _sums(self._typed(1))
        found: dict[str, tuple[DataFrame, str]] = {}
        for side in self.sides:
            records = side.read(source)
            decoded = side.decoded(records)
            fault = "" if _sums(decoded) == due else f"decoded {_sums(decoded)} instead of {due}"
            found[f"{side.name}: raw"] = records, ""
            found[f"{side.name}: {'events' if side.name == 'grt' else 'from_json'}"] = decoded, fault
        decoded = self._by_type.decoded_by_codec(source)
        fault = "" if _sums(decoded) == due else f"decoded {_sums(decoded)} instead of {due}"
        found["grt: by codec"] = decoded, fault
        return found

    def _encodes(self, tasks: int) -> dict[str, tuple[DataFrame, str]]:
        frames = {side.name: side.encoded(self._typed(tasks)) for side in self.sides}
        contents = {name: content_of(frame) for name, frame in frames.items()}
        same = len(set(contents.values())) == 1
        return {name: (frame, "" if same else f"different bytes: {contents}") for name, frame in frames.items()}

    def _write(self, side: Side, turn: int, partitions: int, due: Content, _: str) -> SparkRun:
        target, rows = self._topic(partitions), side.encoded(self._typed(partitions))
        seconds, cpu, load = self._timed(partial(side.write, rows, target), due.rows)
        fault = self._topics.verdict(target, partitions, due, in_order=False)
        self._cluster.delete(target)
        rate = due.rows / seconds
        return SparkRun("write", side.name, partitions, turn, due.rows, rate, seconds, cpu, load, fault)

    def _stream(self, side: Side, turn: int, partitions: int, due: Content, source: str) -> SparkRun:
        target = self._topic(partitions)
        done: list[Any] = []
        # Offsets are counted out, and the end of a transaction takes one too: a little more, or a sixth batch is due.
        most = self._sizes.batch + self._sizes.batch // 100 + partitions

        def copy() -> None:
            with tempfile.TemporaryDirectory() as checkpoint:
                query = side.copy(source, target, most, checkpoint)
                query.awaitTermination()
                done.extend(each for each in query.recentProgress if each["numInputRows"])

        _, cpu, load = self._timed(copy, due.rows)
        fault = self._topics.verdict(target, partitions, due, in_order=True)
        if len(done) != BATCHES:
            fault = fault or f"{len(done)} batches instead of {BATCHES}"
        self._cluster.delete(target)
        rows = [int(each["numInputRows"]) for each in done]
        took = [int(each["durationMs"]["triggerExecution"]) for each in done]
        rates = [1000 * count / ms for count, ms in zip(rows[1:], took[1:], strict=True)]
        return SparkRun(
            "stream", side.name, partitions, turn, due.rows, statistics.median(rates or [0.0]),
            took[0] / 1000 if took else 0.0, cpu, load, fault, took,
        )  # fmt: skip

    def _timed(self, job: Callable[[], None], rows: int) -> tuple[float, CpuTimes, float]:
        """Seconds, CPU time a row, and the load at the end."""
        before, began = self._cpu(), time.perf_counter()
        job()
        seconds = time.perf_counter() - began
        return seconds, self._cpu().per_row(before, rows), os.getloadavg()[0]

    def _typed(self, tasks: int) -> DataFrame:
        return typed_rows(self._spark, self._sizes.rows, tasks)

    def _topic(self, partitions: int) -> str:
        name = f"spark-{next(self._numbers)}-{os.getpid()}"
        self._cluster.create(name, partitions)
        return name

    def _input(self, rows: int, partitions: int) -> tuple[str, Content]:
        topic, grt = self._topic(partitions), self.sides[-1]
        records = grt.encoded(typed_rows(self._spark, rows, partitions))
        due = content_of(records)
        grt.write(records, topic)
        if fault := self._topics.verdict(topic, partitions, due, in_order=True):
            raise Failed(f"the input of the Spark measures is wrong: {fault}")
        return topic, due


def _sums(typed: DataFrame) -> Sequence[Any]:
    found = typed.agg(f.count("id"), f.sum("id"), f.sum("cents"), f.sum(f.crc32("account")), f.sum(f.length("note")))
    return tuple(found.collect()[0])
