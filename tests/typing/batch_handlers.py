"""What the type checkers must see in batch handlers. Checked by mypy and pyright, never run.

An ``ignore`` here is an assertion too: strict mypy reports it as soon as the mistake below it is no longer refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

import msgspec

from streams import (
    BatchContext,
    EventContext,
    EventSource,
    ExecutionState,
    IncomingRecord,
    Table,
    event_type,
)

Store = Table[str, int]


@event_type
class Paid(msgspec.Struct, frozen=True):
    customer: str
    cents: int


@event_type
class Other(msgspec.Struct, frozen=True):
    customer: str


def add(ctx: EventContext[Store], event: Paid) -> None:
    ctx.store.put(event.customer, event.cents)


def registered(source: EventSource[Store]) -> None:
    @source.register_event_type(Paid, batch=True)
    def paid(ctx: BatchContext[Store], events: list[Paid]) -> ExecutionState | None:
        assert_type(ctx.store, Store)
        assert_type(ctx.records, Sequence[IncomingRecord])
        for event, record in zip(events, ctx.records, strict=True):
            assert_type(event, Paid)
            assert_type(record.offset, int)
            add(ctx, event)  # what takes an EventContext takes this one
        return ctx.fail(ValueError("no"))

    def of_any_sequence(ctx: EventContext[Store], events: Sequence[Paid]) -> None: ...

    source.register_event_type(Paid, of_any_sequence, batch=True)
    source.register_event_type(Paid, add, batch=False)
    source.register_event_type(Paid, add)


def mistakes(source: EventSource[Store]) -> None:
    def of_others(ctx: BatchContext[Store], events: list[Other]) -> None: ...

    async def later(ctx: BatchContext[Store], events: list[Paid]) -> None: ...

    def now(ctx: BatchContext[Store], events: list[Paid]) -> None: ...

    source.register_event_type(Paid, of_others, batch=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.register_event_type(Paid, add, batch=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.register_event_type(Paid, later, batch=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.register_event_type(Paid, now)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    source.register_event_type(Paid, now, batch=True, blocking=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    source.register_event_type(Paid, now, batch=True, concurrency=4)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
