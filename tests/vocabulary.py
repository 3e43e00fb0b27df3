"""The words of the tests: the events, tables, stores and kinds of handlers that most of them play with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from streams import (
    Change,
    EventContext,
    EventSource,
    EventSourceConfig,
    Record,
    Retry,
    Table,
    TopicPartition,
    event_type,
)
from streams.codecs import codec_for
from streams.records import TYPE_HEADER, Headers
from streams.settings.groups import GROUPS


@event_type("Added")
class Added(msgspec.Struct, frozen=True):
    """The input of most tests: add ``amount`` to ``name``. ``deed`` tells a handler what to do besides."""

    name: str
    amount: int = 1
    deed: str = ""


@event_type("Total")
class Total(msgspec.Struct, frozen=True):
    """The output: ``name`` stands at ``amount`` now."""

    name: str
    amount: int


@event_type("Ring")
class Ring(msgspec.Struct, frozen=True):
    """What timers fire."""

    name: str


@event_type("Named")
class Named(msgspec.Struct, frozen=True):
    """An event of nothing but a name."""

    name: str


@event_type("Flaky")
class Flaky(msgspec.Struct, frozen=True):
    """Fails so often, then succeeds."""

    name: str
    times: int = 0


@event_type("TotalAt")
class TotalAt(msgspec.Struct, frozen=True, omit_defaults=True):
    """The total of a key after the event at an offset."""

    key: str
    total: int
    offset: int
    padding: str = ""


@event_type("Ordered")
class Ordered(msgspec.Struct, frozen=True, omit_defaults=True):
    """An order: of so many ``cents``, which goes so often through a loop, and whose handler takes so many seconds."""

    customer: str
    cents: int = 0
    hops: int = 1
    seconds: float = 0.0


@event_type("Reserved")
class Reserved(msgspec.Struct, frozen=True, omit_defaults=True):
    """Follows an order, and is followed by so many of its kind."""

    customer: str
    hops: int = 0


@event_type("Reminded")
class Reminded(msgspec.Struct, frozen=True):
    """What the timer of an order fires."""

    customer: str


@event_type("Paid")
class Paid(msgspec.Struct, frozen=True, omit_defaults=True):
    """A payment by a name, or in a currency of that name."""

    name: str
    cents: int = 0


@event_type("Put")
class Put(msgspec.Struct, frozen=True):
    """A key gets a value, or goes."""

    key: str
    value: int | None = 1


Totals = Table[str, int]
TOTALS = Table.factory(key=str, value=int)
INTS = codec_for(int)
ADDED: Headers = [(TYPE_HEADER, b"Added")]
KINDS = ("plain", "async", "blocking")
"""Kinds of handlers, see ``register``."""

Work = Callable[[EventContext[Any], Any], Any]


def config_of(**settings: Any) -> EventSourceConfig:
    """Make the settings of a source. One of a group's may be given by its own name."""
    for group in ("group", "timeouts", "queues"):
        if own := {name: settings.pop(name) for name in GROUPS[group].__struct_fields__ if name in settings}:
            settings[group] = msgspec.structs.replace(settings.get(group, GROUPS[group]()), **own)
    return EventSourceConfig(**settings)


def added(name: str, amount: int = 1, deed: str = "") -> bytes:
    return msgspec.json.encode(Added(name, amount, deed))


def register(
    source: EventSource[Any],
    work: Work,
    kind: str = "plain",
    on_error: Retry | None = None,
    event_class: type[Any] = Added,
) -> None:
    """Register ``work`` as a handler of one of the ``KINDS``."""

    async def patient(ctx: EventContext[Any], event: Any) -> Any:
        await asyncio.sleep(0)  # others have their turn
        return work(ctx, event)

    source.register_event_type(
        event_class, patient if kind == "async" else work, on_error=on_error, blocking=kind == "blocking"
    )


def count(ctx: EventContext[Totals], event: Added) -> None:
    """Add: the plainest handler."""
    ctx.store.put(event.name, ctx.store.get(event.name, 0) + event.amount)


