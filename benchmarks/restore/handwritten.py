"""The reference: a consumer of confluent-kafka that reads every partition to its end and fills dictionaries."""

from __future__ import annotations

import sys
import time

import msgspec
from confluent_kafka import Consumer, TopicPartition

from benchmarks.child import job_of
from benchmarks.restore.workload import Job, Restored, digest


def restore(job: Job) -> Restored:
    """Read it all, ``read_committed``, from the start to the ends as they are."""
    began = time.monotonic()
    consumer = Consumer(
        {
            "bootstrap.servers": job.bootstrap_servers,
            "group.id": job.group,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            # As many records wait as fit into the process, and a fetcher that was held up goes on at once: with the
            # defaults (1 s) eight partitions take twice as long as one.
            "queued.min.messages": 1_000_000,
            "queued.max.messages.kbytes": 1_000_000,
            "fetch.queue.backoff.ms": 5,
            "fetch.wait.max.ms": 20,
        }
    )
    consumer.assign([TopicPartition(job.changelog, partition, 0) for partition in range(job.partitions)])
    tables: list[dict[bytes, bytes]] = [{} for _ in range(job.partitions)]
    ended = records = 0
    while ended < job.partitions:
        for message in consumer.consume(1_000, 0.1):
            if message.error() is not None:
                ended += 1
                continue
            key, value = message.key(), message.value()
            if key is not None and key[0] < 0xFF and value is not None:
                tables[message.partition()][key] = value  # type: ignore[index]  # a record has a partition
                records += 1
    seconds = time.monotonic() - began
    consumer.close()
    return Restored(seconds, seconds, records, *digest(item for table in tables for item in table.items()))


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(restore(job_of(Job))))
