"""The account workload driven through the engine and through the loop written by hand, a window of it to be measured.

First so many events that are not measured (every key is known then, slices and transactions have their size), then,
once all of them are committed, so many that are: from the first poll until the last of them is settled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import confluent_kafka
import msgspec

from benchmarks import handwritten
from benchmarks.engine import MADE, by_batch, by_concurrency, by_scheduler, source_of
from benchmarks.instructions.scripted import (
    BACKLOG,
    LIVE,
    TOPICS,
    Feed,
    NoWatch,
    PacedConsumer,
    PacedFeed,
    ScriptedConnections,
    ScriptedConsumer,
    ScriptedProducer,
    Traffic,
    connected,
    messages,
)
from benchmarks.instructions.turns import CountedLoop, Turns
from benchmarks.workload import Job
from streams import EventSource
from streams.runtime.system import Environment
from streams.testing.simulation.virtual_time import Fibers, VirtualTimeLoop, elapse

Trace = Sequence[tuple[str, bytes]]
SAMPLED: Trace = [("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
LIMIT_SECONDS = 3_600.0
"""Of virtual time."""
POLL_SECONDS = 0.001


class Meter(Protocol):
    """A counter. ``begin`` and ``end`` are called on every thread that takes part, when nothing is under way."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


def by_engine(
    made: Callable[[Job], EventSource[Any]],
    meter: Meter,
    warm: int,
    events: int,
    trace: Trace = (),
    inputs: int = 1,
    traffic: Traffic = BACKLOG,
    each: int = 1,
) -> Turns | None:
    """Drive ``events`` events through the event source; ``each`` is committed as so many. Returns the loop's turns, of
    live traffic. Raises ``RuntimeError`` if it stops."""
    turns = Turns()
    loop = CountedLoop(LIMIT_SECONDS, turns) if traffic.pause else VirtualTimeLoop(LIMIT_SECONDS)
    try:
        found = messages(warm + events, trace, inputs, traffic)
        feed = PacedFeed(found, traffic, loop.time) if traffic.pause else Feed(found)
        loop.run_main(_drive_engine(loop, made(JOB), meter, feed, warm, events, traffic, turns, each))
    finally:
        loop.close()
    return turns if traffic.pause else None


async def _drive_engine(
    loop: VirtualTimeLoop,
    source: EventSource[Any],
    meter: Meter,
    feed: Feed,
    warm: int,
    events: int,
    traffic: Traffic,
    turns: Turns,
    each: int,
) -> None:
    fibers = Fibers(loop)
    place = {"feed": feed, "meter": meter, "pause": staticmethod(fibers.pause), "turns": turns}
    kind = PacedConsumer if traffic.pause else ScriptedConsumer
    consumer = type("Consumer", (_Measured, kind), place)
    environment = Environment(rng=lambda: random.Random(1), wall_seconds=lambda: 1.7e9 + loop.time(), watchdog=NoWatch)
    with (
        mock.patch("streams.kafka.reading.consumer.Consumer", consumer),
        mock.patch(
            "streams.kafka.reading.consumer.time", SimpleNamespace(monotonic=partial(float, 1))
        ),  # none is silent
        mock.patch("streams.kafka.wire.cluster.connect", partial(connected, traffic.partitions, turns)),
    ):
        running = loop.create_task(
            source._run.consume(lambda config: ScriptedConnections(config, fibers, traffic.partitions), environment),
            name="source",
        )

        async def settled(count: int) -> None:
            feed.allow(count)
            if traffic.pause:  # looks at it would be the loop's turns, too
                await elapse(count / traffic.together * traffic.pause)
            while source._run.engine is None or source._run.engine.committed_events < count * each:
                await elapse(POLL_SECONDS)
                if running.done():
                    await running
                    raise RuntimeError("the source stopped")

        await elapse(1)  # all partitions are at work: what comes earlier is dropped, and is not fetched again here
        await settled(warm)
        await elapse(0.1)
        feed.window = True
        await elapse(0.1)
        assert source._run.engine is not None
        before, turns.is_counting = source._run.engine.committed_transactions, True
        meter.begin()
        await settled(warm + events)
        meter.end()
        turns.is_counting, turns.transactions = False, source._run.engine.committed_transactions - before
        feed.window = False
        await elapse(0.1)
        await source.stop()
        await running
    fibers.close()


