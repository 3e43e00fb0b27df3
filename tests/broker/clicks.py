"""The program of ``test_structures_killed``: clicks in, minutes out, with a store of several structures.

python clicks.py BOOTSTRAP GROUP INSTANCE        (environment: SITE_FOLDER, where state is kept; SITE_ENGINE, of
                                                streams.disk: in databases)
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec

from streams import (
    EventContext,
    EventSource,
    EventSourceConfig,
    GroupConfig,
    Heap,
    Index,
    NamedTable,
    StateConfig,
    Stores,
    TimeoutConfig,
    TopicPartition,
    Window,
    Windows,
    disk,
    event_type,
)
from streams.records import IncomingRecord
from streams.testing.oracle import Sent, State

PARTITIONS = 2


@event_type("Clicked")
class Clicked(msgspec.Struct, frozen=True):
    user: str
    page: int


@event_type("Visited")
class Visited(msgspec.Struct, frozen=True):
    """A minute, or a visit, that has ended; or (with a negative count) a click that was late."""

    user: str
    start_ms: int
    end_ms: int
    clicks: int


class User(msgspec.Struct, frozen=True):
    page: int
    clicks: int


def topic_of(group: str) -> str:
    return f"{group}-clicks"


def output_of(group: str) -> str:
    return f"{group}-visits"


def count(clicks: int | None, _: Clicked) -> int:
    return (clicks or 0) + 1


def stores_of(group: str) -> type[Any]:
    """The store class of this group, whose windows report to its topic."""
    output = output_of(group)

    def report(ctx: EventContext[Any], user: str, window: Window, clicks: int) -> None:
        ctx.forward(output, Visited(user, *window, clicks), key=user)

    def late(ctx: EventContext[Any], user: str, click: Clicked, at_ms: int) -> None:
        ctx.forward(output, Visited(user, at_ms, at_ms, -click.page), key=user)

    class Clicks(Stores):
        users = NamedTable.of(str, User, expires=40, index={"page": Index(int, lambda user: user.page)})
        minutes = Windows.hopping(
            str, int, size=60, advance=30, grace=5, keep=20, add=count, on_close=report, late=late
        )
        visits = Windows.session(str, int, gap=20, add=count, merge=lambda one, two: one + two, on_close=report)
        pages = Heap.of(int, int, priority=Index(int, lambda clicks: clicks))

    return Clicks


def handle(ctx: Any, event: Clicked) -> None:
    store = ctx.store
    before = store.users.get(event.user) or User(0, 0)
    store.users.put(event.user, User(event.page, before.clicks + 1))
    store.minutes.add(event.user, event)
    store.visits.add(event.user, event)
    store.pages.put(event.page, (store.pages.get(event.page) or 0) + 1)
    if len(store.pages) > 20:
        store.pages.pop_min()


def fold(group: str) -> Callable[[State, IncomingRecord], Iterator[Sent]]:
    """What the handler does, without an engine: for the oracle."""
    stores: dict[int, Any] = {}

    def step(state: State, record: IncomingRecord) -> Iterator[Sent]:
        store = stores.get(record.partition)
        if store is None:
            store = stores[record.partition] = stores_of(group)(TopicPartition(record.topic, record.partition))
        sent: list[Sent] = []

        def forward(topic: str, event: Any, *, key: str) -> None:
            sent.append((topic, key.encode(), msgspec.json.encode(event)))

        ctx = SimpleNamespace(input=record, store=store, forward=forward)
        store.begin(journal := [])
        store.before_event(ctx)
        handle(ctx, msgspec.json.decode(record.value or b"", type=Clicked))
        store.end()
        for change in journal:
            if change.value is None:
                state.pop(change.key, None)
            else:
                state[change.key] = change.value
        yield from sent

    return step


def build(bootstrap: str, group: str, instance: str) -> EventSource[Any]:
    folder, engine = os.environ.get("SITE_FOLDER", ""), os.environ.get("SITE_ENGINE", "")
    source: EventSource[Any] = EventSource(
        EventSourceConfig(
            group_id=group,
            topic=topic_of(group),
            num_partitions=PARTITIONS,
            bootstrap_servers=bootstrap,
            instance_id=instance,
            group=GroupConfig(num_standbys=1),
            timeouts=TimeoutConfig(session_timeout_seconds=6.0, transaction_timeout_seconds=5.0),
            state=StateConfig(folder=folder, checkpoint_seconds=0.2),
        ),
        store=stores_of(group).factory(engine=getattr(disk, engine)() if engine else None),
    )
    source.register_event_type(Clicked, handle)
    return source


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    build(*sys.argv[1:4]).run()
