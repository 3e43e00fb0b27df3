"""Timers in virtual time: of a type whose records go beside the transactions, and over moves and crashes."""

from __future__ import annotations

from typing import Any

from streams import BatchProducer, EventContext, EventSource, EventSourceConfig, Record, Table
from streams.testing import TestDriver
from tests.unit.runtime_kit import Named
from tests.unit.timer_kit import Ring


def made() -> EventSource[Any]:
    config = EventSourceConfig(group_id="reminders", topic="asked", num_partitions=2)
    source: EventSource[Any] = EventSource(config, Table.factory(key=str, value=int))

    def finalize(ctx: EventContext[Any], deliveries: Any) -> None:
        assert ctx.timer is not None
        ctx.store.put(ctx.timer.name, ctx.store.get(ctx.timer.name, 0) + len(deliveries))

    producer: BatchProducer[Any] = BatchProducer(source, finalize)
    source.register_event_type(
        Named, lambda ctx, event: ctx.schedule_in(60, Ring(event.name), name=event.name) and None
    )
    producer.register_event_type(Ring, lambda record, event: Record("mails", event.name.encode()))
    return source


def test_records_beside_the_transactions() -> None:
    with TestDriver(made, topics={"mails": 1}) as driver:
        driver.send(Named("ann"), key="ann", partition=0)
        driver.advance(61)
        assert [record.value for record in driver.outputs("mails")] == [b"ann"]
        assert dict(driver.store(0).items()) == {"ann": 1}
        assert driver.statistics(driver.members[0]).partitions[0].timers == 0


def test_over_members_that_come_and_go() -> None:
    with TestDriver(made, members=2, topics={"mails": 1}, seed=3) as driver:
        for number in range(10):
            driver.send(Named(f"n{number}"), key=f"n{number}", partition=number % 2)
        driver.crash(0)
        driver.restart(0)
        driver.advance(30)
        driver.join()
        driver.advance(40)
        found = [dict(driver.store(partition).items()) for partition in range(2)]
        assert found[0] | found[1] == {f"n{number}": 1 for number in range(10)}
