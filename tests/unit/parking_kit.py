"""A source whose handler fails for chosen numbers, for the tests of parked keys."""

from __future__ import annotations

from typing import Any

import msgspec

from streams import PARK, EventContext, EventSource, EventSourceConfig, Retry, Table, event_type
from streams.runtime.partition.parked_events import QUEUES
from streams.testing import TestDriver


@event_type("Add")
class Add(msgspec.Struct, frozen=True):
    """Adds a number to its key's list."""

    number: int
    key: str = "a"


@event_type("Remind")
class Remind(msgspec.Struct, frozen=True):
    """A timer's event."""

    number: int
    key: str = "a"


class Bank:
    """A source whose handler fails for ``broken`` numbers, and what its handlers did."""

    def __init__(self, policy: Retry = PARK, **settings: Any) -> None:
        self.broken: set[int] = set()
        self.attempts: list[tuple[int, int]] = []
        self.policy = policy
        self.settings = settings
        self.engine: Any = None

    def source(self) -> EventSource[Table[str, tuple[int, ...]]]:
        config = EventSourceConfig(group_id="bank", topic="adds", num_partitions=1, **self.settings)
        source = EventSource(config, store=Table.factory(key=str, value=tuple[int, ...], engine=self.engine))

        @source.on(on_error=self.policy)
        def on_add(ctx: EventContext[Table[str, tuple[int, ...]]], event: Add) -> None:
            self.attempts.append((event.number, ctx.attempt))
            ctx.store.put(event.key, (*(ctx.store.get(event.key) or ()), event.number))
            if event.number in self.broken:
                raise RuntimeError(f"no {event.number}")
            ctx.forward("out", event, key=event.key)
            if event.number == 100:
                ctx.schedule_in(5, Remind(101, event.key), name="t", key=event.key)
            if event.number == 99:
                ctx.cancel_timer("t")

        @source.on(on_error=self.policy)
        def on_remind(ctx: EventContext[Table[str, tuple[int, ...]]], event: Remind) -> None:
            if event.number in self.broken:
                raise RuntimeError(f"no {event.number}")
            ctx.store.put(event.key, (*(ctx.store.get(event.key) or ()), event.number))

        return source

    def driver(self, **options: Any) -> TestDriver[Table[str, tuple[int, ...]]]:
        return TestDriver(self.source, **options)


def add(driver: TestDriver[Any], *numbers: int, key: str = "a") -> None:
    for number in numbers:
        driver.send(Add(number, key), key=key, wait=False)
    driver.settle()


def redeploy(driver: TestDriver[Any]) -> None:
    """Stop the only member in good order, and start it as a new process."""
    driver.leave()
    driver.restart()
    driver.settle()


def parked_records(driver: TestDriver[Any]) -> dict[bytes, bytes]:
    """The records of all queues, as they are committed in the changelog."""
    world, found = driver._world, dict[bytes, bytes]()
    log = world.broker.log(world.config.changelog, 0)
    for record in log.committed(0, log.end):
        if record.key is not None and record.key.startswith(QUEUES):
            found.pop(record.key, None)
            if record.value is not None:
                found[record.key] = record.value
    return found
