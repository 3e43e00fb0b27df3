"""Against a real broker: what is cancelled leaves the group, what hangs stops nobody else, and ``latest`` is the
latest of the first start."""

from __future__ import annotations

import asyncio

import pytest

from streams import EventContext
from streams.testing.fixtures import BrokerAddress
from tests.broker.engine_kit import PATIENCE, Added, Lab, Running, Totals, added, count, source_of, until

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]


@pytest.fixture
def lab(kafka_broker: BrokerAddress, topic_prefix: str) -> Lab:
    return Lab(kafka_broker.bootstrap_servers, topic_prefix)


async def members(lab: Lab) -> int:
    """Members that the broker counts in the group."""

    def describe() -> int:
        [future] = lab.admin._client.describe_consumer_groups([lab.group]).values()
        return len(future.result(PATIENCE).members)

    return await asyncio.to_thread(describe)


async def test_who_is_cancelled_leaves_the_group(lab: Lab) -> None:
    """In the middle of a handler. Else its partitions are nobody's until the session expires, and the same one started
    again is taken for a rival."""
    await lab.create()
    hangs = asyncio.Event()
    go = asyncio.Event()

    async def handler(ctx: EventContext[Totals], event: Added) -> None:
        count(ctx, event)
        if event.deed == "hang" and not go.is_set():
            hangs.set()
            await go.wait()

    source = lab.source(instance_id="same")
    source.register_event_type(Added, handler)
    await lab.add("a", "b")
    task = asyncio.create_task(source.consume_events())
    await until(lambda: source.statistics().committed_events == 2, "it works")
    await lab.add("c", deed="hang")
    await until(hangs.is_set, "the handler hangs")
    assert await members(lab) == 1
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE)
    assert task.cancelled()
    assert await members(lab) == 0
    go.set()
    async with Running(source) as run:  # the same one again
        await lab.add("d")
        await run.until_handled(4)
    assert await lab.counts() == dict.fromkeys("abcd", 1)
    await lab.check_settled(lab.topic, lab.changelog)


async def test_a_hung_partition_whose_queue_is_not_full(topic_prefix: str, kafka_broker: BrokerAddress) -> None:
    """Three of four hang, each with less than it may queue, and together with all that may be on its way."""
    lab = Lab(kafka_broker.bootstrap_servers, topic_prefix, partitions=4)
    await lab.create()
    gate = asyncio.Event()
    events = 1_000

    async def handler(ctx: EventContext[Totals], event: Added) -> None:
        if ctx.topic_partition.partition < 3:
            await gate.wait()
        count(ctx, event)

    source = lab.source(max_poll_records=20)  # so 160 are on their way at most, and 5,000 may be queued
    source.register_event_type(Added, handler)
    for partition in range(4):
        for _ in range(events):
            await lab.send(added("n"), partition=partition)
    await lab.flush()
    async with Running(source) as run:
        await run.until(lambda: source.statistics().partitions[3].next_offset == events, "the fourth one goes on")
        assert sum(partition.queued_records for partition in source.statistics().partitions) < 3 * events
        gate.set()
        await run.until_handled(*[events] * 4)
    assert [await lab.counts(partition) for partition in range(4)] == [{"n": events}] * 4


async def test_latest_is_the_latest_of_the_first_start(lab: Lab) -> None:
    """It goes away before it has handled anything; what came meanwhile is handled by the next one."""
    await lab.create()
    await lab.add("before", "before")

    first = source_of(lab, auto_offset_reset="latest")
    async with Running(first) as run:
        await run.until(lambda: first.statistics().committed_transactions == 1, "the start is committed")
        first.stop_now()
        await first.wait_stopped()
    await lab.add("a", "b")
    async with Running(source_of(lab, auto_offset_reset="latest")) as run:
        await run.until_handled(4)
    assert await lab.counts() == {"a": 1, "b": 1}
    await lab.check_settled(lab.topic, lab.changelog)
