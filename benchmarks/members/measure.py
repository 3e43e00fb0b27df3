"""A member without work, a member on three brokers, and an event whose output the broker refuses."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Self

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition
from rich.table import Table

from benchmarks.account.measure import Latency
from benchmarks.bench import Bench
from benchmarks.cluster import Cluster
from benchmarks.measures import Aim, Measure, at_most
from benchmarks.members.refusing import Chosen
from benchmarks.steady import SteadyResult, steady
from benchmarks.systems import Failed, System, running, system_running
from benchmarks.tables import loads, names, of_rounds, of_system, ratios, right, spread, table, verdict
from benchmarks.workload import Job
from streams.broker import KafkaCluster

IDLE_PERCENT = 1.0
"""Of a core, at most."""
CALM_SECONDS = 3.0
"""After the last event, before the watch begins."""
EVENTS = 200
MOST_MS = 20.0
"""That an event with a refused output may cost above one whose output is taken."""
UNCOUNTED = 6
"""Runs on three brokers before the first that counts."""
OF_BEFORE = 0.5
"""Of the median latency of the checkout that is compared with, on three brokers."""
PATIENCE_SECONDS = 30.0
REPLICAS = "config.replication_factor"
LIMIT = 20_000
"""Bytes of a record batch that an output topic takes, from after its first record on."""


class IdleResult(msgspec.Struct, frozen=True):
    """One member that has nothing to do. ``percent`` of a core, all threads."""

    system: str
    round: int
    fault: str = ""
    percent: float = 0.0
    load_average: float = 0.0


class Idle(Measure[IdleResult]):
    """No events."""

    name, title, place = "idle", "A member without work", 44
    result = IdleResult
    about = f"""\
The only member of its group owns ten partitions, has handled {EVENTS} events, and gets no more. Processor time of its
process, all threads, in percent of a core: polls, heartbeats, timers."""

    sizes: ClassVar = {"seconds": (5.0, 15.0, 30.0), "rounds": (1, 3, 5)}

    def run(self, bench: Bench) -> Iterator[IdleResult]:
        """All systems in turn."""
        sizes, cluster = bench.sizes(self), bench.cluster

        def one(system: System, turn: int) -> IdleResult:
            job = cluster.job()
            cluster.fill(job.source, bench.seed, EVENTS)
            with system_running(system, job) as child:
                cluster.wait_committed(job, EVENTS, child.check, PATIENCE_SECONDS, system)
                time.sleep(CALM_SECONDS)
                began = time.monotonic()
                first = child.sample(began, EVENTS)
                time.sleep(sizes.seconds)
                last = child.sample(began, EVENTS)
            fault = cluster.judged(job)[0].verdict(bench.seed, EVENTS)
            cluster.forget(job, source=True)
            percent = (last.cpu - first.cpu) / (last.at - first.at) * 100
            return IdleResult(system.label, turn, fault, percent, os.getloadavg()[0])

        yield from bench.in_turn(self.name, sizes.rounds, one, IdleResult)

    def in_short(self, found: IdleResult) -> str:
        return f"{self.name} {found.round} {found.system}: {found.fault or f'{found.percent:.2f} % of a core'}"

    def tables(self, found: Sequence[IdleResult]) -> list[Table]:
        shown = table(
            f"Processor time without events: {of_rounds(found)}; {loads(found)}", ["system"], ["% of a core", "right"]
        )
        for name in names(found):
            mine = of_system(found, name)
            shown.add_row(name, spread((one.percent for one in right(mine)), ".2f"), verdict(mine))
        return [shown]

    def aims(self, found: Sequence[IdleResult]) -> list[Aim]:
        shares = [one.percent for one in right(of_system(found, "engine"))]
        return [at_most("idle member, 10 partitions", IDLE_PERCENT, shares, "% of a core")] if shares else []


class ThreeBrokers(Latency):
    """A cluster with replicas."""

    name, title, place = "brokers", "Latency on three brokers", 32
    presets = frozenset({"full"})
    about = """\
As the latencies, on a cluster of three brokers: every record is on all three, and is acknowledged when two have it.
They share this machine with everything else. `engine@FOLDER` is another checkout of this project, for comparison."""

    sizes: ClassVar = {
        "systems": (["engine"], ["handwritten:events=5000", "engine"], ["handwritten:events=5000", "engine"]),
        "rate": (1_000, 1_000, 1_000),
        "seconds": (4.0, 8.0, 15.0),
        "rounds": (1, 3, 5),
    }

    def run(self, bench: Bench) -> Iterator[SteadyResult]:
        sizes = bench.sizes(self)
        systems = [
            msgspec.structs.replace(
                system, options=system.options | ({REPLICAS: "3"} if system.name == "engine" else {})
            )
            for system in bench.able(sizes.systems)
        ]
        bench.now("starting three Kafka brokers")
        with KafkaCluster(3, durable=True, properties={"broker.session.timeout.ms": "30000"}) as brokers:
            cluster = Cluster(brokers.bootstrap_servers, prefix="three")
            for number in range(1, UNCOUNTED + 1):
                bench.now(f"warming three brokers up, not counted, {number}/{UNCOUNTED}")
                steady(cluster, systems[number % len(systems)], bench.seed, sizes.rate, sizes.seconds)
            yield from self.steadies(bench, cluster, systems, sizes.rate, sizes.seconds, sizes.rounds)

    def aims(self, found: Sequence[SteadyResult]) -> list[Aim]:
        others = [name for name in names(found) if name.startswith("engine@")]
        compared = {name: ratios(found, "engine", name, lambda one: one.p50) for name in others}
        return [
            at_most(f"p50 at {found[0].rate:,}/s on three brokers, to `{name}`", OF_BEFORE, values)
            for name, values in compared.items()
            if values
        ]


class RefusedResult(msgspec.Struct, frozen=True):
    """Three events at once, of which the broker refuses the output of the second one. Milliseconds from their
    sending until the outputs of the others and the dead letter are committed, and until all three outputs are if none
    is refused; medians of ``events`` each."""

    round: int
    fault: str = ""
    events: int = 0
    taken_ms: float = 0.0
    refused_ms: float = 0.0
    load_average: float = 0.0

    @property
    def extra_ms(self) -> float:
        """The price of the refusal."""
        return self.refused_ms - self.taken_ms


class Refused(Measure[RefusedResult]):
    """An abort, and the rest sent again."""

    name, title, place = "refused", "One refused event: abort and send again", 46
    result = RefusedResult
    about = f"""\
