"""Transactions are cut until they fit their time. Bounds of queues: ``tests/unit/test_runtime_backpressure.py``."""

from __future__ import annotations

import pytest

from streams import EventContext, PoolConfig, Record
from streams.errors import TransactionFailed
from streams.testing.faults import KafkaProxy, Rule
from tests.broker.engine_kit import Lab, Running
from tests.vocabulary import Added, Totals, added

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]

PARTITIONS = 2

SLOW_LINE = {
    "transaction_timeout_seconds": 1.25,
    "call_timeout_seconds": 2.0,
    "pool": PoolConfig(batch_delay_seconds=0.5),
}
"""Records have a second to be acknowledged."""


async def test_a_backlog_gets_through_a_slow_line(lab: Lab) -> None:
    """All of it in one transaction takes three times as long as it has: it is cut until its parts fit."""
    await lab.create()
    events, size = 300, 2_000
    for number in range(events):
        await lab.send(added(f"n{number % 7}"), partition=number % 2)
    await lab.flush()

    def handler(ctx: EventContext[Totals], event: Added) -> None:
        total = ctx.store.get(event.name, 0) + 1
        ctx.store.put(event.name, total)
        value = b"%s %d" % (event.name.encode(), total)
        ctx.forward(Record(lab.output, value.ljust(size), event.name.encode(), partition=ctx.topic_partition.partition))

    with KafkaProxy(lab.bootstrap) as proxy:
        proxy.add(Rule(apis={"Produce"}, on="request", action="slow", bytes_per_second=200_000))
        source = lab.source(bootstrap_servers=proxy.bootstrap_servers, recovery_timeout_seconds=25.0, **SLOW_LINE)
        source.register_event_type(Added, handler)
        async with Running(source) as run:
            await run.until_committed(events)
            assert source.statistics().committed_transactions >= 3
    for partition in range(2):
        outputs = [(record.value or b"").split() for record in await lab.records(partition=partition)]
        counts: dict[bytes, int] = {}
        for number in range(partition, events, 2):
            name = b"n%d" % (number % 7)
            counts[name] = counts.get(name, 0) + 1
            assert outputs.pop(0) == [name, b"%d" % counts[name]]
        assert not outputs
        assert await lab.counts(partition) == {name.decode(): count for name, count in counts.items()}
    await lab.check_settled()


async def test_one_event_that_does_not_fit_its_time_says_what_it_would_need(lab: Lab) -> None:
    await lab.create()
    await lab.add("small", "large", "small", partition=1)

    def handler(ctx: EventContext[Totals], event: Added) -> None:
        ctx.forward(Record(lab.output, b"x" * (400_000 if event.name == "large" else 10), partition=0))

    with KafkaProxy(lab.bootstrap) as proxy:
        proxy.add(Rule(apis={"Produce"}, on="request", action="slow", bytes_per_second=100_000))
        source = lab.source(bootstrap_servers=proxy.bootstrap_servers, recovery_timeout_seconds=3.0, **SLOW_LINE)
        source.register_event_type(Added, handler)
        with pytest.raises(TransactionFailed) as failed:
            async with Running(source) as run:
                await run.until(lambda: False, "it stops")
    assert f"the event {lab.topic}[1]@1 sends and changes 400000 bytes" in str(failed.value)
    assert "within 1 seconds" in str(failed.value)
    assert "fits at 400000 bytes/s" in str(failed.value)
    assert len(await lab.records()) == 1, "what is before it is committed"