class _Measured:
    """A consumer that is polled on a thread of its own, which is to be measured as well."""

    feed: Feed
    meter: Meter
    _is_measured = False

    def poll(self, timeout: float) -> confluent_kafka.Message | None:
        if self.feed.window is not self._is_measured:
            self._is_measured = self.feed.window
            (self.meter.begin if self._is_measured else self.meter.end)()
        return super().poll(timeout)  # type: ignore[misc,no-any-return]


def by_hand(meter: Meter, warm: int, events: int, per_transaction: int = 5_000) -> None:
    """The same by ``benchmarks.handwritten``, its commits made in line."""
    feed = Feed(messages(warm + events))
    consumer = type("Consumer", (ScriptedConsumer,), {"feed": feed, "pause": lambda *_: None})
    job = msgspec.structs.replace(JOB, options={"events": str(per_transaction), "delay_ms": "1000000"})
    with (
        mock.patch.object(handwritten, "Consumer", consumer),
        mock.patch.object(handwritten, "Producer", ScriptedProducer),
    ):
        loop = handwritten.Loop(job)
        producer = loop.producers[0]

        def fill(count: int) -> None:
            feed.allowed += count
            done = 0
            while done < count:
                loop.events = min(count - done, per_transaction)
                done += loop._fill(producer)
                producer.flush()
                offsets = [confluent_kafka.TopicPartition("in", *position) for position in loop.offsets.items()]
                loop.offsets = {}
                producer.send_offsets_to_transaction(offsets, None, 10)
                producer.commit_transaction(10)

        fill(warm)
        meter.begin()
        fill(events)
        meter.end()


JOB = Job(
    bootstrap_servers="127.0.0.1:1",
    group="g",
    source=TOPICS[0],
    output="out",
    changelog="g.in.changelog",
)


def two_inputs(job: Job) -> EventSource[Any]:
    """Build an event source with a second input."""
    source = source_of(job)
    source.input(TOPICS[1])
    return source


def with_options(name: str, job: Job, **options: str) -> EventSource[Any]:
    """Build an event source of ``benchmarks.engine`` with these options."""
    return MADE[name](msgspec.structs.replace(job, options=options))


def with_metrics(made: Callable[[Job], EventSource[Any]], job: Job) -> EventSource[Any]:
    """Build an event source whose metrics are exported."""
    from streams.observability import PrometheusMetrics

    source = made(job)
    PrometheusMetrics(source)
    return source


def with_traces(made: Callable[[Job], EventSource[Any]], job: Job) -> EventSource[Any]:
    """Build an event source whose sampled events have spans, which are exported to nowhere."""
    from opentelemetry.sdk.trace import TracerProvider

    from streams.observability import OpenTelemetryTraces

    source = made(job)
    OpenTelemetryTraces(source, tracer_provider=TracerProvider())
    return source


SYSTEMS: dict[str, Callable[[Meter, int, int], Turns | None]] = {
    "engine": partial(by_engine, source_of),
    "two-inputs": partial(by_engine, two_inputs, inputs=2),
    "batch": partial(by_engine, by_batch),
    "once": partial(by_engine, partial(with_options, "once", id="offset")),
    "copies": partial(by_engine, partial(with_options, "once", id="account")),
    "parked": partial(by_engine, partial(with_options, "parking", bad="100", fails="1000000")),
    "durable": partial(by_engine, MADE["durable"], each=2),
    "scheduler": partial(by_engine, by_scheduler),
    "concurrency": partial(by_engine, by_concurrency),
    "metrics": partial(by_engine, partial(with_metrics, source_of)),
    "scheduler-metrics": partial(by_engine, partial(with_metrics, by_scheduler)),
    "traces": partial(by_engine, partial(with_traces, source_of)),
    "traced": partial(by_engine, partial(with_traces, source_of), trace=SAMPLED),
    "scheduler-traced": partial(by_engine, partial(with_traces, by_scheduler), trace=SAMPLED),
    "live": partial(by_engine, source_of, traffic=LIVE),
    "hand-written": by_hand,
}
"""Plain handler, with one input and with two; batch handler; plain handler with ``once=``, all new, and all copies; one
key in a hundred parked; a durable job for each event; ``AsyncJobScheduler``, ``concurrency=``; the first and the
scheduler with their metrics exported, the first with traces of which no event is part, both with every event sampled;
the first with live traffic; and the loop written by hand."""
