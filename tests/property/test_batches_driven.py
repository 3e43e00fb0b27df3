"""Batchers and batch producers in the real engine, at any settings and with crashes: nothing lost, order kept, no
deadlock, each event's effects once."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streams import (
    DEAD_LETTER,
    AsyncBatcher,
    BatcherConfig,
    BatchItem,
    BatchProducer,
    Delivery,
    EventContext,
    EventSource,
    EventSourceConfig,
    Record,
    Table,
    event_type,
)
from streams.testing import TestDriver
from tests.property.kit import seeded

pytestmark = pytest.mark.usefixtures("quiet")

EXAMPLES = int(os.environ.get("BATCH_EXAMPLES", "40"))
OUT, SIDE = "out", "side"


Item = tuple[int, float, bool]
"""Key, seconds that its call takes, whether it fails."""


class _Work(msgspec.Struct, frozen=True):
    items: list[Item]


Batched: Any = event_type("Batched")(type("Batched", (_Work,), {"__module__": __name__}, frozen=True))
InTurn: Any = event_type("InTurn")(type("InTurn", (_Work,), {"__module__": __name__}, frozen=True))
Sent: Any = event_type("Sent")(type("Sent", (_Work,), {"__module__": __name__}, frozen=True))
Plain: Any = event_type("Plain")(type("Plain", (_Work,), {"__module__": __name__}, frozen=True))
CLASSES = {"Batched": Batched, "InTurn": InTurn, "Sent": Sent, "Plain": Plain}


@event_type("Done")
class Done(msgspec.Struct, frozen=True):
    """What an event led to. ``seen``: how many were done in its partition, this one included."""

    partition: int
    offset: int
    seen: int
    sent: list[tuple[int, int]]


class World:
    """A source, and what its calls meet."""

    def __init__(self, config: BatcherConfig, queued: int, partitions: int, max_sent: int) -> None:
        self.config = config
        self.running: Counter[tuple[int, int]] = Counter()
        self.calls: list[list[tuple[int, int, int]]] = []  # (partition, key, offset) of each item
        self.overlaps: list[tuple[int, int]] = []
        settings = EventSourceConfig(
            group_id="g",
            topic="in",
            num_partitions=partitions,
            bootstrap_servers="nowhere",
            error_policy=DEAD_LETTER,
            max_queued_records=queued,
        )
        self.source: EventSource[Any] = EventSource(settings, Table.factory(key=str, value=int))
        batcher: AsyncBatcher[Any, Any] = AsyncBatcher(self.source, self.execute, self.done, config=config)
        batcher.register_event_type(
            Batched, lambda record, event: self.items(record.partition, record.offset, event.items)
        )
        producer: BatchProducer[Any] = BatchProducer(self.source, self.sent, max_queued_records=max_sent)
        producer.register_event_type(
            Sent,
            lambda record, event: [
                Record(SIDE, b"%d@%d:%d" % (record.partition, record.offset, number), b"%d" % item[0])
                for number, item in enumerate(event.items)
            ],
        )

        @self.source.register_event_type(InTurn)
        async def in_turn(ctx: EventContext[Any], event: _Work) -> None:
            await batcher.submit(ctx, self.items(-1 - ctx.topic_partition.partition, ctx.offset, event.items))
            self.done(ctx, [])

        self.source.register_event_type(Plain, lambda ctx, event: self.done(ctx, []))

    def items(self, partition: int, offset: int, items: Sequence[Item]) -> list[BatchItem[Any]]:
        return [BatchItem(item[0], (partition, offset, *item)) for item in items]

    async def execute(self, items: list[BatchItem[Any]]) -> list[Any]:
        assert 1 <= len(items) <= self.config.max_batch_size
        keys = {(item.value[0], item.value[2]) for item in items}
        self.overlaps.extend(key for key in keys if self.running[key])
        self.running.update(keys)
        self.calls.append([(item.value[0], item.value[2], item.value[1]) for item in items])
        try:
            await asyncio.sleep(max(item.value[3] for item in items))
        finally:
            self.running.subtract(keys)
        return [RuntimeError("told to fail") if item.value[4] else None for item in items]

    def done(self, ctx: EventContext[Any], items: list[BatchItem[Any]], sent: Sequence[tuple[int, int]] = ()) -> None:
        seen = ctx.store.get("seen", 0) + 1
        ctx.store.put("seen", seen)
        partition = ctx.topic_partition.partition
        ctx.forward(OUT, Done(partition, ctx.offset, seen, list(sent)), partition=partition)

    def sent(self, ctx: EventContext[Any], deliveries: list[Delivery]) -> None:
        self.done(ctx, [], [(delivery.partition, delivery.offset) for delivery in deliveries])


item = st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.01, 0.3]), st.sampled_from([False] * 7 + [True]))
configs = st.builds(
    BatcherConfig,
    max_batch_size=st.integers(1, 4),
    max_delay_seconds=st.sampled_from([0.0, 0.005, 0.4]),
    max_concurrent_batches=st.integers(1, 3),
    max_queued_items=st.integers(1, 6),
)
kinds = st.sampled_from(["Batched", "Batched", "Batched", "InTurn", "Sent", "Plain"])
events = st.lists(st.tuples(st.integers(0, 2), kinds, st.lists(item, max_size=7)), max_size=30)
faults = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(["crash", "evict", "fence", "abort", "rebalance", "advance"])),
    max_size=4,
)


def check(world: World, driver: TestDriver[Any], given: Sequence[tuple[int, str, list[Item]]], partitions: int) -> None:
    expected: dict[int, list[int]] = defaultdict(list)
    dead: list[tuple[int, int]] = []
    offsets: Counter[int] = Counter()
    for partition, kind, items in given:
        number = partition % partitions
        offset = offsets[number]
        offsets[number] += 1
        if kind in ("Batched", "InTurn") and any(one[2] for one in items):
            dead.append((number, offset))
        else:
            expected[number].append(offset)
    side = {(record.partition, record.offset): record.value for record in driver.outputs(SIDE)}
    done: list[Done] = [found.event if hasattr(found, "event") else found for found in driver.outputs(OUT, Done)]
    for number in range(partitions):
        mine = [one for one in done if one.partition == number]
        assert [one.offset for one in mine] == expected[number], "each once, in the order of the partition"
        assert [one.seen for one in mine] == list(range(1, len(mine) + 1)), "the store saw each once"
        for one in mine:
            for at, place in enumerate(one.sent):
                assert side[place] == b"%d@%d:%d" % (one.partition, one.offset, at), (
                    "it is where the finalizer was told"
                )
    assert len(driver.dead_letters()) == len(dead)
    assert driver.committed_offsets() == {
        number: offsets[number] for number in range(partitions) if offsets[number]
    } or {number: offset for number, offset in driver.committed_offsets().items() if offset} == {
        number: offsets[number] for number in range(partitions) if offsets[number]
    }


@pytest.mark.timeout(0)
@seeded
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(configs, st.sampled_from([1, 2, 5, 50]), st.integers(1, 3), st.integers(1, 4), events, st.integers(0, 1000))
def test_everything_is_done_in_order_at_any_settings(
    config: BatcherConfig,
    queued: int,
    partitions: int,
    max_sent: int,
    events: list[tuple[int, str, list[Item]]],
    number: int,
) -> None:
    world = World(config, queued, partitions, max_sent)
    with TestDriver(world.source, seed=number, topics={SIDE: 2}) as driver:
        for partition, kind, items in events:
            driver.send(CLASSES[kind](items), partition=partition % partitions, wait=False)
        driver.settle(600.0)
        check(world, driver, events, partitions)
    assert world.overlaps == [], "a key is in one call at a time"
    order: dict[tuple[int, int], list[int]] = defaultdict(list)
    for call in world.calls:
        for partition, key, offset in call:
            order[partition, key].append(offset)
    for offsets in order.values():
        assert offsets == sorted(offsets), "in the order of the events"


@pytest.mark.timeout(0)
@seeded
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(configs, st.sampled_from([2, 50]), st.integers(1, 3), events, faults, st.integers(0, 1000))
def test_effects_are_exactly_once_whatever_happens(
    config: BatcherConfig,
    queued: int,
    partitions: int,
    events: list[tuple[int, str, list[Item]]],
    faults: list[tuple[int, str]],
    number: int,
) -> None:
    world = World(config, queued, partitions, 3)
    with TestDriver(world.source, members=2, seed=number, topics={SIDE: 2}) as driver:
        for at, (partition, kind, items) in enumerate(events):
            for _, fault in [one for one in faults if one[0] == at]:
                strike(driver, fault)
            driver.send(CLASSES[kind](items), partition=partition % partitions, wait=False)
        driver.settle(600.0)
        check(world, driver, events, partitions)


def strike(driver: TestDriver[Any], fault: str) -> None:
    if fault == "rebalance":
        driver.rebalance()
    elif fault == "advance":
        driver.advance(0.2)
    elif driver.members:
        member = driver.members[-1]
        getattr(driver, fault)(member)
        if fault == "crash":
            driver.restart(member)
