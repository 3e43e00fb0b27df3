"""One Spark session, one broker, both sides in turn: the rates of reads, typed reads, writes and streams.

Every figure is of a job that did the right thing: the rows of a read are compared with those that were written, and
the records of a write or a stream are read back by a plain consumer afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import threading
import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import psutil
from confluent_kafka import Message
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from benchmarks.cluster import Cluster, Headers
from benchmarks.jars import NoJar, jars
from benchmarks.spark.measure import (
    BATCHES,
    COMMIT,
    COMMIT_ROWS,
    COMMITS,
    CORES,
    DRIVER,
    MANY,
    WIDE,
    WIDE_ROWS,
    SparkRun,
)  # fmt: skip
from benchmarks.spark.sides import TYPE, Connector, Grt, GrtByConnector, GrtTyped, Side, typed_rows
from benchmarks.systems import Failed
from streams.sak import spark_jar
from streams.sak.cache import cache_folder
from streams.spark.writing.batch_encoding import BatchEncoder
from streams.spark.writing.markers import BatchRequest
from streams.spark.writing.placing import topic_shapes
from streams.spark.writing.sink_transaction import WriteTarget, write_once

HEADERS: Final[Headers] = [("__grt__", TYPE.encode())]
COORDINATES: Final = {
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0": (
        "64539c45e5d39f7ddb747312c239f38f5208d08c1a0ddf7d70beb2fbd9373705"
    ),
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.1.0-preview1": (
        "ab6e27a8a47ce63348dd0ecbd5543dc6212b4783180305cde5749e79684ea97b"
    ),
    "org.apache.kafka:kafka-clients:3.9.2": "014b4ef36884478a932641818b080c36a8f8e2e92dc771e800c9d2694f4f83d8",
    "org.apache.commons:commons-pool2:2.13.1": "f77a5060d6936a9144023584232f9de3f2248f1abfe156e9d31795f18770674f",
}
"""Spark's own connector. There is none in the repository for every PySpark that the package index has: these four fit
together for measuring, and are no set that anybody supports."""

LOOK_SECONDS: Final = 1.0

Say = Callable[[str], None]


class CpuTime:
    """Adds up the CPU time of this process and of all below it, Java machines and Python, without the broker, within a
    block. It never falls: what a process takes away that ends before its children counts as it was last seen, up to
    ``LOOK_SECONDS`` before."""

    def __init__(self, broker_pid: int | None) -> None:
        self._broker_pid = broker_pid
        self._last = self._lost = 0.0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cpu-time")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def seconds(self) -> float:
        """Return the sum as of now, from any thread."""
        me = psutil.Process()
        with self._lock:
            now = 0.0
            for process in [me, *me.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    if process.pid != self._broker_pid:
                        times = process.cpu_times()
                        # What ended below: Spark forks a process for each file that it gives rights.
                        ended = 0.0 if process is me else times.children_user + times.children_system
                        now += times.user + times.system + ended
            self._lost += max(0.0, self._last - now)
            self._last = now
            return now + self._lost

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.seconds()


def session() -> tuple[SparkSession, str]:
    """Start a session with the connector on board, or return the one that is there; and why it has no connector."""
    settings = {"spark.sql.streaming.numRecentProgressUpdates": "1000"}
    active, missing = SparkSession.getActiveSession(), ""
    if active is not None:
        return active, "the session was there before, without the connector's jars"
    try:
        settings["spark.jars"] = ",".join(map(str, jars(COORDINATES, cache_folder() / "spark-connector")))
    except (NoJar, OSError) as error:
        missing = str(error)
    return kes_spark.local_session("bench", cores=CORES, memory="1g", settings=settings), missing


def versions(missing: str) -> dict[str, Any]:
    """Return the circumstances of the figures, beside the machine."""
    connector = "not measured: " + missing if missing else sorted(COORDINATES)
    tasks = "in Python: " + ours if (ours := spark_jar.problem(version("pyspark"))) else "in Java"
    return {"pyspark": version("pyspark"), "pyarrow": version("pyarrow"), "cores": CORES, "connector": connector,
            "tasks of the sink": tasks}  # fmt: skip


class SparkBench:
    """Makes the jobs and times them."""

    def __init__(
        self, spark: SparkSession, cluster: Cluster, broker_pid: int | None, sizes: Namespace, *, connector: bool
    ) -> None:
        servers = cluster.bootstrap_servers
        self._spark, self._cluster, self._sizes, self._cpu_time = spark, cluster, sizes, CpuTime(broker_pid)
        self._numbers = itertools.count(1)
        self._grt = Grt(spark, servers)
        self.sides: list[Side] = [*([Connector(spark, servers)] if connector else []), self._grt]
        self._with_typed: list[Side] = [*self.sides, GrtTyped(spark, servers)]
        self._streaming = [*self._with_typed, *([GrtByConnector(spark, servers)] if connector else [])]

    def runs(self, say: Say) -> Iterator[SparkRun]:
        """Run everything, job by job. Raises ``Failed`` when the input cannot be made right."""
        with self._cpu_time:
            yield from self._runs(say)

    def _runs(self, say: Say) -> Iterator[SparkRun]:
        rows = self._sizes.rows
        for partitions in self._sizes.partitions:
            say(f"writing input, {partitions} partitions")
            short, long = self.input(rows, partitions), self.input(self._sizes.batch * BATCHES, partitions)
            jobs: tuple[tuple[str, list[Side], Callable[..., SparkRun], str], ...] = (
                ("read", self.sides, self._read, short),
                ("decode", self._with_typed, self._decode, short),
                ("write", self.sides, self.write, short),
                ("stream", self._streaming, self._stream, long),
                (DRIVER, [self._grt], self._drive, short),
                (COMMIT, [self._grt], self._commit, short),
            )
            for what, sides, job, source in jobs:
                for turn in range(self._sizes.rounds + 1):
                    for side in sides:
                        say(f"{what}, {partitions} partitions, {turn}/{self._sizes.rounds}: {side.name}")
                        yield job(side, turn, partitions, source)
            self._cluster.delete(short, long)
        say(f"writing input, {MANY} partitions")
        wide = self.input(WIDE_ROWS, MANY)
        for turn, side in itertools.product(range(self._sizes.rounds + 1), self._streaming):
            say(f"{WIDE}, {turn}/{self._sizes.rounds}: {side.name}")
            yield self._wide(side, turn, wide)
        self._cluster.delete(wide)

    def input(self, rows: int, partitions: int) -> str:
        """Write a topic. Raises ``Failed``."""
        topic = self._topic(partitions)
        self._grt.write(self._grt.encoded(typed_rows(self._spark, rows, partitions)), topic)
        if fault := self._fault(topic, partitions, rows, in_order=True):
            raise Failed(f"the input of the Spark measures is wrong: {fault}")
        return topic

    def _read(self, side: Side, turn: int, partitions: int, source: str) -> SparkRun:
        due = self._grt.encoded(typed_rows(self._spark, self._sizes.rows, 1))
        return self._computed("read", side, turn, partitions, side.read(source), due, _sums_of_bytes)

    def _decode(self, side: Side, turn: int, partitions: int, source: str) -> SparkRun:
        due = typed_rows(self._spark, self._sizes.rows, 1)
        return self._computed("decode", side, turn, partitions, side.decoded(source), due, _sums_of_columns)

    def _computed(
        self, what: str, side: Side, turn: int, partitions: int, frame: DataFrame, due: DataFrame,
        sums: Callable[[DataFrame], tuple[int, ...]],
    ) -> SparkRun:  # fmt: skip
        rows, fault = self._sizes.rows, "" if turn or sums(frame) == sums(due) else "other rows than were written"
        seconds, cpu, load = self._timed(partial(_compute, frame), rows)
        return SparkRun(what, side.name, partitions, turn, rows, rows / seconds, seconds, cpu, load, fault)

    def write(self, side: Side, turn: int, partitions: int, _: str = "") -> SparkRun:
        """Write rows to a topic, and judge it."""
        rows, target = self._sizes.rows, self._topic(partitions)
        records = side.encoded(typed_rows(self._spark, rows, partitions))
        seconds, cpu, load = self._timed(partial(side.write, records, target), rows)
        fault = self._fault(target, partitions, rows, in_order=False)
        self._cluster.delete(target)
        return SparkRun("write", side.name, partitions, turn, rows, rows / seconds, seconds, cpu, load, fault)

    def _drive(self, side: Side, turn: int, partitions: int, _: str) -> SparkRun:
        """Forward batches as a driver does, in this process."""
        rows, target = self._sizes.rows, self._topic(partitions)
        commit = self._committing(side, rows, partitions, target)
        began, before = time.perf_counter(), time.process_time()
        commit(0)
        cpu, seconds = time.process_time() - before, time.perf_counter() - began
        fault = self._fault(target, partitions, rows, in_order=False)
        self._cluster.delete(target)
        load = os.getloadavg()[0]
        return SparkRun(
            DRIVER, side.name, partitions, turn, rows, rows / seconds, seconds, cpu / rows * 1e6, load, fault
        )

    def _commit(self, side: Side, turn: int, partitions: int, _: str) -> SparkRun:
        """Commit small batches of one query, one after the other, as the kept process of a driver does."""
        target = self._topic(partitions)
        commit, took = self._committing(side, COMMIT_ROWS, partitions, target), list[float]()
        before = time.process_time()
        for batch in range(COMMITS):
            began = time.perf_counter()
            commit(batch)
            took.append(time.perf_counter() - began)
        cpu = (time.process_time() - before) / (COMMITS * COMMIT_ROWS) * 1e6
        written = sum(1 for _ in self._cluster.records(target, partitions))
        fault = "" if written == COMMITS * COMMIT_ROWS else f"{written} rows instead of {COMMITS * COMMIT_ROWS}"
        self._cluster.delete(target)
        middle, load = statistics.median(took), os.getloadavg()[0]
        return SparkRun(
            COMMIT, side.name, partitions, turn, COMMIT_ROWS, COMMIT_ROWS / middle, middle, cpu, load, fault
        )

    def _committing(self, side: Side, rows: int, partitions: int, target: str) -> Callable[[int], None]:
        """Encode rows once, and return what commits them as the batch of a number."""
        kafka = {"bootstrap.servers": self._cluster.bootstrap_servers}
        to = WriteTarget(identity=target, marker_topic=target, kafka=kafka)
        encoder = BatchEncoder(target, kafka, target, topic_shapes(kafka))
        made = list(encoder.encode(side.encoded(typed_rows(self._spark, rows, partitions)).toArrow().to_batches()))

        def commit(batch: int) -> None:
            request = BatchRequest(sink=target, identity=target, query=target, batch=batch, rows=rows)
            write_once(to, request, lambda: made, size=0)

        return commit

    def _stream(self, side: Side, turn: int, partitions: int, source: str) -> SparkRun:
        rows = self._sizes.batch * BATCHES
        # Offsets are counted out, and the end of a transaction takes one too: a little more, or a sixth batch is due.
        most = self._sizes.batch + self._sizes.batch // 100 + partitions
        done, cpu, load, fault = self._copied(side, source, partitions, rows, most, BATCHES)
        took = [each["durationMs"]["triggerExecution"] / 1000 for each in done] or [0.0]
        rates = [each["numInputRows"] / seconds for each, seconds in zip(done[1:], took[1:], strict=True)]
        rate = statistics.median(rates or [0.0])
        return SparkRun("stream", side.name, partitions, turn, rows, rate, took[0], cpu, load, fault)

    def _wide(self, side: Side, turn: int, source: str) -> SparkRun:
        """Copy a topic of many partitions with few rows in one micro-batch: what each partition costs."""
        done, cpu, load, fault = self._copied(side, source, MANY, WIDE_ROWS, 100 * WIDE_ROWS, 1)
        seconds = sum(each["durationMs"]["triggerExecution"] for each in done) / 1000
        rate = WIDE_ROWS / seconds if seconds else 0.0
        return SparkRun(WIDE, side.name, MANY, turn, WIDE_ROWS, rate, seconds, cpu, load, fault)

    def _copied(
        self, side: Side, source: str, partitions: int, rows: int, most: int, batches: int
    ) -> tuple[list[Any], float, float, str]:
        """Stream a topic into a new one and judge it: the batches with rows, CPU time a row, load, fault."""
        target, done = self._topic(partitions), list[Any]()

        def copy() -> None:
            with tempfile.TemporaryDirectory() as checkpoint:
                query = side.copy(source, target, checkpoint, most, availableNow=True)
                query.awaitTermination()
                done.extend(each for each in query.recentProgress if each["numInputRows"])

        _, cpu, load = self._timed(copy, rows)
        fault = self._fault(target, partitions, rows, in_order=True)
        if len(done) != batches:
            fault = fault or f"{len(done)} batches instead of {batches}"
        self._cluster.delete(target)
        return done, cpu, load, fault

    def _timed(self, job: Callable[[], None], rows: int) -> tuple[float, float, float]:
        """Run a job: seconds, microseconds of CPU time a row, and the load at the end."""
        before, began = self._cpu_time.seconds(), time.perf_counter()
        job()
        seconds = time.perf_counter() - began
        return seconds, (self._cpu_time.seconds() - before) / rows * 1e6, os.getloadavg()[0]

    def _fault(self, topic: str, partitions: int, rows: int, *, in_order: bool) -> str:
        due = _sums_of_bytes(self._grt.encoded(typed_rows(self._spark, rows, 1)))
        return judged(self._cluster.records(topic, partitions), due, in_order=in_order)

    def _topic(self, partitions: int) -> str:
        return self._cluster.source(f"spark-{next(self._numbers)}-{os.getpid()}", partitions)


def judged(messages: Iterable[Message], due: tuple[int, ...], *, in_order: bool) -> str:
    """Compare records with the rows that are due (their number, and the sums of the CRC-32 of their keys and values),
    and return the fault. ``in_order``: the numbers of each key's rows must rise."""
    rows = keys = values = wrong_headers = out_of_order = 0
    last: dict[bytes, int] = {}
    for message in messages:
        key, value = bytes(message.key() or b""), bytes(message.value() or b"")
        rows += 1
        keys += zlib.crc32(key)
        values += zlib.crc32(value)
        wrong_headers += message.headers() != HEADERS
        if in_order:
            number = int(value[value.index(b":") + 1 : value.index(b",")])
            out_of_order += number <= last.get(key, -1)
            last[key] = number
    if rows != due[0]:
        return f"{rows} rows instead of {due[0]}"
    if (keys, values) != due[1:]:
        return "other keys or values than were written"
    if wrong_headers:
        return f"{wrong_headers} rows with wrong headers"
    return f"{out_of_order} rows out of their key's order" if out_of_order else ""


def _compute(records: DataFrame) -> None:
    """Compute every column of every row, and keep nothing."""
    records.write.format("noop").mode("overwrite").save()


def _sums_of_bytes(records: DataFrame) -> tuple[int, ...]:
    found = records.agg(f.count("*"), f.sum(f.crc32("key")), f.sum(f.crc32("value"))).collect()[0]
    return tuple(int(figure or 0) for figure in found)


def _sums_of_columns(typed: DataFrame) -> tuple[int, ...]:
    found = typed.agg(f.count("id"), f.sum("id"), f.sum("cents"), f.sum(f.crc32("account")), f.sum(f.length("note")))
    return tuple(int(figure or 0) for figure in found.collect()[0])
