"""A source whose keys are visited, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from streams import EventContext, EventSource, EventSourceConfig, Table
from streams.records import Record
from streams.stores.named_table import NamedTable
from streams.stores.several import Stores
from streams.testing import TestDriver
from tests.vocabulary import Put, config_of

VISITS = "shop.orders.visits"
SEEN = "seen"
PARTITIONS = 2
Ctx = EventContext[Any]


def config(**settings: Any) -> EventSourceConfig:
    settings = {"visits": True} | settings
    return config_of(group_id="shop", topic="orders", num_partitions=PARTITIONS, **settings)


def look(ctx: Ctx, key: str, value: int) -> None:
    """Count in the key's row, and say which run it was."""
    run: Any = ctx.timer
    ctx.store.put(key, value + 1)
    ctx.forward(Record(SEEN, run.run.encode(), key.encode(), partition=ctx.topic_partition.partition))


def build(handler: Callable[..., Any] | None = look, store: Any = None, **options: Any) -> EventSource[Any]:
    of_visit = {name: options.pop(name) for name in ("table", "on_error", "blocking") if name in options}
    source = EventSource(config(**options), store or Table.factory(key=str, value=int, ordered=True))

    @source.on
    def put(ctx: Ctx, event: Put) -> None:
        if event.value is None:
            ctx.store.delete(event.key)
        else:
            ctx.store.put(event.key, event.value)

    if handler is not None and source.config.visits:
        source.register_visit("look", handler, **of_visit)
    return source


def fill(driver: TestDriver[Any], count: int, partition: int = 0) -> None:
    for number in range(count):
        driver.send(Put(f"k{number:03}", 0), partition=partition, wait=False)
    driver.settle()


def seen(driver: TestDriver[Any], run: str = "run") -> Counter[str]:
    return Counter((one.key or b"").decode() for one in driver.outputs(SEEN) if one.value == run.encode())


def once(count: int) -> Counter[str]:
    return Counter(f"k{number:03}" for number in range(count))


def driven(source: Any, **options: Any) -> TestDriver[Any]:
    return TestDriver(source, topics={SEEN: PARTITIONS}, **options)


class Shop(Stores):
    orders = NamedTable.of(str, int, ordered=True)
    others = NamedTable.of(str, int)
