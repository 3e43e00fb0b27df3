"""Event sources that tests replay, run and compare: in a module of their own, so that executors can import them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from streams import (
    DEAD_LETTER,
    ErrorResponse,
    EventContext,
    EventSource,
    ExecutionState,
    Record,
    Retry,
    Table,
    event_type,
    upcaster,
)
from tests.vocabulary import config_of

PARTITIONS = 3


@event_type("Moved", version=2)
class Moved(msgspec.Struct, frozen=True):
    account: str
    cents: int
    currency: str


@upcaster(Moved, from_version=1)
def add_currency(old: dict[str, Any]) -> dict[str, Any]:
    return old | {"currency": "EUR"}


@event_type("Closed")
class Closed(msgspec.Struct, frozen=True):
    account: str


@event_type("Failing")
class Failing(msgspec.Struct, frozen=True):
    """Its handler fails ``times`` times, then does what a deposit does."""

    account: str
    times: int
    fatal: bool = False


@event_type("Slow")
class Slow(msgspec.Struct, frozen=True):
    account: str


@event_type("Heavy")
class Heavy(msgspec.Struct, frozen=True):
    account: str


@event_type("Stood", version=3)
class Stood(msgspec.Struct, frozen=True):
    account: str
    cents: int


class Account(msgspec.Struct):
    cents: int = 0
    events: int = 0


Context = EventContext[Table[str, Account]]
RETRY = Retry(attempts=3, backoff_seconds=0.0, max_backoff_seconds=0.0, then=ErrorResponse.DEAD_LETTER)


def bank(
    prefix: str = "",
    *,
    partitions: int = PARTITIONS,
    bonus: int = 0,
    on_error: Retry = RETRY,
    decode_policy: Retry = DEAD_LETTER,
    **settings: Any,
) -> EventSource[Table[str, Account]]:
    """A bank with every kind of handler. ``bonus``: what a changed version of it adds to deposits of account a1."""
    config = config_of(
        group_id=f"{prefix}bank",
        topic=f"{prefix}moves",
        num_partitions=partitions,
        error_policy=on_error,
        decode_policy=decode_policy,
        **settings,
    )
    source = EventSource(config, store=Table.factory(key=str, value=Account))
    out = f"{prefix}stood"

    def change(ctx: Context, account: str, cents: int) -> None:
        held = ctx.store.get(account) or Account()
        held.cents += cents
        held.events += 1
        ctx.store.put(account, held)
        ctx.forward(out, Stood(account, held.cents), key=account, headers=[("offset", b"%d" % ctx.offset)])

    @source.register_event_type(Moved)
    def on_moved(ctx: Context, event: Moved) -> None:
        change(ctx, event.account, event.cents + (bonus if event.account == "a1" else 0))

    @source.register_event_type(Closed)
    def on_closed(ctx: Context, event: Closed) -> None:
        ctx.store.delete(event.account)
        ctx.forward(Record(f"{prefix}closed", None, event.account.encode(), partition=0, timestamp_ms=_stamp(ctx)))

    @source.register_event_type(Failing)
    def on_failing(ctx: Context, event: Failing) -> ExecutionState | None:
        change(ctx, event.account, 1_000_000)  # undone when it fails
        if ctx.attempt <= event.times:
            if event.fatal:
                return ExecutionState.FATAL
            raise ValueError(f"attempt {ctx.attempt} of {event.account}")
        return None

    @source.register_event_type(Slow)
    async def on_slow(ctx: Context, event: Slow) -> None:
        held = ctx.store.get(event.account)
        await asyncio.get_running_loop().run_in_executor(None, len, event.account)
        change(ctx, event.account, 0 if held is None else -held.cents)

    @source.register_event_type(Heavy, blocking=True)
    def on_heavy(ctx: Context, event: Heavy) -> None:
        change(ctx, event.account, 7)

    @source.register_default_handler
    def on_others(ctx: Context, value: bytes | None) -> None:
        change(ctx, f"others{ctx.topic_partition.partition}", len(value or b""))

    return source


def _stamp(ctx: Context) -> int:
    assert ctx.input is not None
    return ctx.input.timestamp_ms + 1


named = bank()
"""What ``tests.spark.replay_sources:named`` names."""
