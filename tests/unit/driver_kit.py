"""A source with handlers of all kinds, for the tests of ``TestDriver``."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec

from streams import DEAD_LETTER, ErrorPolicy, ErrorResponse, EventContext, EventSource, EventSourceConfig, Table
from streams.events import event_type

OUT = "totals"


@event_type("driven.Added")
class Added(msgspec.Struct, frozen=True):
    key: str
    amount: int = 1


@event_type("driven.Slow")
class Slow(msgspec.Struct, frozen=True):
    """Its handler takes this many seconds."""

    key: str
    seconds: float


@event_type("driven.OnThread")
class OnThread(msgspec.Struct, frozen=True):
    key: str


@event_type("driven.Broken")
class Broken(msgspec.Struct, frozen=True):
    """Fails so often, then succeeds."""

    key: str
    times: int


@event_type("driven.Fatal")
class Fatal(msgspec.Struct, frozen=True):
    """Stops the source."""

    text: str


@event_type("driven.Unknown")
class Unknown(msgspec.Struct, frozen=True):
    """Has no handler."""


@event_type("driven.Total")
class Total(msgspec.Struct, frozen=True):
    key: str
    total: int


def config(partitions: int = 3, **settings: Any) -> EventSourceConfig:
    return EventSourceConfig(
        group_id="driven", topic="added", num_partitions=partitions, **{"decode_policy": DEAD_LETTER, **settings}
    )


def build(partitions: int = 3, **settings: Any) -> EventSource[Table[str, int]]:
    source = EventSource(config(partitions, **settings), Table.factory(key=str, value=int))

    def add(ctx: EventContext[Table[str, int]], key: str, amount: int) -> None:
        total = (ctx.store.get(key) or 0) + amount
        ctx.store.put(key, total)
        ctx.forward(OUT, Total(key, total), key=key, headers=[("from", b"%d" % ctx.topic_partition.partition)])

    @source.register_event_type(Added)
    def on_added(ctx: EventContext[Table[str, int]], event: Added) -> None:
        add(ctx, event.key, event.amount)

    @source.register_event_type(Slow)
    async def on_slow(ctx: EventContext[Table[str, int]], event: Slow) -> None:
        await anyio.sleep(event.seconds)
        add(ctx, event.key, 1)

    @source.register_event_type(OnThread, blocking=True)
    def on_thread(ctx: EventContext[Table[str, int]], event: OnThread) -> None:
        add(ctx, event.key, 1)

    retries = ErrorPolicy(retries=3, backoff_seconds=10.0, then=ErrorResponse.DEAD_LETTER)

    @source.register_event_type(Broken, on_error=retries)
    def on_broken(ctx: EventContext[Table[str, int]], event: Broken) -> None:
        add(ctx, event.key, 1)
        if ctx.attempt <= event.times:
            raise RuntimeError("not yet")

    @source.register_event_type(Fatal)
    def on_fatal(ctx: EventContext[Table[str, int]], event: Fatal) -> None:
        raise RuntimeError(event.text)

    return source
