"""``EventProducer`` beside a loop by hand over ``confluent_kafka.Producer``."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.cluster import Cluster
from benchmarks.measures import Aim, Measure, at_least
from benchmarks.produce.sender import WAYS, SendJob, Sent
from benchmarks.systems import Failed, running
from benchmarks.tables import loads, names, of_rounds, of_system, ratios, right, spread, table, verdict
from benchmarks.workload import Deposited, deposits

BY_HAND = "handwritten"
LEAST = 0.9
PATIENCE_SECONDS = 300.0


class ProduceResult(msgspec.Struct, frozen=True):
    """One process that sends ``events``. ``cpu_us``: processor time of the process per event, all threads."""

    system: str
    round: int
    fault: str = ""
    events: int = 0
    per_second: float = 0.0
    cpu_us: float = 0.0
    load_average: float = 0.0


class Produce(Measure[ProduceResult]):
    """Typed events into a topic, as fast as they go."""

    name, title, place = "produce", "Produce typed events", 48
    result = ProduceResult
    about = """\
A process sends events of about 150 bytes to a topic of ten partitions as fast as it can, and waits for all
acknowledgements; the clock runs from the first call until the last acknowledgement. By hand means
`confluent_kafka.Producer` with the same promise (idempotent, murmur2, type header, each acknowledgement looked at), and
`msgspec.json.encode`. `with` and `async with` are `EventProducer` and its `send_soon`. The topic is read back: each
account's events must be there once and in order."""

    sizes: ClassVar = {"events": (100_000, 300_000, 1_000_000), "rounds": (1, 3, 5)}

    def run(self, bench: Bench) -> Iterator[ProduceResult]:
        sizes = bench.sizes(self)
        cluster = Cluster(bench.cluster.bootstrap_servers, prefix=self.name)
        for turn in range(sizes.rounds + 1):  # the first one, which warms the broker up, does not count
            for way in WAYS:
                bench.now(f"{self.name}: {way}, {turn}/{sizes.rounds}")
                try:
                    yield _sent(cluster, way, turn, sizes.events, bench.seed)
                except Failed as error:
                    yield ProduceResult(way, turn, f"failed: {error}")

    def in_short(self, found: ProduceResult) -> str:
        rate = f"{found.per_second:,.0f} events/s, {found.cpu_us:.1f} us each"
        return f"{self.name} {found.round}, {found.system}: {found.fault or rate}"

    def tables(self, found: Sequence[ProduceResult]) -> list[Table]:
        shown = table(
            f"{found[0].events:,} events: {of_rounds(found)}; {loads(found)}",
            ["system"],
            ["events/s", "of by hand", "processor time, us per event", "each event once"],
        )
        for system in names(found):
            kept = right(of_system(found, system))
            shares = ratios(found, system, BY_HAND, lambda one: one.per_second)
            cells = (
                spread(one.per_second for one in kept),
                spread(shares, ".2f"),
                spread((one.cpu_us for one in kept), ".2f"),
            )
            shown.add_row(system, *cells, verdict(of_system(found, system)))
        return [shown]

    def aims(self, found: Sequence[ProduceResult]) -> list[Aim]:
        compared = [(way, ratios(found, way, BY_HAND, lambda one: one.per_second)) for way in WAYS if way != BY_HAND]
        return [
            at_least(f"`EventProducer` (`{way}`), events/s of the loop by hand", LEAST, shares)
            for way, shares in compared
            if shares
        ]


def _sent(cluster: Cluster, way: str, turn: int, events: int, seed: int) -> ProduceResult:
    topic = cluster.source(f"produce-{way.replace(' ', '-')}-{turn}")
    wanted: dict[str, list[int]] = defaultdict(list)
    there: dict[str, list[int]] = defaultdict(list)
    job = SendJob(way, cluster.bootstrap_servers, topic, events, seed)
    with running("benchmarks.produce.sender", job) as child:
        sent = msgspec.json.decode(child.result(PATIENCE_SECONDS), type=Sent)
    for account, cents in islice(deposits(seed), events):
        wanted[account].append(cents)
    for message in cluster.records(topic, cluster.partitions):
        there[(message.key() or b"").decode()].append(_decode(message.value() or b"").cents)
    cluster.delete(topic)
    wrong = sum(there[account] != cents for account, cents in wanted.items())
    fault = f"{wrong} accounts lack events, or have them twice or out of order" if wrong else ""
    rate, cpu = events / sent.seconds, sent.cpu_seconds / events * 1e6
    return ProduceResult(way, turn, fault, events, rate, cpu, os.getloadavg()[0])


_decode = msgspec.json.Decoder(Deposited).decode

MEASURES = (Produce(),)
