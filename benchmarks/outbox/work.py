"""The processes of the measure ``outbox``: ``python -m benchmarks.outbox.work JOB``. Each prints its figures."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import psycopg
from confluent_kafka import KafkaError, Message, Producer

from benchmarks.child import job_of
from streams import Outbox, Record, RelayConfig
from streams.outbox.relay import Relay
from streams.outbox.shard import BatchRelayed, RelayEvent, ShardAcquired

PARTITIONS = 4
PER_WRITER = 100
"""Transactions in a second that one connection of a writer is to make."""
MOST_WRITERS = 32


class OutboxJob(msgspec.Struct, frozen=True):
    """``what``: a key of ``WORK``. ``rows``: after so many the process ends (0: with SIGTERM). ``keys``: of the rows.
    ``notes``: a file that gets a line when a relay has a shard, with the group's name for it. ``insert``: makes a row
    of topic, key and value, instead of a stash."""

    what: str
    name: str
    database: str
    bootstrap_servers: str
    topic: str
    rows: int = 0
    keys: int = 10_000
    rate: int = 0
    seconds: float = 0.0
    session_seconds: float = 6.0
    notes: str = ""
    insert: str = ""


class OutboxFigures(msgspec.Struct, frozen=True):
    """``rows`` in ``seconds``, from the first shard until the last batch; processor time of the process."""

    rows: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def config_of(job: OutboxJob) -> RelayConfig:
    """The settings of the job's relay."""
    return RelayConfig(
        name=job.name,
        database=job.database,
        bootstrap_servers=job.bootstrap_servers,
        session_seconds=job.session_seconds,
    )


def relay(job: OutboxJob) -> OutboxFigures:
    """Run a relay."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    one, lock = Relay(config_of(job)), threading.Lock()
    counted, began, last = 0, 0.0, 0.0

    def note(event: RelayEvent) -> None:
        nonlocal counted, began, last
        if isinstance(event, ShardAcquired):
            began = began or time.perf_counter()
            if job.notes:
                with open(job.notes, "a") as file:
                    file.write(f"{one.member_id}\n")
        if isinstance(event, BatchRelayed):
            with lock:
                last = time.perf_counter()
                counted += event.rows
                if job.rows and counted >= job.rows:
                    ended.set()

    one.on_event(note)
    cpu = time.process_time()
    with one:
        ended.wait()
        spent = time.process_time() - cpu
    return OutboxFigures(counted, last - began, spent)


def by_hand(job: OutboxJob) -> OutboxFigures:
    """Poll the table, send, wait for all acknowledgements, delete: at least once, by one process."""
    failed: list[KafkaError] = []

    def note(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failed.append(error)

    settings = {"bootstrap.servers": job.bootstrap_servers, "enable.idempotence": True, "linger.ms": 1, "log_level": 2}
    producer = Producer(settings)
    rows, began, cpu = 0, time.perf_counter(), time.process_time()
    with psycopg.connect(job.database, autocommit=True) as db:
        while rows < job.rows:
            text = b"SELECT id, topic, key, value FROM kes_outbox ORDER BY id LIMIT 2000"
            found = db.execute(text).fetchall()
            for _, topic, key, value in found:
                producer.produce(topic, value, key, on_delivery=note)
            producer.flush()
            if failed:
                raise SystemExit(f"{len(failed)} records failed; the first: {failed[0]}")
            db.execute(b"DELETE FROM kes_outbox WHERE id = ANY(%s)", [[row[0] for row in found]])
            rows += len(found)
    return OutboxFigures(rows, time.perf_counter() - began, time.process_time() - cpu)


def write(job: OutboxJob) -> OutboxFigures:
    """Make transactions of one row each, at a fixed rate, by as many connections as that takes, with keys of its own
    each; a row's value is the time at which its transaction begins."""
    writers = min(MOST_WRITERS, job.rate // PER_WRITER + 1)
    done = [0] * writers
    began = time.perf_counter()

    def one(number: int) -> None:
        outbox, turn = Outbox(), 0
        while True:
            try:
                with psycopg.connect(job.database) as db:
                    while (due := began + (turn * writers + number) / job.rate) < began + job.seconds:
                        time.sleep(max(0.0, due - time.perf_counter()))
                        record = Record(job.topic, b"%.6f" % time.time(), b"k%d-%d" % (number, turn % job.keys))
                        turn += 1
                        with db.transaction():
                            stash(outbox, db, job, [record])
                        done[number] += 1
                    return
            except psycopg.OperationalError:  # a server that is restarted
                time.sleep(0.05)

    threads = [threading.Thread(target=one, args=[number]) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return OutboxFigures(sum(done), time.perf_counter() - began, time.process_time())


def stash(outbox: Outbox, db: psycopg.Connection[Any], job: OutboxJob, records: Sequence[Record]) -> None:
    """Make the rows of records, for our relay, or for another one."""
    if not job.insert:
        outbox.stash_many(db, records)
        return
    rows = [(one.topic, (one.key or b"").decode(), (one.value or b"").decode()) for one in records]
    db.cursor().executemany(job.insert.encode(), rows)


WORK: dict[str, Callable[[OutboxJob], OutboxFigures]] = {"relay": relay, "by hand": by_hand, "write": write}


if __name__ == "__main__":
    the_job = job_of(OutboxJob)
    sys.stdout.buffer.write(msgspec.json.encode(WORK[the_job.what](the_job)))
