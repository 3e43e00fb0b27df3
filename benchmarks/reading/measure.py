"""Reading a log up to its end: what a restore is made of, without a store."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import product
from typing import Any, ClassVar

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.tables import by_what, loads, names, of_rounds, of_system, ratios, right, spread, table, verdict
from streams.kafka.reading.consumer import LogConsumer
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.records import IncomingRecord

FETCHER, CONSUMER, LIBRDKAFKA, FILE = "fetcher", "consumer", "librdkafka", "file"
SYSTEMS = (FETCHER, CONSUMER, LIBRDKAFKA, FILE)
FACTOR = 3.0
"""Of the records/s of the consumer, at least."""
PRICE_US = 0.4
"""Processor time of a record, at most."""
BATCHES = {"large batches": 10_000, "batches of 20": 20}
CODECS = ("none", "zstd")
SHARE_OF_SMALL = 10
"""A log of small batches has one record for so many of the others: it is slow to write."""
TOPIC = "reading"


class ReadingResult(msgspec.Struct, frozen=True):
    """One partition, read once by one system. Processor time is the whole process's, of all threads."""

    system: str
    what: str
    round: int
    fault: str = ""
    records: int = 0
    per_second: float = 0.0
    cpu_us_per_record: float = 0.0
    load_average: float = 0.0


class Reading(Measure[ReadingResult]):
    """All systems read the same logs in turn, in this process."""

    name, title, place = "reading", "Reading a log up to its end", 46
    result = ReadingResult
    about = """\
One partition of small records (a key of 13 bytes, a value of some 80, a type as header) is read from its start to its
end, into objects of records: by `fetcher`, which restores, look-ups and commands read with; by `consumer`, which inputs
are read with (librdkafka's consumer, its messages made into the same objects); by `librdkafka`, its consumer with
nothing made of a message. `file` reads the bytes of the partition's folder, as an anchor. `batches of 20` is the log of
a source that commits small transactions."""

    sizes: ClassVar = {"records": (100_000, 400_000, 1_000_000), "rounds": (3, 5, 9)}

    def run(self, bench: Bench) -> Iterator[ReadingResult]:
        """Each log, by all systems in turn."""
        sizes, servers = bench.sizes(self), bench.broker.bootstrap_servers
        settings = ClientSettings(servers)
        for codec, (kind, batch) in product(CODECS, BATCHES.items()):
            what = f"{codec}, {kind}"
            records = sizes.records if batch > SHARE_OF_SMALL * 10 else sizes.records // SHARE_OF_SMALL
            topic = f"{TOPIC}-{codec}-{batch}"
            bench.now(f"{self.name}: writing {records} records, {what}")
            write(servers, topic, records, codec, batch)
            ways: dict[str, Callable[[], int]] = {
                FETCHER: lambda: by_fetcher(settings, topic, records),  # noqa: B023
                CONSUMER: lambda: by_consumer(settings, topic, records),  # noqa: B023
                LIBRDKAFKA: lambda: by_librdkafka(settings, topic, records),  # noqa: B023
                FILE: lambda: by_file(bench, topic, records),  # noqa: B023
            }
            for turn in range(sizes.rounds + 1):  # the first one is not counted
                for system in SYSTEMS[turn % 4 :] + SYSTEMS[: turn % 4]:
                    bench.now(f"{self.name}, {what}, {turn}/{sizes.rounds}: {system}")
                    gc.collect()
                    began, cpu = time.perf_counter(), time.process_time()
                    found = ways[system]()
                    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
                    yield ReadingResult(
                        system,
                        what,
                        turn,
                        "" if found == records else f"{found} of {records} records",
                        records,
                        records / seconds,
                        cpu / records * 1e6,
                        os.getloadavg()[0],
                    )

    def in_short(self, found: ReadingResult) -> str:
        told = f"{found.per_second:,.0f} records/s, {found.cpu_us_per_record:.2f} us of processor time a record"
        return f"{self.name} {found.round} {found.system} ({found.what}): {found.fault or told}"

    def tables(self, found: Sequence[ReadingResult]) -> list[Table]:
        shown = []
        for what, group in by_what(found).items():
            one = table(
                f"Reading, {what}: {of_rounds(group)}; {loads(group)}",
                ["system"],
                ["records/s", f"by {CONSUMER}", "us of processor a record", "right"],
            )
            for name in names(group):
                mine = right(of_system(group, name))
                one.add_row(
                    name,
                    spread(result.per_second for result in mine),
                    spread(ratios(group, name, CONSUMER, lambda result: result.per_second), ".2f"),
                    spread((result.cpu_us_per_record for result in mine), ".2f"),
                    verdict(of_system(group, name)),
                )
            shown.append(one)
        return shown

    def aims(self, found: Sequence[ReadingResult]) -> list[Aim]:
        aims = []
        for what, group in by_what(found).items():
            factors = ratios(group, FETCHER, CONSUMER, lambda result: result.per_second)
            if factors and "large" in what:
                aims.append(at_least(f"reading, {what}, by the consumer of inputs", FACTOR, factors))
                prices = [result.cpu_us_per_record for result in right(of_system(group, FETCHER))]
                aims.append(at_most(f"reading, {what}, processor time of a record", PRICE_US, prices, "us"))
        return aims


def write(servers: str, topic: str, records: int, codec: str, batch: int) -> None:
    """Write a topic of one partition."""
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([NewTopic(topic, 1, 1)]).values():
        future.result(30)
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "compression.type": codec,
            "batch.num.messages": batch,
            "linger.ms": 20,
            "queue.buffering.max.messages": records + 1,
        }
    )
    headers: Any = [("__grt__", b"Deposited")]
    for number in range(records):
        value = b'{"id":%d,"account":"account-%05d","cents":%d,"note":"salary of the month"}'
        account = number % 2000
        producer.produce(topic, value % (number, account, number % 977), b"account-%05d" % account, 0, headers=headers)
        if number % 1000 == 0:
            producer.poll(0)
    assert not producer.flush(120)


def by_fetcher(settings: ClientSettings, topic: str, end: int) -> int:
    """Read as restores do."""
    found = 0

    def receive(_partition: int, records: list[IncomingRecord]) -> None:
        nonlocal found
        found += len(records)

    with closing(PartitionReader(settings)) as reader:
        reader.read(topic, {0: (0, end)}, receive, stalled_after_seconds=30.0, cancelled=lambda: False)
    return found


def by_consumer(settings: ClientSettings, topic: str, end: int) -> int:
    """Read as inputs are."""
    found = position = 0
    with closing(LogConsumer(settings, topic, ends=True)) as consumer:
        consumer.add(0, 0)
        while position < end:
            for progress in consumer.poll_batch(0.05).values():
                found, position = found + len(progress.records), progress.position
    return found


def by_librdkafka(settings: ClientSettings, topic: str, end: int) -> int:
    """Read messages, and make nothing of them."""
    found = 0
    consumer = Consumer(settings.consumer(partition_eof=False))
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        consumer.list_topics(topic, 10)  # it would look for the leader by a timer of a second
        while found < end:
            found += len(consumer.consume(10_000, 0.05))
    finally:
        consumer.close()
    return found


def by_file(bench: Bench, topic: str, records: int) -> int:
    """Read the files of the partition."""
    folder = bench.broker.data_dir
    assert folder is not None  # it runs
    for path in sorted(folder.rglob(f"{topic}-0/*.log")):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
    return records


MEASURES = (Reading(),)
