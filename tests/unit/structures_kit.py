"""Stores of two releases, and events without an engine, for the tests of structures."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from streams.records import Change, IncomingRecord, TopicPartition
from streams.stores import Index, NamedTable, Stores

HERE = TopicPartition("t", 0)
Entries = dict[bytes, bytes]


class Order(msgspec.Struct):
    customer: str
    cents: int = 0


class One(Stores):
    orders = NamedTable.of(str, Order)


class Two(Stores):
    orders = NamedTable.of(str, Order, index={"customer": Index(str, lambda order: order.customer)})
    stock = NamedTable.of(str, int, ordered=True)


def entries(store: Any) -> Entries:
    return dict(store.dump())


def loaded(make: Callable[[TopicPartition], Any], state: Entries) -> Any:
    """A store with this state, as a restore makes it."""
    store = make(HERE)
    for key, value in state.items():
        store.receive_change(Change(key, value))
    return store


def at(store: Any, seconds: float, work: Callable[[], Any] = lambda: None) -> Entries:
    """One event at this time; returns what it leaves."""
    store.begin([])
    observe = getattr(store, "before_event", None)
    record = IncomingRecord("t", 0, 0, None, None, None, round(seconds * 1000))
    try:
        if observe is not None:
            observe(SimpleNamespace(input=record))
        work()
    finally:
        store.end()
    return entries(store)
