"""A view of a topic: catching up, reading, a snapshot, and how far it is behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import msgspec
from confluent_kafka import Producer
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.reader import percentiles
from benchmarks.systems import Failed, Module, System, system_running
from benchmarks.tables import loads, names, of_rounds, of_system, ratios, right, spread, table, verdict
from benchmarks.views.work import GETS, PATIENCE_SECONDS, SENT, Price, ViewJob, Watched, key_of, names_of
from streams import BlockingView, EventProducer, Record, View
from streams.errors import StreamsError

LEAST_RATE = 200_000
MOST_MS, MOST_GET_US, MOST_SNAPSHOT_MS = 20.0, 2.0, 1.0
"""At most: the 99th percentile from acknowledgement to change, one ``get``, the opening of one snapshot."""
SNAPSHOTS = 50
SEND_SECONDS = 0.002
TOPIC = "view-prices"
HERE, POLLED, GOKA = "View", "view", "goka"


class ViewResult(msgspec.Struct, frozen=True):
    """One view from its start to its end: ``rate`` of catching up (records/s), ``get_us``, ``snapshot_ms`` (the worst
    of many), and the times from the acknowledgement of a record until ``changes()`` has it. Of a ``system`` in a
    process of its own: until ``get`` returns it, and no snapshot."""

    round: int
    fault: str = ""
    rate: float = 0.0
    get_us: float = 0.0
    snapshot_ms: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    load_average: float = 0.0
    system: str = HERE


class Views(Measure[ViewResult]):
    """Views in processes without anything else, beside goka's."""

    name, title, place = "views", "A view of a topic", 48
    result = ViewResult
    about = """\
A `View` with ordered text keys and msgspec values, of ten partitions with one record for each key. *Catching up*: from
entering it until `ready()`, connections included. *Get*: random keys, each decoded. *Snapshot*: the longest of 50
openings. Then records are sent one after another by `EventProducer`, on another thread, and the time is taken from each
acknowledgement until `changes()` has it; producer and view share one interpreter. `view` and `goka` (its `View`, with
rows in memory, read committed, and the hash of Kafka's clients) are each in a process of their own. Every 0.5 ms it
gets the key that is sent: the time is taken until `get` returns the record, by the clock of the machine. Right is a
view that never went back, and whose rows at the end are those of the topic, by number and sum."""

    sizes: ClassVar = {
        "systems": ([GOKA], [GOKA], [GOKA]),
        "keys": (100_000, 300_000, 1_000_000),
        "sends": (300, 1_000, 2_000),
        "rounds": (1, 3, 5),
    }

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
        first = sizes.rounds * sizes.sends

        def polled(system: System, turn: int) -> ViewResult:
            nonlocal first
            first += sizes.sends
            return _polled(cluster.bootstrap_servers, system, turn, sizes.keys, range(first, first + sizes.sends))

        systems = [System.parse(POLLED), *bench.able(sizes.systems)]
        yield from bench.in_turn(f"{self.name}, polled", sizes.rounds, polled, ViewResult, systems)
        cluster.delete(TOPIC)

    def in_short(self, found: ViewResult) -> str:
        figures = f"{found.rate:,.0f} records/s, get {found.get_us:.2f} us, p99 {found.p99:.1f} ms"
        return f"{self.name} {found.round}, {found.system}: {found.fault or figures}"

    def tables(self, found: Sequence[ViewResult]) -> list[Table]:
        shown = table(
            f"A view: {of_rounds(found)}; {loads(found)}",
            ["system"],
            ["caught up, records/s", "get, us", "snapshot, ms", "behind p50, ms", "p99, ms", "right"],
        )
        for system in names(found):
            mine = of_system(found, system)
            kept = right(mine)
            shown.add_row(
                system,
                spread((one.rate for one in kept), ",.0f"),
                spread((one.get_us for one in kept), ".2f"),
                spread((one.snapshot_ms for one in kept if one.snapshot_ms), ".3f"),
                spread((one.p50 for one in kept), ".1f"),
                spread((one.p99 for one in kept), ".1f"),
                verdict(mine),
            )
        return [shown]

    def aims(self, found: Sequence[ViewResult]) -> list[Aim]:
        aims: list[Aim] = []
        if kept := right(of_system(found, HERE)):
            aims += [
                at_least("view: catching up, of 200,000 records/s", 1.0, [one.rate / LEAST_RATE for one in kept]),
                at_most("view: from acknowledgement to change, p99", MOST_MS, [one.p99 for one in kept], "ms"),
                at_most("view: get", MOST_GET_US, [one.get_us for one in kept], "us"),
                at_most("view: opening a snapshot", MOST_SNAPSHOT_MS, [one.snapshot_ms for one in kept], "ms"),
            ]
        if polled := right(of_system(found, POLLED)):
            aims.append(at_most("view: from acknowledgement to `get`, p99", MOST_MS, [one.p99 for one in polled], "ms"))
        for peer in (system for system in names(found) if system.partition(":")[0] == GOKA):
            if compared := ratios(found, POLLED, peer, lambda one: one.p99):
                aims.append(at_most(f"view: from acknowledgement to `get`, p99, to `{peer}`", 1.0, compared))
        return aims


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
        producer.produce(TOPIC, msgspec.json.encode(Price(number)), key_of(number))
    if producer.flush(PATIENCE_SECONDS):
        raise Failed(f"{TOPIC} could not be written")