An output topic takes its first record, then its limit is lowered to {LIMIT:,} bytes, which the source does not know
yet. Three events come at once, and the output of the second one is larger than that. The broker refuses it, the
transaction is aborted, the other two are sent again, and the second becomes a dead letter. The time until a
`read_committed` reader has all three, beside that of three events without a refusal. From then on the source
knows the limit, and refuses such an output without the broker. So every refusal gets a topic of its own."""

    sizes: ClassVar = {"events": (3, 10, 20), "rounds": (1, 3, 5)}

    def run(self, bench: Bench) -> Iterator[RefusedResult]:
        sizes = bench.sizes(self)
        bench.warm_up(live=True)
        for turn in range(1, sizes.rounds + 1):
            bench.now(f"{self.name}, {turn}/{sizes.rounds}")
            try:
                yield _refusals(bench, turn, sizes.events)
            except Failed as error:
                yield RefusedResult(turn, f"failed: {error}")

    def in_short(self, found: RefusedResult) -> str:
        times = f"{found.taken_ms:.1f} ms, with a refusal {found.refused_ms:.1f} ms"
        return f"{self.name} {found.round}: {found.fault or times}"

    def tables(self, found: Sequence[RefusedResult]) -> list[Table]:
        shown = table(
            f"Three events at once, {found[0].events} times, ms: {of_rounds(found)}; {loads(found)}",
            ["system"],
            ["none is refused", "one is refused", "more", "exactly once"],
        )
        kept = right(found)
        columns = ((one.taken_ms for one in kept), (one.refused_ms for one in kept), (one.extra_ms for one in kept))
        shown.add_row("engine", *(spread(values, ".1f") for values in columns), verdict(found))
        return [shown]

    def aims(self, found: Sequence[RefusedResult]) -> list[Aim]:
        extra = [one.extra_ms for one in right(found)]
        return [at_most("abort and send again for one refused event", MOST_MS, extra, "ms")] if extra else []


def _refusals(bench: Bench, turn: int, events: int) -> RefusedResult:
    cluster = Cluster(bench.cluster.bootstrap_servers, 1, f"refused{turn}-")
    job = cluster.job()
    outputs = [cluster.source(f"{job.group}-o{number}") for number in range(events)]
    letters = cluster.source(f"{job.group}.{job.source}.dead-letters")
    taken, refused = [], []
    with (
        running("benchmarks.members.refusing", job) as child,
        _Traffic(job, [*outputs, letters], child.check) as traffic,
    ):
        for output in outputs:
            traffic.milliseconds(Chosen(output, 0))
            taken.append(traffic.milliseconds(*(Chosen(output, number) for number in range(1, 4))))
            cluster.set_topic(output, {"max.message.bytes": str(LIMIT)})
            big = Chosen(output, 5, random.Random(turn).randbytes(LIMIT).hex())
            refused.append(traffic.milliseconds(Chosen(output, 4), big, Chosen(output, 6)))
    right_order = [(output, number) for output in outputs for number in (0, 1, 2, 3, 4, 6)]
    seen = [(topic, number) for topic, number in traffic.seen if topic != letters]
    fault = "" if sorted(seen) == right_order and len(traffic.seen) == 7 * events else f"outputs are {traffic.seen}"
    cluster.delete(*outputs)
    cluster.forget(job, source=True)
    return RefusedResult(turn, fault, events, statistics.median(taken), statistics.median(refused), os.getloadavg()[0])


class _Traffic:
    """Sends events to a source, and reads what it commits."""

    def __init__(self, job: Job, outputs: Sequence[str], check: Callable[[], object]) -> None:
        settings = {"bootstrap.servers": job.bootstrap_servers, "log_level": 2}
        self._source, self._check = job.source, check
        self._producer = Producer(settings | {"linger.ms": 0})
        self._consumer = Consumer(
            settings | {"group.id": "reader", "isolation.level": "read_committed", "enable.auto.commit": False}
        )
        self._consumer.assign([TopicPartition(name, 0, 0) for name in outputs])
        self.seen: list[tuple[str, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def milliseconds(self, *events: Chosen) -> float:
        """Send events, and wait for as many records. Raises ``Failed``."""
        began, wanted = time.monotonic(), len(self.seen) + len(events)
        for event in events:
            self._producer.produce(self._source, msgspec.json.encode(event), "k", headers=[("__grt__", b"Chosen")])
        self._producer.flush(PATIENCE_SECONDS)
        while len(self.seen) < wanted:
            if time.monotonic() > began + PATIENCE_SECONDS:
                raise Failed(f"{len(self.seen)} of {wanted} records are committed after {PATIENCE_SECONDS:g} s")
            self._check()
            message = self._consumer.poll(0.5)
            if message is not None and message.error() is None:
                number = msgspec.json.decode(message.value() or b"", type=Chosen).number
                self.seen.append((message.topic() or "", number))
        return (time.monotonic() - began) * 1000


MEASURES = (Idle(), ThreeBrokers(), Refused())
