"""A member of the group under test, by itself or as a worker of ``kes run``.

It writes what it measures, and ten times a second how it stands, to a file of its own, a JSON line each, so
that the last line is there also after a kill -9.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import msgspec

from benchmarks.child import job_of
from benchmarks.stalls.workload import Stepped
from benchmarks.workload import PARTITIONS, Account, Deposited, Job
from streams import EventContext, EventSource, EventSourceConfig, PoolConfig, Table
from streams.metrics import Measurement

JOB_VARIABLE = "KES_BENCH_JOB"
STATUS_SECONDS = 0.1


class Status(msgspec.Struct, frozen=True, tag=True):
    """How a member stands."""

    at: float
    generation: int
    member_id: str
    active: list[int]
    ready: list[int]
    moving: int
    state: str


class Measured(msgspec.Struct, frozen=True, tag=True):
    """One measurement of the event source: its kind and its fields."""

    at: float
    kind: str
    fields: dict[str, Any]


class Note(msgspec.Struct, frozen=True, tag=True):
    """Something that happened to a partition: ``activated``, ``revoked``, ``first event``."""

    at: float
    what: str
    partition: int


Line = Status | Measured | Note


class Trace:
    """The file of one process: ``FOLDER/INSTANCE.PID.jsonl``. Any thread."""

    def __init__(self, folder: str, instance: str) -> None:
        self.name = f"{instance}.{os.getpid()}"
        path = os.path.join(folder, f"{self.name}.jsonl")
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, line: Line) -> None:
        """One line, at once."""
        os.write(self._file, msgspec.json.encode(line) + b"\n")


def source_of(job: Job, instance: str) -> EventSource[Table[str, Account]]:
    """The event source; the option ``trace`` names the folder for its file, ``config.NAME`` sets a setting."""
    trace = Trace(job.options["trace"], instance)
    settings: dict[str, Any] = {
        name.removeprefix("config."): int(text) if text.isdigit() else text
        for name, text in job.options.items()
        if name.startswith("config.")
    }
    pool = {name.removeprefix("pool."): float(text) for name, text in job.options.items() if name.startswith("pool.")}
    fresh: set[int] = set()

    def measured(measurement: Measurement) -> None:
        fields = msgspec.structs.asdict(measurement)
        trace.write(Measured(time.time(), type(measurement).__name__, fields))

    def activated(partition: int) -> None:
        fresh.add(partition)
        trace.write(Note(time.time(), "activated", partition))

    config = EventSourceConfig(
        group_id=job.group,
        topic=job.source,
        num_partitions=PARTITIONS,
        changelog_topic=job.changelog,
        bootstrap_servers=job.bootstrap_servers,
        instance_id=instance,
        pool=msgspec.convert(pool, PoolConfig, strict=False),
        metrics_handler=measured,
        on_partition_activated=activated,
        on_partition_revoked=lambda partition: trace.write(Note(time.time(), "revoked", partition)),
        **settings,
    )
    source = EventSource(config, store=Table.factory(key=str, value=Account))
    output, name = job.output, trace.name

    @source.register_event_type(Deposited)
    def deposited(ctx: EventContext[Table[str, Account]], event: Deposited) -> None:
        key, now, partition = event.account, time.time(), ctx.topic_partition.partition
        if partition in fresh:
            fresh.discard(partition)
            trace.write(Note(now, "first event", partition))
        account = ctx.store.get(key) or Account()
        account.count += 1
        account.cents += event.cents
        ctx.store.put(key, account)
        step = Stepped(key, account.count, account.cents, event.sent, now, name)
        ctx.forward(output, step, key=key, partition=partition)

    threading.Thread(target=_tell, args=(source, trace), name="status", daemon=True).start()
    return source


def _tell(source: EventSource[Table[str, Account]], trace: Trace) -> None:
    while True:
        try:
            said = source.statistics()
        except (RuntimeError, AttributeError):  # the loop's own, looked at from outside: half built, or just changing
            time.sleep(STATUS_SECONDS / 10)
            continue
        trace.write(
            Status(
                time.time(),
                said.generation,
                said.member_id,
                [one.partition for one in said.partitions if one.state == "active"],
                [one.partition for one in said.copies if one.state == "ready"],
                len(said.moves) + sum(one.state != "ready" for one in said.copies),
                said.state.value,
            )
        )
        time.sleep(STATUS_SECONDS)


def source() -> EventSource[Table[str, Account]]:
    """For ``kes run``: the job is in the environment."""
    job = msgspec.json.decode(os.environ[JOB_VARIABLE], type=Job)
    return source_of(job, os.environ["KES_INSTANCE_ID"])


if __name__ == "__main__":
    given = job_of(Job)
    source_of(given, given.options["instance"]).run()
