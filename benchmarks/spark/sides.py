"""The two sides: the same reads, writes and streams, once with ``format("grt")`` and once with Spark's own connector.

Both read committed records only and take the headers along, because the type of an event is one. Both compress with
lz4 and wait 20 ms for a batch of the producer. Everything else is left as either side sets it.
"""

from __future__ import annotations

import uuid
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

import streams.spark as kes_spark
from benchmarks.spark.judge import TYPE
from benchmarks.spark.workload import Deposited, for_connector, for_grt

FIELDS = "id bigint, account string, cents bigint, note string"


class Side(Protocol):
    """One way to Kafka."""

    name: str
    promise: str
    """What its writes promise."""

    def read(self, topic: str) -> DataFrame:
        """The whole topic."""

    def known(self, records: DataFrame) -> DataFrame:
        """The rows of ``read`` whose type is the right one."""

    def encoded(self, typed: DataFrame) -> DataFrame:
        """Events as this side writes them."""

    def decoded(self, records: DataFrame) -> DataFrame:
        """Records of ``read`` as typed columns."""

    def write(self, records: DataFrame, topic: str) -> None:
        """Write ``encoded`` rows."""

    def copy(self, source: str, target: str, batch: int, checkpoint: str) -> StreamingQuery:
        """A stream from the begin of a topic into another one, in batches of so many rows, until what is there now."""


class Grt:
    """``format("grt")``."""

    name, promise = "grt", "exactly once"
    carried = ("key", "value", "headers")
    """Columns that a stream takes from topic to topic."""

    def __init__(self, spark: SparkSession, servers: str) -> None:
        self._spark, self._servers = spark, {"kafka.bootstrap.servers": servers}

    def read(self, topic: str) -> DataFrame:
        return self._spark.read.format("grt").options(**self._servers).option("subscribe", topic).load()

    def known(self, records: DataFrame) -> DataFrame:
        return records.where(f.col("type") == TYPE)

    def encoded(self, typed: DataFrame) -> DataFrame:
        return for_grt(typed)

    def decoded(self, records: DataFrame) -> DataFrame:
        return kes_spark.events(records, Deposited)

    def write(self, records: DataFrame, topic: str) -> None:
        writer = records.write.format("grt").options(**self._servers, topic=topic, writeId=uuid.uuid4().hex)
        writer.mode("append").save()

    def copy(self, source: str, target: str, batch: int, checkpoint: str) -> StreamingQuery:
        reader = self._spark.readStream.format("grt").options(**self._servers, subscribe=source)
        with_headers = str("headers" in self.carried).lower()
        reader = reader.options(
            startingOffsets="earliest", maxOffsetsPerTrigger=str(batch), includeHeaders=with_headers
        )
        writer = reader.load().select(*self.carried).writeStream.format("grt").options(**self._servers)
        writer = writer.options(topic=target, sink=target, checkpointLocation=checkpoint)
        return writer.trigger(availableNow=True).start()


class GrtTyped(Grt):
    """The same records, whose type and version are columns of their own and not taken out of headers."""

    name = "grt, typed"
    carried = ("key", "value", "type", "version")

    def decoded_by_codec(self, topic: str) -> DataFrame:
        """A topic as typed columns, by the class's own codec in the reading tasks."""
        return kes_spark.read_events(self._spark, Deposited, topic=topic, options=self._servers, decode="python")


class Connector:
    """``format("kafka")``."""

    name, promise = "connector", "at least once"

    def __init__(self, spark: SparkSession, servers: str, *, headers: bool = True) -> None:
        self._spark = spark
        self._options = {"kafka.bootstrap.servers": servers, "includeHeaders": str(headers).lower()}
        self._reading = self._options | {"kafka.isolation.level": "read_committed"}

    def read(self, topic: str) -> DataFrame:
        return self._spark.read.format("kafka").options(**self._reading).option("subscribe", topic).load()

    def known(self, records: DataFrame) -> DataFrame:
        return records.where(f.expr("cast(filter(headers, h -> h.key = '__grt__')[0].value as string)") == TYPE)

    def encoded(self, typed: DataFrame) -> DataFrame:
        return for_connector(typed)

    def decoded(self, records: DataFrame) -> DataFrame:
        parsed = self.known(records).withColumn("event", f.from_json(f.col("value").cast("string"), FIELDS))
        return parsed.select("event.*", "topic", "partition", "offset", "timestamp", "key")

    def write(self, records: DataFrame, topic: str) -> None:
        records.write.format("kafka").options(**self._writing()).option("topic", topic).save()

    def copy(self, source: str, target: str, batch: int, checkpoint: str) -> StreamingQuery:
        reader = self._spark.readStream.format("kafka").options(**self._reading, subscribe=source)
        rows = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=str(batch)).load()
        writer = rows.select("key", "value", "headers").writeStream.format("kafka").options(**self._writing())
        writer = writer.options(topic=target, checkpointLocation=checkpoint)
        return writer.trigger(availableNow=True).start()

    def _writing(self) -> dict[str, str]:
        # A producer of its own for each job: the connector keeps producers by their settings, and one that had written
        # to topics that are deleted by now was stuck (OutOfOrderSequenceException at the broker, batch after batch).
        own = {"kafka.client.id": uuid.uuid4().hex}
        return self._options | {"kafka.compression.type": "lz4", "kafka.linger.ms": "20"} | own


def all_of(records: DataFrame) -> None:
    """Compute every column of every row, and keep nothing."""
    records.write.format("noop").mode("overwrite").save()
