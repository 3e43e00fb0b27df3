"""A view of a topic: catching up, reading, a snapshot, and how far it is behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
from confluent_kafka import Producer
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.reader import percentiles
from benchmarks.systems import Failed
from benchmarks.tables import loads, of_rounds, right, spread, table, verdict
from streams import BlockingView, EventProducer, Record, View
from streams.errors import StreamsError

LEAST_RATE = 200_000
MOST_MS, MOST_GET_US, MOST_SNAPSHOT_MS = 20.0, 2.0, 1.0
"""At most: the 99th percentile from acknowledgement to change, one ``get``, the opening of one snapshot."""
PATIENCE_SECONDS = 120.0
GETS, SNAPSHOTS = 200_000, 50
TOPIC = "view-prices"


class Price(msgspec.Struct):
    """The value of a key."""

    cents: int
    currency: str = "EUR"
    note: str = "the price of something"


class ViewResult(msgspec.Struct, frozen=True):
    """One view from its start to its end: ``rate`` of catching up (records/s), ``get_us``, ``snapshot_ms`` (the worst
    of many), and the times from the acknowledgement of a record until ``changes()`` has it."""

    round: int
    fault: str = ""
    rate: float = 0.0
    get_us: float = 0.0
    snapshot_ms: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    load_average: float = 0.0


class Views(Measure[ViewResult]):
    """A view in a process without anything else."""

    name, title, place = "views", "A view of a topic", 48
    result = ViewResult
    about = """\
A `View` with ordered text keys and msgspec values, of ten partitions with one record for each key. *Catching up*: from
entering it until `ready()`, connections included. *Get*: random keys, each decoded. *Snapshot*: the longest of 50
openings. Then records are sent one after another by `EventProducer`, on another thread, and the time is taken from each
acknowledgement until `changes()` has it; producer and view share one interpreter."""

    sizes: ClassVar = {"keys": (100_000, 300_000, 1_000_000), "sends": (300, 1_000, 2_000), "rounds": (1, 3, 5)}

    def run(self, bench: Bench) -> Iterator[ViewResult]:
        """Run one view after another over the same topic."""
        sizes, cluster = bench.sizes(self), bench.cluster
        bench.now(f"{self.name}: writing {sizes.keys:,} records")
        cluster.source(TOPIC)
        cluster.set_topic(TOPIC, {"cleanup.policy": "compact"})
        _write(cluster.bootstrap_servers, sizes.keys)
        for turn in range(1, sizes.rounds + 1):
            bench.now(f"{self.name}, {turn}/{sizes.rounds}")
            try:
                yield _one(cluster.bootstrap_servers, turn, sizes.keys, sizes.sends)
            except (Failed, StreamsError) as error:
                yield ViewResult(turn, f"failed: {error}")
        cluster.delete(TOPIC)

    def in_short(self, found: ViewResult) -> str:
        figures = f"{found.rate:,.0f} records/s, get {found.get_us:.2f} us, p99 {found.p99:.1f} ms"
        return f"{self.name} {found.round}: {found.fault or figures}"

    def tables(self, found: Sequence[ViewResult]) -> list[Table]:
        shown = table(
            f"A view: {of_rounds(found)}; {loads(found)}",
            ["system"],
            ["caught up, records/s", "get, us", "snapshot, ms", "behind p50, ms", "p99, ms", "right"],
        )
        kept = right(found)
        shown.add_row(
            "View",
            spread((one.rate for one in kept), ",.0f"),
            spread((one.get_us for one in kept), ".2f"),
            spread((one.snapshot_ms for one in kept), ".3f"),
            spread((one.p50 for one in kept), ".1f"),
            spread((one.p99 for one in kept), ".1f"),
            verdict(found),
        )
        return [shown]

    def aims(self, found: Sequence[ViewResult]) -> list[Aim]:
        kept = right(found)
        if not kept:
            return []
        return [
            at_least("view: catching up, of 200,000 records/s", 1.0, [one.rate / LEAST_RATE for one in kept]),
            at_most("view: from acknowledgement to change, p99", MOST_MS, [one.p99 for one in kept], "ms"),
            at_most("view: get", MOST_GET_US, [one.get_us for one in kept], "us"),
            at_most("view: opening a snapshot", MOST_SNAPSHOT_MS, [one.snapshot_ms for one in kept], "ms"),
        ]


def _write(bootstrap_servers: str, keys: int) -> None:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "partitioner": "murmur2_random",
            "linger.ms": 50,
            "log_level": 2,
            "queue.buffering.max.messages": 0,
        }
    )
    for number in range(keys):
        if number % 5_000 == 0:
            producer.poll(0)
        producer.produce(TOPIC, msgspec.json.encode(Price(number)), f"key-{number:07}")
    if producer.flush(PATIENCE_SECONDS):
        raise Failed(f"{TOPIC} could not be written")


def _one(bootstrap_servers: str, turn: int, keys: int, sends: int) -> ViewResult:
    began = time.perf_counter()
    with View(TOPIC, key=str, value=Price, ordered=True, bootstrap_servers=bootstrap_servers) as view:
        view.ready(PATIENCE_SECONDS)
        rate = keys / (time.perf_counter() - began)
        names = [f"key-{number * 7919 % keys:07}" for number in range(GETS)]
        began = time.perf_counter()
        for name in names:
            view.get(name)
        get_us = (time.perf_counter() - began) / GETS * 1e6
        behind, fault = _behind(bootstrap_servers, view, sends)
        if len(view) != keys + 1:
            fault = f"{len(view):,} keys, not {keys + 1:,}"
        p50, p99, _ = percentiles(behind)
        return ViewResult(turn, fault, rate, get_us, _snapshot_ms(view), p50, p99, os.getloadavg()[0])


def _snapshot_ms(view: BlockingView[str, Price]) -> float:
    times = []
    for _ in range(SNAPSHOTS):
        began = time.perf_counter()
        with view.snapshot():
            times.append((time.perf_counter() - began) * 1e3)
    return max(times)


def _behind(bootstrap_servers: str, view: BlockingView[str, Price], sends: int) -> tuple[list[float], str]:
    """Return milliseconds from each acknowledgement to its change, and what is wrong."""
    acknowledged: dict[int, float] = {}
    seen: dict[int, float] = {}
    changes = view.changes()

    def send() -> None:
        with EventProducer(bootstrap_servers) as producer:
            for number in range(sends):
                producer.send(Record(TOPIC, msgspec.json.encode(Price(-1 - number)), "sent"))
                acknowledged[number] = time.perf_counter()
                time.sleep(0.002)

    sending = threading.Thread(target=send)
    sending.start()
    for change in changes:
        if change.new is not None:
            seen[-1 - change.new.cents] = time.perf_counter()
            if -1 - change.new.cents == sends - 1:
                break
    sending.join()
    times = [max(0.0, seen[number] - acknowledged[number]) * 1e3 for number in seen]
    return times, "" if len(times) > sends / 2 else f"{sends - len(times)} of {sends} changes were merged"


MEASURES = (Views(),)
