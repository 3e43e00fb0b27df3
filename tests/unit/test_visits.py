"""Visits on the driver."""

from __future__ import annotations

from typing import Any

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, Table, event_type
from streams.testing import TestDriver


@event_type("VisitsPut")
class Put(msgspec.Struct, frozen=True):
    key: str
    value: int


@event_type("VisitsSeen")
class Seen(msgspec.Struct, frozen=True):
    key: str
    value: int


OUT = "seen"


def build(**settings: Any) -> EventSource[Table[str, int]]:
    config = EventSourceConfig(group_id="g", topic="t", num_partitions=2, visits=True, **settings)
    source = EventSource(config, store=Table.factory(key=str, value=int, ordered=True))

    @source.on
    def put(ctx: EventContext[Table[str, int]], event: Put) -> None:
        ctx.store.put(event.key, event.value)

    @source.register_visit("look")
    def look(ctx: EventContext[Table[str, int]], key: str, value: int) -> None:
        ctx.forward(OUT, Seen(key, value), key=key)
        ctx.store.put(key, value + 1)

    return source


def test_each_key_is_visited_once() -> None:
    with TestDriver(build(), topics={OUT: 2}) as driver:
        for number in range(100):
            driver.send(Put(f"k{number}", number), key=f"k{number}", wait=False)
        driver.settle()
        driver.start_visit("look")
        assert sorted(one.value for one in driver.outputs(OUT, Seen)) == list(range(100))
        driver.start_visit("look")
        assert len(driver.outputs(OUT)) == 100
        driver.start_visit("look", run_id="two")
        assert len(driver.outputs(OUT)) == 200
        print(driver.visits(0))
        driver.check()
