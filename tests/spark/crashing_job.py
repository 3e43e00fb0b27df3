"""A Spark job that dies by SIGKILL, driver and Java and all, at a chosen point of its commit.

``python crashing_job.py POINT SERVERS TOPIC``. ``before``: every row and the marker are sent, the transaction is
open. ``after``: it is committed, and Spark does not know. ``never``: a good run. The point is reached inside of the
product's own commit; nothing of that is replaced.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import msgspec
from confluent_kafka import Producer

import streams.spark as kes_spark
from streams.spark import lane, source
from streams.spark.sink import BatchWriter


class Row(msgspec.Struct):
    id: int
    who: str


def die() -> None:
    os.killpg(int(os.environ["KES_TEST_DRIVER"]), signal.SIGKILL)  # the driver and its Java
    os.kill(os.getpid(), signal.SIGKILL)


class DyingProducer(Producer):
    def commit_transaction(self, *args: Any) -> None:
        if os.environ["KES_TEST_POINT"] == "before":
            self.flush(30)
            die()
        super().commit_transaction(*args)
        if os.environ["KES_TEST_POINT"] == "after":
            die()


class DyingWriter(BatchWriter):
    def commit(self, messages: Any) -> None:
        lane.Producer = DyingProducer  # type: ignore[misc]
        super().commit(messages)


class DyingSource(source.LocalGrtDataSource):
    def writer(self, schema: Any, overwrite: bool) -> Any:
        writer = super().writer(schema, overwrite)
        writer.__class__ = DyingWriter
        return writer


def main(point: str, servers: str, topic: str) -> None:
    # Spark's processes get their environment from Java, which gets it from here when it starts.
    os.environ.update(KES_TEST_POINT=point, KES_TEST_DRIVER=str(os.getpid()))
    spark = kes_spark.local_session("crashing")
    spark.dataSource.register(DyingSource)
    rows = spark.range(0, 20_000, numPartitions=3).selectExpr("id", "cast(id % 50 as string) who")
    result = kes_spark.write(kes_spark.encode(rows, Row, key="who"), topic=topic, write_id="crash", servers=servers)
    print("WRITTEN" if result.written else "SKIPPED", result.rows)


if __name__ == "__main__":
    # Not the classes of __main__: Spark would pickle those by value.
    import crashing_job

    crashing_job.main(*sys.argv[1:])