def _one(bootstrap_servers: str, turn: int, keys: int, sends: int) -> ViewResult:
    began = time.perf_counter()
    with View(TOPIC, key=str, value=Price, ordered=True, bootstrap_servers=bootstrap_servers) as view:
        view.ready(PATIENCE_SECONDS)
        rate = keys / (time.perf_counter() - began)
        wanted = names_of(keys)
        began = time.perf_counter()
        for name in wanted:
            view.get(name)
        get_us = (time.perf_counter() - began) / GETS * 1e6
        first = (turn - 1) * sends
        behind, fault = _behind(bootstrap_servers, view, range(first, first + sends))
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


def _behind(bootstrap_servers: str, view: BlockingView[str, Price], numbers: range) -> tuple[list[float], str]:
    """Return milliseconds from each acknowledgement to its change, and what is wrong."""
    acknowledged: dict[int, int] = {}
    seen: dict[int, int] = {}
    changes = view.changes()
    sending = threading.Thread(target=_send, args=(bootstrap_servers, numbers, acknowledged))
    sending.start()
    for change in changes:
        if change.new is not None:
            seen[-1 - change.new.cents] = time.time_ns()
            if -1 - change.new.cents == numbers[-1]:
                break
    sending.join()
    times = [max(0.0, (seen[number] - acknowledged[number]) / 1e6) for number in seen]
    merged = len(numbers) - len(times)
    return times, "" if merged < len(numbers) / 2 else f"{merged} of {len(numbers)} changes were merged"


def _send(bootstrap_servers: str, numbers: range, acknowledged: dict[int, int]) -> None:
    """Send one record after the other; note when each is acknowledged, in nanoseconds since the epoch."""
    with EventProducer(bootstrap_servers) as producer:
        for number in numbers:
            producer.send(Record(TOPIC, msgspec.json.encode(Price(-1 - number)), SENT.encode()))
            acknowledged[number] = time.time_ns()
            time.sleep(SEND_SECONDS)


def _polled(bootstrap_servers: str, system: System, turn: int, keys: int, numbers: range) -> ViewResult:
    """Send to a view in another process. Raises ``Failed``."""
    acknowledged: dict[int, int] = {}
    with TemporaryDirectory(prefix="bench-") as folder:
        ready = Path(folder) / "ready"
        job = ViewJob(bootstrap_servers=bootstrap_servers, group="", source="", output="", changelog="", table=TOPIC,
                      keys=keys, first=numbers[0], last=numbers[-1], ready=str(ready))  # fmt: skip
        with system_running(system, job) as child:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not ready.exists():
                child.check()
                if time.monotonic() > deadline:
                    raise Failed(f"{system.label} has not caught up after {PATIENCE_SECONDS:g} s")
                time.sleep(0.01)
            _send(bootstrap_servers, numbers, acknowledged)
            found = msgspec.json.decode(child.result(PATIENCE_SECONDS), type=Watched)
    p50, p99, _ = percentiles(times_of(found.seen, acknowledged))
    fault = fault_of(found, keys, numbers)
    return ViewResult(turn, fault, found.rate, found.get_us, 0.0, p50, p99, os.getloadavg()[0], system.label)


def times_of(seen: Sequence[tuple[int, int]], acknowledged: Mapping[int, int]) -> list[float]:
    """Return milliseconds from each acknowledgement to the first look that found that record or a later one."""
    times, waiting = [], iter(sorted(acknowledged))
    number = next(waiting, None)
    for newest, at in seen:
        while number is not None and number <= newest:
            times.append(max(0.0, (at - acknowledged[number]) / 1e6))
            number = next(waiting, None)
    return times


def fault_of(found: Watched, keys: int, numbers: range) -> str:
    """Judge a view; empty if it was right."""
    looks = [number for number, _ in found.seen]
    if looks != sorted(set(looks)) or looks[-1:] != [numbers[-1]]:
        return "it went back, or did not come to the last record"
    rows, cents = keys + 1, sum(range(keys)) - 1 - numbers[-1]
    if (found.rows, found.cents) != (rows, cents):
        return f"{found.rows:,} rows with {found.cents:,} cents, not {rows:,} with {cents:,}"
    return ""


KINDS = (Module(POLLED, "benchmarks.views.work"),)
MEASURES = (Views(),)
