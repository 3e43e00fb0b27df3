"""A cold take-over by ``EventSource``: starts, takes every partition over, says how long it took, and stops."""

from __future__ import annotations

import sys
import time

import msgspec

from benchmarks.child import job_of
from benchmarks.restore.workload import Job, Restored, digest
from streams import EventSource, EventSourceConfig, Table
from streams.metrics import Measurement, MembershipChanged, TakeOverDone
from streams.records import TopicPartition


def restore(job: Job) -> Restored:
    """Run it."""
    began = time.monotonic()
    planned: list[float] = []
    done: list[TakeOverDone] = []
    ends: list[float] = []
    tables: list[Table[bytes, bytes]] = []
    make = Table.factory(key=bytes, value=bytes)

    def store(partition: TopicPartition) -> Table[bytes, bytes]:
        tables.append(make(partition))
        return tables[-1]

    def measured(measurement: Measurement) -> None:
        if isinstance(measurement, MembershipChanged):
            planned.append(time.monotonic())
        elif isinstance(measurement, TakeOverDone):
            done.append(measurement)
            ends.append(time.monotonic())
            if len(done) == job.partitions:
                results.append(digest(item for table in tables for item in table.items()))
                source.stop_now()

    results: list[tuple[int, int]] = []
    config = EventSourceConfig(
        group_id=job.group,
        topic=job.source,
        num_partitions=job.partitions,
        changelog_topic=job.changelog,
        bootstrap_servers=job.bootstrap_servers,
        instance_id="restored",
        metrics_handler=measured,
    )
    source = EventSource(config, store=store)
    source.register_default_handler(lambda ctx, event: None)
    source.run()
    records = sum(one.records for one in done) - job.partitions  # one of each is its offset
    return Restored(ends[-1] - planned[0], ends[-1] - began, records, *results[0])


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(restore(job_of(Job))))
