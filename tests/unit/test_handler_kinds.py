"""A new kind of handler is one class: here are handlers that get (key, event) instead of an event."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from streams import DEAD_LETTER, ErrorResponse, EventContext, EventSource, Retry
from streams.core.router import Route
from streams.core.timers import Timer
from streams.errors import RegistrationError
from streams.events import event_type_of
from streams.records import IncomingRecord
from streams.runtime.partition.handler_kind import HandlerKind
from streams.runtime.partition.host import Host
from streams.runtime.partition.state import Partition
from streams.runtime.partition.unit import Unit
from streams.testing import TestDriver
from tests.unit.handlers_kit import config
from tests.vocabulary import TOTALS, Added


class PairContext(EventContext[Any]):
    """Knows that its handler is of this kind."""


class Pairs:
    """All of a kind of handlers that there is to say; it lacks only its option of ``register_event_type``."""

    name, option, instead = "pairs", "pairs=True", "there is nothing else"
    keep = None

    def argument(self, partition: Partition, host: Host, record: IncomingRecord, event: Any) -> Any:
        return (record.key or b"").decode(), event

    def context(
        self,
        partition: Partition,
        host: Host,
        records: Sequence[IncomingRecord],
        attempt: int = 1,
        timer: Timer | None = None,
    ) -> PairContext:
        where, limit = partition.topic_partition, host.message_limit
        return PairContext(
            partition.store, where, records[0], [], [], limit, attempt, partition.timers, timer=timer, _host=host
        )

    def run(
        self, partition: Partition, host: Host, route: Route, records: list[IncomingRecord], start: int, stop: int
    ) -> tuple[int, BaseException | None]:
        record = records[start]
        ctx = self.context(partition, host, [record])
        unit = Unit(partition, ctx._outputs, ctx._journal)
        unit.begin()
        try:
            answer = route.handler(
                ctx, self.argument(partition, host, record, route.decode(record.value, route.version))
            )
        except (Exception, asyncio.CancelledError) as error:
            return start, unit.fail(ctx, error)
        failed = unit.complete(ctx, answer, record.offset + 1)
        if failed is None:
            unit.end()
            unit.admit(host.pool)
        return start + (failed is None), failed


PAIRS: HandlerKind = Pairs()


def source_of(handler: Any, policy: Retry) -> EventSource[Any]:
    source: EventSource[Any] = EventSource(config(), TOTALS)
    route = Route("Added", event_type_of(Added), handler, blocking=False, policy=policy, kind=PAIRS)
    source._declared.router.add(route)
    return source


def test_a_new_kind_has_attempts_policies_and_an_undo() -> None:
    seen: list[tuple[str, int]] = []

    def add(ctx: PairContext, pair: tuple[str, Added]) -> None:
        key, event = pair
        assert type(ctx) is PairContext
        seen.append((key, ctx.attempt))
        ctx.store.put("sum", ctx.store.get("sum", 0) + event.amount)
        if ctx.attempt <= int(event.deed or 0):
            raise ValueError("not yet")

    retried = Retry(attempts=2, backoff_seconds=0.0, then=ErrorResponse.DEAD_LETTER)
    with TestDriver(source_of(add, retried)) as driver:
        for key, event in (
            ("a", Added("n")),
            ("b", Added("n", 10, "1")),
            ("c", Added("n", 100, "5")),
            ("d", Added("n", 1000)),
        ):
            driver.send(event, key=key, wait=False)
        driver.settle()
        driver.check()
        assert [letter.key for letter in driver.dead_letters()] == [b"c"]
        assert dict(driver.restored_store(0).items()) == {"sum": 1011}
    assert seen == [("a", 1), ("b", 1), ("b", 2), ("c", 1), ("c", 2), ("d", 1)]


def test_a_kind_is_for_functions_that_do_not_wait() -> None:
    with pytest.raises(RegistrationError, match="has pairs=True, which is for plain functions"):
        source_of(asyncio.sleep, DEAD_LETTER)
