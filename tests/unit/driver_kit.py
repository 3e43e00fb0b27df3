"""A source with handlers of all kinds, for the tests of ``TestDriver``."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec

from streams import DEAD_LETTER, ErrorResponse, EventContext, EventSource, EventSourceConfig, Retry
from streams.events import event_type
from streams.testing import TestDriver
from tests.vocabulary import TOTALS, Added, Flaky, Named, Total, Totals, config_of, count

OUT = "totals"


@event_type("driven.Slow")
class Slow(msgspec.Struct, frozen=True):
    """Its handler takes this many seconds."""

    name: str
    seconds: float


@event_type("driven.Fatal")
class Fatal(msgspec.Struct, frozen=True):
    """Stops the source."""

    text: str


@event_type("driven.Unknown")
class Unknown(msgspec.Struct, frozen=True):
    """Has no handler."""


def config(partitions: int = 3, **settings: Any) -> EventSourceConfig:
    return config_of(
        group_id="driven", topic="added", num_partitions=partitions, **{"decode_policy": DEAD_LETTER, **settings}
    )


def add(ctx: EventContext[Totals], event: Any) -> None:
    """Add one, or the event's amount, and send the total."""
    count(ctx, Added(event.name, getattr(event, "amount", 1)))
    total = Total(event.name, ctx.store.get(event.name, 0))
    ctx.forward(OUT, total, key=event.name, headers=[("from", b"%d" % ctx.topic_partition.partition)])


def build(partitions: int = 3, store: Any = TOTALS, **settings: Any) -> EventSource[Totals]:
    source = EventSource(config(partitions, **settings), store)

    @source.register_event_type(Slow)
    async def on_slow(ctx: EventContext[Totals], event: Slow) -> None:
        await anyio.sleep(event.seconds)
        add(ctx, event)

    def on_broken(ctx: EventContext[Totals], event: Flaky) -> None:
        add(ctx, event)
        if ctx.attempt <= event.times:
            raise RuntimeError("not yet")

    @source.register_event_type(Fatal)
    def on_fatal(ctx: EventContext[Totals], event: Fatal) -> None:
        raise RuntimeError(event.text)

    retries = Retry(attempts=4, backoff_seconds=10.0, then=ErrorResponse.DEAD_LETTER)
    source.register_event_type(Added, add)
    source.register_event_type(Named, add, blocking=True)
    source.register_event_type(Flaky, on_broken, on_error=retries)
    return source


def totals(driver: TestDriver[Any]) -> list[int]:
    return [total.amount for total in driver.outputs(OUT, Total)]
