"""A source with a handler that gets lists of events, for the tests of batch handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from streams import DEAD_LETTER, SKIP, BatchContext, ErrorResponse, EventContext, EventSource, Record, Retry
from streams.events import event_type, upcaster
from streams.metrics import Measurement
from streams.records import TYPE_HEADER, VERSION_HEADER
from streams.testing import TestDriver
from tests.unit.handlers_kit import OUT, config
from tests.vocabulary import TOTALS, Named, TotalAt, Totals

RETRIED = Retry(attempts=3, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER)


@event_type("batched.Added", version=2)
class Addition(msgspec.Struct, frozen=True):
    key: str
    amount: int = 1


@upcaster(Addition, from_version=1)
def _(old: Any) -> Any:
    return {"key": old["name"], "amount": 100}


Handle = Callable[[BatchContext[Totals], list[Addition]], Any]


class Bench:
    """A source with one batch handler, and what it has seen: ``calls`` are the keys of lists."""

    def __init__(self, policy: Retry = SKIP, then: Handle | None = None) -> None:
        self.calls: list[str] = []
        self.attempts: list[int] = []
        self.measured: list[Measurement] = []
        settings = config(error_policy=policy, decode_policy=DEAD_LETTER, metrics_handler=self.measured.append)
        self.source: EventSource[Any] = EventSource(settings, TOTALS)

        def added(ctx: BatchContext[Totals], events: list[Addition]) -> Any:
            self.calls.append(" ".join(event.key for event in events))
            self.attempts.append(ctx.attempt)
            for event, record in zip(events, ctx.records, strict=True):
                count(ctx, event.key, event.amount, record.offset)
            return None if then is None else then(ctx, events)

        def other(ctx: EventContext[Totals], event: Named) -> None:
            self.calls.append(f"<{event.name}>")
            count(ctx, event.name, 1, ctx.offset)

        self.source.register_event_type(Addition, added, batch=True)
        self.source.register_event_type(Named, other)

    def run(self, keys: str, meddle: Callable[[TestDriver[Any]], None] = lambda driver: None) -> str:
        """Send these (see ``send``), returns keys and totals of what came out, as in "a1 a2 b1"."""
        with TestDriver(self.source, topics={OUT: 1}) as driver:
            meddle(driver)
            send(driver, keys)
            driver.advance(30)
            driver.check()
            self.letters = driver.dead_letters()
            self.state = dict(driver.restored_store(0).items())
            self.outputs = driver.outputs(OUT)
            return came(driver)

    def of(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.measured if isinstance(one, kind)]


def came(driver: TestDriver[Any]) -> str:
    keyed = [record for record in driver.outputs(OUT) if record.key is not None]
    totals = [msgspec.json.decode(record.value or b"", type=TotalAt) for record in keyed]
    return " ".join(f"{total.key}{total.total}" for total in totals)


def count(ctx: EventContext[Totals], key: str, amount: int, offset: int) -> None:
    total = ctx.store.get(key, 0) + amount
    ctx.store.put(key, total)
    ctx.forward(OUT, TotalAt(key, total, offset), key=key)


def send(driver: TestDriver[Any], keys: str) -> None:
    """``<key>``: of the other type; ``?key``: not readable; ``1key``: of an older version; ``|``: when all before is
    settled."""
    headers = [(TYPE_HEADER, b"batched.Added"), (VERSION_HEADER, b"2")]
    for key in keys.split():
        if key == "|":
            driver.settle()
        elif key.startswith("?"):
            driver.send_record(Record("in", b"?", key.encode(), headers), wait=False)
        elif key.startswith("1"):
            driver.send_record(Record("in", b'{"name": "old", "key": "wrong"}', key.encode(), headers[:1]), wait=False)
        elif key.startswith("<"):
            driver.send(Named(key.strip("<>")), key=key, wait=False)
        else:
            driver.send(Addition(key), key=key, wait=False)
    driver.settle()


def unless(*bad: str, do: Callable[[BatchContext[Totals]], Any]) -> Handle:
    """Goes wrong by ``do`` when one of these is in the list."""
    return lambda ctx, events: do(ctx) if any(event.key in bad for event in events) else None


def raises(ctx: BatchContext[Totals]) -> None:
    raise ValueError("no")
