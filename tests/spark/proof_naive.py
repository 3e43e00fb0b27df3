"""The sink that one would write first, and that is wrong: the rows of each task in a transaction of its own, committed
at the end of ``write``. The control of the proof: an oracle that does not catch it is worth nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from confluent_kafka import Producer
from pyspark import TaskContext
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from tests.spark.proof_points import Plan


class _Nothing(WriterCommitMessage):
    pass


class NaiveWriter(DataSourceStreamArrowWriter):
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
        return _Nothing()

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
