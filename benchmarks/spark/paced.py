"""Queries under a steady load, or none: how long a small micro-batch takes, how late the rows are, what waiting costs.

A row's latency is from the clock right before it is handed to a producer to a read_committed reader of the target, in
this process. What a query adds is compared with Spark's own floors: its rate source into its sink for nothing, and a
source and a sink in Python that do nothing.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.cluster import Cluster
from benchmarks.spark.measure import BACK_TO_BACK, BARE, EVERY, FLOOR, IDLE, NOTHING, PacedRun
from benchmarks.spark.run import HEADERS, CpuTime, Say
from benchmarks.spark.sides import Bare, Connector, Grt, GrtByConnector, Side
from benchmarks.systems import Failed

TRIGGERS = {BACK_TO_BACK: "0 seconds", EVERY: "500 milliseconds", IDLE: "500 milliseconds"}
PARTITIONS, KEYS, MOST = 2, 50, 1_000_000
PRIMED = 5
"""Rows that are sent one after the other before the load, each when the one before has arrived."""
TIMEOUT_SECONDS = 120.0
TICK_SECONDS = 0.01


class PacedBench:
    """Runs the queries, one after the other."""

    def __init__(
        self, spark: SparkSession, cluster: Cluster, broker_pid: int | None, sizes: Namespace, *, connector: bool
    ) -> None:
        servers = cluster.bootstrap_servers
        self._spark, self._cluster, self._sizes, self._cpu_time = spark, cluster, sizes, CpuTime(broker_pid)
        beside: list[Side] = [Connector(spark, servers), GrtByConnector(spark, servers)] if connector else []
        self._sides = [*beside, Grt(spark, servers)]
        self._numbers = itertools.count(1)
        spark.dataSource.register(Bare)

    def runs(self, say: Say) -> Iterator[PacedRun]:
        """Run everything, in turn."""
        with self._cpu_time:
            yield from self._runs(say)

    def _runs(self, say: Say) -> Iterator[PacedRun]:
        for turn in range(1, self._sizes.rounds + 1):
            for floor, source, sink in ((FLOOR, "rate", "noop"), (BARE, "bare", "bare")):
                say(f"{turn}/{self._sizes.rounds}: {BACK_TO_BACK}, {floor}")
                yield self._floor(turn, floor, source, sink)
            say(f"{turn}/{self._sizes.rounds}: {IDLE}, {NOTHING}")
            yield self._run(IDLE, NOTHING, turn, lambda: time.sleep(self._sizes.seconds))
            for side, what in itertools.product(self._sides, TRIGGERS):
                say(f"{turn}/{self._sizes.rounds}: {what}, {side.name}")
                yield self._query(side, what, turn)

    def _run(self, what: str, system: str, turn: int, job: Callable[[], None]) -> PacedRun:
        """Run a job: its processor time, as a share of a core."""
        before, began = self._cpu_time.seconds(), time.monotonic()
        job()
        share = (self._cpu_time.seconds() - before) / (time.monotonic() - began)
        return PacedRun(what, system, turn, cpu_share=share, load_average=os.getloadavg()[0])

    def _floor(self, turn: int, system: str, source: str, sink: str) -> PacedRun:
        with tempfile.TemporaryDirectory() as checkpoint:
            rows = self._spark.readStream.format(source).options(rowsPerSecond=self._sizes.rate).load()
            writer = rows.writeStream.format(sink).option("checkpointLocation", checkpoint)
            with _ended(writer.trigger(processingTime=TRIGGERS[BACK_TO_BACK]).start()) as query:
                _wait(lambda: len(_batch_ms(query)) >= PRIMED, query)
                done = len(_batch_ms(query))
                found = self._run(BACK_TO_BACK, system, turn, lambda: time.sleep(self._sizes.seconds))
                return found.of(_batch_ms(query)[done:])

    def _query(self, side: Side, what: str, turn: int) -> PacedRun:
        name = f"paced-{next(self._numbers)}-{os.getpid()}"
        source, target = (self._cluster.source(f"{name}-{end}", PARTITIONS) for end in ("in", "out"))
        servers = self._cluster.bootstrap_servers
        with tempfile.TemporaryDirectory() as checkpoint, Watching(servers, target) as watching:
            sending = Sending(servers, source)
            with _ended(side.copy(source, target, checkpoint, MOST, processingTime=TRIGGERS[what])) as query:
                for _ in range(PRIMED):
                    sending.send(1)
                    _wait(lambda: len(watching.seen) >= len(sending.at), query)
                done, rate, seconds = len(_batch_ms(query)), self._sizes.rate, self._sizes.seconds
                if what == IDLE:
                    found = self._run(what, side.name, turn, lambda: time.sleep(seconds))
                else:
                    found = self._run(what, side.name, turn, lambda: sending.pace(rate, seconds))
                    _wait(lambda: len(watching.seen) >= len(sending.at), query)
                batches = [] if what == IDLE else _batch_ms(query)[done:]
            late = [(at - sending.at[number]) / 1e6 for number, at in watching.seen[PRIMED:]]
        self._cluster.delete(source, target)
        return found.of(batches, late, watching.fault(len(sending.at)))


class Sending:
    """Sends numbered rows, and keeps the time of each, in nanoseconds since the epoch. For one thread."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self.at: list[int] = []
        self._topic = topic
        self._producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 1, "log_level": 2})

    def send(self, count: int) -> None:
        """Send so many rows."""
        for _ in range(count):
            number = len(self.at)
            self.at.append(time.time_ns())
            self._producer.produce(self._topic, str(number), f"k{number % KEYS}", headers=HEADERS)
        self._producer.poll(0)

    def pace(self, rate: int, seconds: float) -> None:
        """Send so many rows a second. Raises ``Failed`` when the broker does not take them."""
        began = time.monotonic()
        sent = 0
        while (passed := time.monotonic() - began) < seconds:
            due = int(passed * rate)
            self.send(due - sent)
            sent = due
            time.sleep(TICK_SECONDS)
        if self._producer.flush(TIMEOUT_SECONDS):
            raise Failed(f"{self._topic} could not be written")


