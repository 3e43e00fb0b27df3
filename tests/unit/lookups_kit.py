"""A source that looks into rates, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streams import EventContext, EventSource, Lookup, Table
from streams.records import IncomingRecord, Record
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, decode_offset
from streams.runtime.reading.log_reader import LogReader
from streams.testing import TestDriver
from tests.unit.joins_kit import say
from tests.vocabulary import Paid, config_of

RATES, SEEN = "rates", "seen"


class Shop:
    """A source that looks into rates. ``options``: of the lookup; ``looks=False``: without it."""

    def __init__(self, *, looks: bool = True, options: dict[str, Any] | None = None, **settings: Any) -> None:
        config = config_of(group_id="shop", topic="orders", num_partitions=2, **settings)
        self.source: EventSource[Any] = EventSource(config, Table.factory(key=str, value=int))
        self.rates: Lookup[str, int] | None = None
        if looks:
            self.rates = self.source.lookup(RATES, key=str, value=int, **(options or {}))
        self.source.register_event_type(Paid, self.paid)

    def paid(self, ctx: EventContext[Any], event: Paid) -> None:
        say(ctx, f"{event.name} at {self.rate(ctx, event.name)}")

    def rate(self, ctx: EventContext[Any], currency: str) -> int | None:
        return None if self.rates is None else ctx.lookup(self.rates).get(currency)


def seen(driver: TestDriver[Any]) -> list[str]:
    return [(record.value or b"").decode() for record in driver.new_outputs(SEEN)]


def pay(driver: TestDriver[Any], partition: int = 0, currency: str = "EUR", *, wait: bool = True) -> None:
    driver.send(Paid(currency), partition=partition, key=currency, wait=wait)


def rate(driver: TestDriver[Any], value: int, key: str = "EUR", *, wait: bool = True) -> None:
    driver.table(RATES).put(key, value, wait=wait)


def raw(driver: TestDriver[Any], key: bytes | None, value: bytes | None, *, wait: bool = True) -> IncomingRecord:
    return driver.send_record(Record(RATES, value, key, None, 0), wait=wait)


def reader(driver: TestDriver[Any], member: int) -> LogReader:
    engine = driver._world.members[member].engine
    assert engine is not None
    return engine.lookups._readings[RATES].reader


def hold(driver: TestDriver[Any], member: int) -> Callable[[], None]:
    """Hold a member's lookup where it is. Returns what lets it go on."""
    reader(driver, member).running().pause(None)
    return lambda: reader(driver, member).running().resume(None, None)


def record_of(driver: TestDriver[Any], partition: int = 0) -> OffsetRecord:
    log = driver._world.broker.log("shop.orders.changelog", partition)
    return decode_offset([one for one in log.committed(0, log.end) if one.key == OFFSET_KEY][-1])


def position_of(driver: TestDriver[Any]) -> tuple[str, tuple[int, ...]]:
    """Return the position in the lookup that is in the last offset record of partition 0."""
    found = record_of(driver).position_of_lookup(RATES)
    assert found is not None
    return found.topic_id, found.offsets
