"""A shop whose windows and carts go by the time of its events, for the tests of that time and of windows that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from streams import EventContext, EventSource, Record
from streams.events import event_type, to_record
from streams.outcomes import ErrorPolicy
from streams.stores import NamedTable, Stores, Window, Windows
from streams.testing import TestDriver
from tests.vocabulary import config_of

OUT = "out"


@event_type("time.Seen")
class Seen(msgspec.Struct, frozen=True):
    key: str
    number: int = 0


@event_type("time.Told")
class Told(msgspec.Struct, frozen=True):
    what: str
    key: str
    number: int = 0


def count(old: int | None, _: object) -> int:
    return (old or 0) + 1


def told(ctx: EventContext[Any], key: str, window: Window, number: int) -> None:
    ctx.forward(OUT, Told("closed", key, number), key=key, partition=0)


def late(ctx: EventContext[Any], key: str, item: object, at_ms: int) -> None:
    ctx.forward(OUT, Told("late", key, at_ms), key=key, partition=0)


def source_of(
    *, on_close: Callable[..., None] = told, on_error: ErrorPolicy | None = None, partitions: int = 1, **settings: Any
) -> EventSource[Any]:
    class Shop(Stores):
        win = Windows.tumbling(str, int, size=60, grace=30, add=count, on_close=on_close, late=late, on_error=on_error)
        carts = NamedTable.of(str, int, expires=3_600)

    config = config_of(group_id="g", topic="in", num_partitions=partitions, **settings)
    return EventSource(config, store=Shop.factory())


def seen(key: str, at_ms: float, number: int = 0, partition: int = 0) -> Record:
    record = to_record("in", Seen(key, number), key=key, partition=partition)
    return msgspec.structs.replace(record, timestamp_ms=round(at_ms))


def outputs(driver: TestDriver[Any], what: str) -> list[Told]:
    return [one for one in driver.outputs(OUT, Told) if one.what == what]
