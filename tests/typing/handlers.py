"""What the type checkers must see in handlers of batches and in work ahead of its turn. Checked by mypy and pyright,
never run.

An ``ignore`` here is an assertion too: strict mypy reports it as soon as the mistake below it is no longer refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

import msgspec

from streams import (
    DEAD_LETTER,
    AsyncJobScheduler,
    BatchContext,
    EventContext,
    EventSource,
    EventSourceConfig,
    ExecutionState,
    IncomingRecord,
    Retry,
    SchedulerConfig,
    Table,
    event_type,
)

Store = Table[str, int]


@event_type
class Ordered(msgspec.Struct, frozen=True):
    customer: str
    cents: int


class Quote(msgspec.Struct, frozen=True):
    cents: int


@event_type
class Other(msgspec.Struct, frozen=True):
    customer: str


CONFIG = SchedulerConfig(concurrency=4)


async def fetch(order: Ordered) -> Quote:
    return Quote(order.cents)


def compute(order: Ordered) -> Quote:
    return Quote(order.cents)


def finalize(ctx: EventContext[Store], order: Ordered, quote: Quote) -> None:
    assert_type(ctx.store, Store)
    ctx.store.put(order.customer, quote.cents)


async def finalize_later(ctx: EventContext[Store], order: Ordered, quote: Quote) -> ExecutionState | None:
    return ctx.fail(ValueError("no"))


def for_others(ctx: EventContext[Store], order: Ordered, quote: str) -> None: ...


def refused(ctx: EventContext[Store], order: Ordered, error: Exception) -> None: ...


async def second(quote: Quote) -> str:
    return str(quote.cents)


def schedulers(source: EventSource[Store]) -> None:
    one = AsyncJobScheduler(source, fetch, finalize, config=CONFIG, on_failure=refused)
    assert_type(one, AsyncJobScheduler[Store, Ordered, Quote])
    assert_type(AsyncJobScheduler(source, compute, finalize_later), AsyncJobScheduler[Store, Ordered, Quote])
    following = AsyncJobScheduler(source, second)
    assert_type(following, AsyncJobScheduler[Store, Quote, str])
    AsyncJobScheduler(source, fetch, then=following)
    one.register_event_type(Ordered, key=lambda order: order.customer)

    @one.register_event_type(Ordered)
    def plan(record: IncomingRecord, order: Ordered) -> tuple[str, Ordered] | None:
        return order.customer, order

    assert_type(plan(IncomingRecord("t", 0, 0, None, None, None), Ordered("", 1)), tuple[str, Ordered] | None)


def mistakes(source: EventSource[Store]) -> None:
    AsyncJobScheduler(source, fetch, for_others)  # type: ignore[misc]  # pyright: ignore[reportArgumentType]
    one = AsyncJobScheduler(source, fetch, finalize)

    def wrong_item(record: IncomingRecord, order: Ordered) -> tuple[str, int]:
        return order.customer, order.cents

    one.register_event_type(Ordered, wrong_item)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    one.register_event_type(Ordered, key=lambda order: order.nobody)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def concurrent(source: EventSource[Store]) -> None:
    @source.register_event_type(Ordered, concurrency=64)
    async def handler(ctx: EventContext[Store], order: Ordered) -> None:
        quote = await fetch(order)
        await ctx.turn()
        ctx.store.put(order.customer, quote.cents)

    source.register_event_type(Ordered, handler, concurrency=CONFIG)


async def in_turn(source: EventSource[Store], ctx: EventContext[Store]) -> None:
    one = AsyncJobScheduler(source, fetch, finalize)
    assert_type(await one.schedule(ctx, Ordered("", 1)), ExecutionState | None)
    await one.schedule(ctx, Quote(1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def stateless() -> None:
    source = EventSource(EventSourceConfig(group_id="g", topic="t", num_partitions=1))
    assert_type(AsyncJobScheduler(source, fetch), AsyncJobScheduler[None, Ordered, Quote])


def add(ctx: EventContext[Store], event: Ordered) -> None:
    ctx.store.put(event.customer, event.cents)


def batches(source: EventSource[Store]) -> None:
    @source.register_event_type(Ordered, batch=True)
    def batch(ctx: BatchContext[Store], events: list[Ordered]) -> ExecutionState | None:
        assert_type(ctx.store, Store)
        assert_type(ctx.records, Sequence[IncomingRecord])
        for event, record in zip(events, ctx.records, strict=True):
            assert_type(event, Ordered)
            assert_type(record.offset, int)
            add(ctx, event)  # what takes an EventContext takes this one
        return ctx.fail(ValueError("no"))

    def of_any_sequence(ctx: EventContext[Store], events: Sequence[Ordered]) -> None: ...

    source.register_event_type(Ordered, of_any_sequence, batch=True)
    source.register_event_type(Ordered, add, batch=False)
    source.register_event_type(Ordered, add)


def short_form(source: EventSource[Store]) -> None:
    source.on(add)

    @source.on
    def plain(ctx: EventContext[Store], event: Ordered) -> None:
        assert_type(ctx.store, Store)

    @source.on(concurrency=64)
    async def ahead(ctx: EventContext[Store], event: Ordered) -> ExecutionState | None:
        return ctx.fail(ValueError("no"))

    @source.on(batch=True)
    def batch(ctx: BatchContext[Store], events: list[Ordered]) -> None: ...


def mistakes_in_the_short_form(source: EventSource[Store]) -> None:
    def of_another_store(ctx: EventContext[Table[int, int]], event: Ordered) -> None: ...

    def answers(ctx: EventContext[Store], event: Ordered) -> int:
        return 1

    def without_event(ctx: EventContext[Store]) -> None: ...

    def of_lists(ctx: BatchContext[Store], events: list[Ordered]) -> None: ...

    source.on(of_another_store)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.on(answers)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.on(without_event)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.on(of_lists)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.on(batch=True)(add)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    source.on(batch=True, blocking=True)(of_lists)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def retries(source: EventSource[Store]) -> None:
    """One class for events and jobs."""
    for policy in (DEAD_LETTER, Retry(attempts=5, on=(OSError,), jitter=0.0)):
        source.register_event_type(Ordered, add, on_error=policy)
    SchedulerConfig(concurrency=1, retry=Retry(attempts=3))
    Retry(retries=4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Retry(on=OSError)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def mistakes_in_batches(source: EventSource[Store]) -> None:
    def of_others(ctx: BatchContext[Store], events: list[Other]) -> None: ...

    async def later(ctx: BatchContext[Store], events: list[Ordered]) -> None: ...

    def now(ctx: BatchContext[Store], events: list[Ordered]) -> None: ...

    source.register_event_type(Ordered, of_others, batch=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.register_event_type(Ordered, add, batch=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.register_event_type(Ordered, later, batch=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.register_event_type(Ordered, now)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    source.register_event_type(Ordered, now, batch=True, blocking=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.register_event_type(Ordered, now, batch=True, concurrency=4)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
