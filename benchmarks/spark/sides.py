"""The two sides: the same reads, writes and streams, once with ``format("grt")`` and once with Spark's own connector.

An event is a ``Deposited`` of about 100 bytes of JSON with its account as key and its type as header. Both sides read
committed records only and take the headers along, because the type of an event is one. Both compress with lz4 and wait
20 ms for a batch of the producer. Everything else is left as either side sets it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

import streams.spark as kes_spark
from benchmarks.spark.measure import BY_CONNECTOR
from streams import event_type
from streams.spark.reading.records import Reader

TYPE: Final = "Deposited"
FIELDS: Final = "id bigint, account string, cents bigint, note string"
ACCOUNTS: Final = 2_000


@event_type(TYPE)
class Deposited(msgspec.Struct, frozen=True):
    """The event. ``id`` is the row's number and comes first in the JSON."""

    id: int
    account: str
    cents: int
    note: str


def typed_rows(spark: SparkSession, rows: int, tasks: int) -> DataFrame:
    """Make the columns of a ``Deposited`` in ``tasks`` tasks; an account is the number modulo ``ACCOUNTS``."""
    number = f.col("id")
    return spark.range(0, rows, 1, tasks).select(
        "id",
        f.concat(f.lit("account-"), f.lpad((number % ACCOUNTS).cast("string"), 5, "0")).alias("account"),
        (number % 977).alias("cents"),
        f.lit("salary of the month, paid in").alias("note"),
    )


class Grt:
    """``format("grt")``."""

    name = "grt"
    carried: tuple[str, ...] = ("key", "value", "headers")
    """Columns that a stream takes from topic to topic."""
    stream_reader: Reader = "grt"

    def __init__(self, spark: SparkSession, servers: str) -> None:
        self._spark, self._servers = spark, {"kafka.bootstrap.servers": servers}

    def read(self, topic: str) -> DataFrame:
        """Read the whole topic."""
        return self._spark.read.format("grt").options(**self._servers).option("subscribe", topic).load()

    def encoded(self, typed: DataFrame) -> DataFrame:
        """Encode events as this side writes them."""
        return kes_spark.encode(typed, Deposited, key="account")

    def decoded(self, topic: str) -> DataFrame:
        """Read the whole topic as typed columns."""
        return kes_spark.events(self.read(topic), Deposited)

    def write(self, records: DataFrame, topic: str) -> None:
        writer = records.write.format("grt").options(**self._servers, topic=topic, writeId=uuid.uuid4().hex)
        writer.mode("append").save()

    def copy(self, source: str, target: str, checkpoint: str, batch: int, **trigger: Any) -> StreamingQuery:
        """Stream a topic from its begin into another one, in batches of so many rows at most."""
        writer = self._rows(source, batch).select(*self.carried).writeStream.format("grt").options(**self._servers)
        writer = writer.options(topic=target, sink=target, checkpointLocation=checkpoint)
        return writer.trigger(**trigger).start()

    def _rows(self, source: str, batch: int) -> DataFrame:
        limits = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(batch)}
        limits["includeHeaders"] = str("headers" in self.carried).lower()
        return kes_spark.records(
            self._spark, source, stream=True, options=self._servers | limits, reader=self.stream_reader
        )


class GrtByConnector(Grt):
    """A stream that is read by Spark's connector and written by ours: what a session with the connector's jar gets."""

    name = BY_CONNECTOR
    stream_reader: Reader = "connector"


class GrtTyped(Grt):
    """The same records, whose type and version are columns of their own and not taken out of headers; decoded by the
    class's own codec in the reading tasks."""

    name = "grt, typed"
    carried = ("key", "value", "type", "version")

    def decoded(self, topic: str) -> DataFrame:
        return kes_spark.read_events(self._spark, Deposited, topic=topic, options=self._servers, decode="python")


class Connector:
    """``format("kafka")``."""

    name = "connector"

    def __init__(self, spark: SparkSession, servers: str) -> None:
        self._spark = spark
        self._options = {"kafka.bootstrap.servers": servers, "includeHeaders": "true"}
        self._reading = self._options | {"kafka.isolation.level": "read_committed"}

    def read(self, topic: str) -> DataFrame:
        return self._spark.read.format("kafka").options(**self._reading).option("subscribe", topic).load()

    def encoded(self, typed: DataFrame) -> DataFrame:
        header = f.struct(f.lit("__grt__").alias("key"), f.lit(TYPE).cast("binary").alias("value"))
        return typed.select(
            f.col("account").cast("binary").alias("key"),
            f.to_json(f.struct("id", "account", "cents", "note")).cast("binary").alias("value"),
            f.array(header).alias("headers"),
        )

    def decoded(self, topic: str) -> DataFrame:
        kind = f.expr("cast(filter(headers, h -> h.key = '__grt__')[0].value as string)")
        records = self.read(topic).where(kind == TYPE)
        parsed = records.withColumn("event", f.from_json(f.col("value").cast("string"), FIELDS))
        return parsed.select("event.*", "topic", "partition", "offset", "timestamp", "key")

    def write(self, records: DataFrame, topic: str) -> None:
        records.write.format("kafka").options(**self._writing()).option("topic", topic).save()

    def copy(self, source: str, target: str, checkpoint: str, batch: int, **trigger: Any) -> StreamingQuery:
        reader = self._spark.readStream.format("kafka").options(**self._reading, subscribe=source)
        rows = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=str(batch)).load()
        writer = rows.select("key", "value", "headers").writeStream.format("kafka").options(**self._writing())
        writer = writer.options(topic=target, checkpointLocation=checkpoint)
        return writer.trigger(**trigger).start()

    def _writing(self) -> dict[str, str]:
        # A producer of its own for each job: the connector keeps producers by their settings, and one that had written
        # to topics that are deleted by now was stuck (OutOfOrderSequenceException at the broker, batch after batch).
        own = {"kafka.client.id": uuid.uuid4().hex}
        return self._options | {"kafka.compression.type": "lz4", "kafka.linger.ms": "20"} | own


Side = Grt | Connector


class Bare(DataSource):
    """A Python source and sink that do nothing: what Spark itself takes for any data source in Python. Two tasks read
    ``rowsPerSecond`` numbers, and drop them."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> str:
        return "value bigint"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return BareReader(int(self.options["rowsPerSecond"]))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        return BareWriter()


class BareReader(DataSourceStreamReader):
    def __init__(self, rate: int) -> None:
        self._rate, self._began = rate, time.time()

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"row": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        return {"row": int((time.time() - self._began) * self._rate)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        middle = (start["row"] + end["row"]) // 2
        return [InputPartition((start["row"], middle)), InputPartition((middle, end["row"]))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": pa.array(range(*partition.value), pa.int64())})


class BareWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()