def tell_total(ctx: EventContext[Totals], event: Added, output: str) -> None:
    """Add, and send the total."""
    count(ctx, event)
    ctx.forward(output, Total(event.name, ctx.store.get(event.name, 0)), key=event.name)


class Words:
    """A store in memory that cannot undo: ``write`` appends to a word. Made anew after each failure."""

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.words: dict[bytes, bytes] = {}
        self.types: list[str] = []
        self.revocations = 0

    def receive_change(self, change: Change, /) -> None:
        assert not self.revocations
        self.types.append(change.type)
        if change.value is None:
            self.words.pop(change.key, None)
        else:
            self.words[change.key] = change.value

    def revoked(self) -> None:
        self.revocations += 1


def write(ctx: EventContext[Any], event: Added) -> None:
    """Append a letter to a word of ``Words``, and record it; or delete it."""
    key = event.name.encode()
    if event.deed == "delete":
        del ctx.store.words[key]
        ctx.record_change(Change(key, None))
    else:
        ctx.store.words[key] = ctx.store.words.get(key, b"") + event.deed[:1].encode()
        ctx.record_change(Change(key, ctx.store.words[key], type="word"))


def touch(ctx: EventContext[Any], name: str) -> int:
    """Add one to the name, or a letter to the word; returns how many there are. For ``TOTALS`` and ``Words``."""
    if isinstance(ctx.store, Words):
        write(ctx, Added(name, deed="x"))
        return len(ctx.store.words[name.encode()])
    count(ctx, Added(name))
    total: int = ctx.store.get(name, 0)
    return total


MISDEEDS: dict[str, Callable[[EventContext[Any], str], Any]] = {
    "over the client's limit": lambda ctx, out: ctx.forward(out, Total("x" * 1_000_001, 1)),
    # With its overhead it is over:
    "just under the client's limit": lambda ctx, out: ctx.forward(Record(out, b"x" * 999_990)),
    "over the topic's limit": lambda ctx, out: ctx.forward(Record(out, b"x" * 50_000, b"big")),
    "invalid topic name": lambda ctx, out: ctx.forward("no topic/with such: a name", Total("a", 1)),
    "empty topic name": lambda ctx, out: ctx.forward("", Total("a", 1)),
    "topic name too long": lambda ctx, out: ctx.forward("t" * 250, Total("a", 1)),
    "unknown topic": lambda ctx, out: ctx.forward(f"{out}-nobody-made-this", Total("a", 1)),
    "unknown partition": lambda ctx, out: ctx.forward(out, Total("a", 1), partition=99),
    "negative partition": lambda ctx, out: ctx.forward(out, Total("a", 1), partition=-7),
    "partition beyond 32 bits": lambda ctx, out: ctx.forward(out, Total("a", 1), partition=1 << 40),
    "year 3000": lambda ctx, out: ctx.forward(out, Total("a", 1), partition=0, timestamp_ms=32_503_680_000_000),
    "value of the wrong type": lambda ctx, out: ctx.forward(Record(out, {"a": 1})),  # type: ignore[arg-type]
    "key of the wrong type": lambda ctx, out: ctx.forward(Record(out, b"x", 5)),  # type: ignore[arg-type]
    "header of the wrong type": lambda ctx, out: ctx.forward(out, Total("a", 1), headers=[("h", 5)]),  # type: ignore[list-item]
    "headers of the wrong type": lambda ctx, out: ctx.forward(Record(out, b"x", headers=5)),  # type: ignore[arg-type]
    "timestamp of the wrong type": lambda ctx, out: ctx.forward(Record(out, b"x", timestamp_ms="now")),  # type: ignore[arg-type]
    "large change": lambda ctx, out: ctx.store.put("x" * 1_000_000, 1),
    "": lambda ctx, out: None,
}
"""What client or broker refuse, by the deed of an event: called with the context and an output topic."""