class Watching:
    """Reads the committed rows of a topic on a thread of its own: ``seen`` has their numbers and times."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self.seen: list[tuple[int, int]] = []
        self._out_of_order = 0
        self._over = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": "reader",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 5,
            }
        )
        self._consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
        self._thread = threading.Thread(target=self._read, name="watching")

    def __enter__(self) -> Watching:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._consumer.close()

    def fault(self, sent: int) -> str:
        """Judge what came; empty if it was right: each row once, those of a key in order."""
        numbers = sorted(number for number, _ in self.seen)
        if numbers != list(range(sent)):
            return f"{len(numbers)} rows with {len(set(numbers))} numbers instead of {sent}"
        return f"{self._out_of_order} rows out of their key's order" if self._out_of_order else ""

    def _read(self) -> None:
        last: dict[bytes, int] = {}
        while not self._over.is_set():
            message = self._consumer.poll(0.1)
            if message is not None and message.error() is None:
                number, key = int(message.value() or b""), bytes(message.key() or b"")
                self.seen.append((number, time.time_ns()))
                self._out_of_order += number <= last.get(key, -1)
                last[key] = number


def _batch_ms(query: StreamingQuery) -> list[float]:
    """List how long each batch with rows took."""
    return [float(each["durationMs"]["triggerExecution"]) for each in query.recentProgress if each["numInputRows"]]


def _wait(until: Callable[[], bool], query: StreamingQuery) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not until():
        if not query.isActive:
            raise Failed(f"the query ended: {query.exception()}")
        if time.monotonic() > deadline:
            raise Failed(f"nothing came for {TIMEOUT_SECONDS:g} s")
        time.sleep(0.05)


@contextmanager
def _ended(query: StreamingQuery) -> Iterator[StreamingQuery]:
    try:
        yield query
    finally:
        query.stop()
