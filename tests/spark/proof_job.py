"""A Spark job under test, as a process of its own: Kafka to Kafka through ``format("grt")``, exactly once.

``python -m tests.spark.proof_job JSON``, with a ``JobSpec``. It must be the leader of a session, so that all of its
processes can be found. It ends with exit code 0 when everything that was in the source when it began is written.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import Producer
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.streaming.query import StreamingQuery

import streams.spark as kes_spark
from tests.spark.proof_points import FOLDER, JOB, STRIKES, ClusterProofSource, Plan, ProofSource
from tests.spark.proof_stateful import OPERATORS

ROWS_BEFORE_FAULT = 200


class JobSpec(msgspec.Struct, kw_only=True):
    """What a job does. ``write``: ``stream``, ``naive`` (the control) or ``batch`` (one write with a ``writeId``).
    ``operator``: one with state, of ``proof_stateful.OPERATORS``.

    ``task_faults``: what becomes of one task's first attempt, half way through its rows, in every second batch, one
    after the other: ``raise``, ``exit``, ``slow``, ``kill-executor``. ``restarts``: how often a query that fails is
    started again in the same process. ``stop_at``: when a file of this name is in the
    folder, the query is stopped by ``query.stop()``, and started again in the same process.
    """

    servers: str
    source: str
    target: str
    sink: str
    checkpoint: str
    rows_per_batch: int = 10_000
    write: str = "stream"
    operator: str = ""
    task_faults: tuple[str, ...] = ()
    restarts: int = 0
    stop_at: str = ""
    slow_seconds: float = 12.0
    settings: dict[str, str] = {}
    write_options: dict[str, str] = {}


def session(spec: JobSpec) -> SparkSession:
    strikes = {f"spark.executorEnv.{name}": os.environ[name] for name in (STRIKES, FOLDER, JOB)}
    settings = {"spark.master": "local[2,4]", "spark.sql.shuffle.partitions": "2", **strikes, **spec.settings}
    if spec.task_faults:  # a part of a task's rows must have come through when it fails
        settings["spark.sql.execution.arrow.maxRecordsPerBatch"] = str(ROWS_BEFORE_FAULT)
    spark = kes_spark.local_session("proof", settings=settings, memory="768m")
    spark.dataSource.register(ProofSource if settings["spark.master"].startswith("local") else ClusterProofSource)
    spark.dataSource.register(NaiveSource)
    return spark


def copied(rows: DataFrame, spec: JobSpec) -> DataFrame:
    """What is written: the same records under another type, through a task that may fail."""
    if spec.task_faults:
        rows = rows.mapInArrow(faulty(spec.task_faults, spec.slow_seconds, os.environ[FOLDER]), rows.schema)
    return OPERATORS[spec.operator](rows).select("key", "value", f.lit("Copied").alias("type"))


def start(spark: SparkSession, spec: JobSpec) -> StreamingQuery:
    """The query, on its way. It ends by itself, at the end that the source has now."""
    reader = spark.readStream.format("grt").option("kafka.bootstrap.servers", spec.servers)
    reader = reader.option("subscribe", spec.source).option("startingOffsets", "earliest")
    reader = reader.option("maxOffsetsPerTrigger", str(spec.rows_per_batch))
    writer = copied(reader.load(), spec).writeStream.format("naive" if spec.write == "naive" else "grt")
    writer = writer.option("kafka.bootstrap.servers", spec.servers).option("topic", spec.target)
    writer = writer.option("sink", spec.sink).option("checkpointLocation", spec.checkpoint)
    return writer.options(**spec.write_options).trigger(availableNow=True).start()


def write_batch(spark: SparkSession, spec: JobSpec) -> None:
    reader = spark.read.format("grt").option("kafka.bootstrap.servers", spec.servers).option("subscribe", spec.source)
    rows = copied(reader.load(), spec)
    kes_spark.write(rows, topic=spec.target, write_id=spec.sink, servers=spec.servers, options=spec.write_options)


def faulty(kinds: tuple[str, ...], seconds: float, folder: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def run(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        batch = int(context.getLocalProperty("streaming.sql.batchId") or 1)
        struck = context.attemptNumber() > 0 or batch % 2 == 0 or context.partitionId() != 1
        kind, rows = kinds[batch // 2 % len(kinds)], 0
        if context.attemptNumber() > 0 and batch % 2:
            (Path(folder) / f"again-{kind}-{batch}-{context.taskAttemptId()}").touch()
        for each in batches:
            yield each
            rows += each.num_rows
            if not struck and rows > ROWS_BEFORE_FAULT:
                struck = True
                strike(kind, seconds, Path(folder) / f"task-{kind}-{batch}-{context.taskAttemptId()}")

    return run


def strike(kind: str, seconds: float, mark: Path) -> None:
    if kind == "kill-executor" and list(mark.parent.glob(f"{mark.name.rpartition('-')[0]}-*")):
        return  # attempts are not counted where the executor was lost
    mark.touch()
    if kind == "raise":
        raise RuntimeError("a fault of the proof in a task")
    if kind == "exit":
        os._exit(9)
    if kind == "kill-executor":
        kill_executor()
    deadline = time.monotonic() + seconds
    while kind == "slow" and time.monotonic() < deadline:
        time.sleep(0.05)


def kill_executor() -> None:
    """SIGKILL to the Java process above this Python worker, which must be an executor."""
    import psutil

    for parent in psutil.Process().parents():
        if any("CoarseGrainedExecutorBackend" in part for part in parent.cmdline()):
            parent.kill()
            return
    raise AssertionError("this task runs in no executor of its own")


def ended_well(query: StreamingQuery) -> bool:
    try:
        query.awaitTermination()
    except StreamingQueryException:
        return False
    return True


def stop_when(query: StreamingQuery, mark: Path) -> None:
    """Stop it half way; whoever is held at the point goes on while it is being stopped, or when it has been."""
    while not mark.exists() and query.isActive:
        time.sleep(0.02)
    assert mark.exists(), query.exception()
    releasing = threading.Timer(1.0, (mark.parent / "go").touch)
    releasing.start()
    query.stop()
    print("STOPPED", flush=True)
    releasing.join()


def main(spec: JobSpec) -> None:
    assert os.getsid(0) == os.getpid()
    os.environ[JOB] = str(os.getpid())
    spark = session(spec)
    if spec.write == "batch":
        write_batch(spark, spec)
        print("DONE", flush=True)
        return
    query = start(spark, spec)
    print("QUERY", query.id, flush=True)
    if spec.stop_at:
        stop_when(query, Path(os.environ[FOLDER]) / spec.stop_at)
        query = start(spark, spec)
    for _ in range(spec.restarts):
        if ended_well(query):
            break
        print("FAILED", flush=True)
        query = start(spark, spec)
    query.awaitTermination()
    print("DONE", sum(progress["numInputRows"] for progress in query.recentProgress), flush=True)


class NaiveWriter(DataSourceStreamArrowWriter):
    """The sink that one would write first, and that is wrong: the rows of each task in a transaction of its own,
    committed at the end of ``write``. The control of the proof: an oracle that does not catch it is worth nothing."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        batch, task = context.getLocalProperty("streaming.sql.batchId"), context.partitionId()
        producer = Producer(
            {
                "bootstrap.servers": self._options["kafka.bootstrap.servers"],
                "transactional.id": f"naive-{self._options['sink']}-{task}",
                "partitioner": "murmur2_random",
                "log_level": 0,
            }
        )
        producer.init_transactions(60)
        producer.begin_transaction()
        for rows in iterator:
            for row in rows.select(["key", "value", "type"]).to_pylist():
                headers = [("__grt__", row["type"].encode())]
                producer.produce(self._options["topic"], row["value"], row["key"], headers=headers)
            producer.poll(0)
        producer.commit_transaction(60)
        Plan().hit("commit.after", int(batch))
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        Plan().hit("returned", batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass


class NaiveSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "naive"

    def streamWriter(self, schema: t.StructType, overwrite: bool) -> NaiveWriter:  # noqa: N802
        return NaiveWriter({name: self.options[name] for name in ("kafka.bootstrap.servers", "sink", "topic")})


if __name__ == "__main__":
    # By its name, not as __main__: Spark would send functions and classes of __main__ by value.
    from tests.spark import proof_job

    proof_job.main(msgspec.json.decode(sys.argv[1], type=proof_job.JobSpec))
