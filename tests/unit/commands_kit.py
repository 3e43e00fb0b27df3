"""A source with commands, for tests over ``TestDriver``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, Retry, Table, event_type
from streams.errors import Rejected
from streams.model.commands import VERSION_HEADER, Versioned
from streams.runtime.queries.commands import CommandQuestion
from streams.stores import Aggregate
from streams.testing import TestDriver
from tests.vocabulary import Added, config_of

OUT = "moves"


@event_type("kit.Move")
class Move(msgspec.Struct, frozen=True):
    """Moves so many cents, so many times. ``deed`` tells decide what to do besides."""

    cents: int
    times: int = 1
    deed: str = ""


@event_type("kit.Moved")
class Moved(msgspec.Struct, frozen=True):
    cents: int
    padding: str = ""


class Purse(msgspec.Struct):
    cents: int = 0


def build(
    partitions: int = 2,
    deeds: dict[str, Callable[[Purse, Move], Any]] | None = None,
    on_error: Retry | None = None,
    remember: timedelta = timedelta(days=1),
    store: Any = None,
    **settings: Any,
) -> EventSource[Table[str, Versioned[Purse]]]:
    config = config_of(group_id="purses", topic="commands", num_partitions=partitions, **settings)
    source = EventSource(config, store or Aggregate.factory(key=str, state=Purse))
    purses = source.aggregate(Purse(), events=OUT, remember=remember, on_error=on_error)
    known = deeds or {}

    @purses.decide
    def move(purse: Purse, command: Move) -> list[Moved]:
        if command.deed:
            found: list[Moved] = known[command.deed](purse, command)
            return found
        if purse.cents + command.cents * command.times < 0:
            raise Rejected("not enough", {"cents": purse.cents})
        return [Moved(command.cents)] * command.times

    @purses.evolve
    def moved(purse: Purse, event: Moved) -> Purse:
        return Purse(purse.cents + event.cents)

    @source.on
    def on_added(ctx: EventContext[Table[str, Versioned[Purse]]], event: Added) -> None:
        purses.apply(ctx, event.name, [Moved(event.amount)] * (3 if event.deed else 1))

    return source


def versions(driver: TestDriver[Any]) -> dict[str, list[int]]:
    """Return the versions of the events in the output, by key, in their order."""
    found: dict[str, list[int]] = {}
    for record in driver.outputs(OUT):
        found.setdefault((record.key or b"").decode(), []).append(int(record.header(VERSION_HEADER) or b""))
    return found


def gapless(driver: TestDriver[Any]) -> dict[str, int]:
    """Check that the versions of each key are 1, 2, 3 ... and return how many there are."""
    found = versions(driver)
    for key, numbers in found.items():
        assert numbers == list(range(1, len(numbers) + 1)), key
    return {key: len(numbers) for key, numbers in found.items()}


def plain() -> EventSource[Any]:
    """Make the release before: a table of the same states, without commands."""
    config = config_of(group_id="purses", topic="commands", num_partitions=1)
    source: EventSource[Table[str, Purse]] = EventSource(config, Table.factory(key=str, value=Purse))

    @source.on
    def on_added(ctx: EventContext[Table[str, Purse]], event: Added) -> None:
        ctx.store.put(event.name, Purse(event.amount))

    return source


def bare(**settings: Any) -> EventSource[Any]:
    config = EventSourceConfig(group_id="g", topic="t", num_partitions=1, **settings)
    return EventSource(config, Aggregate.factory(key=str, state=Purse))


def question(id: str = "1", key: bytes = b"ada", at: int | None = None, **more: Any) -> CommandQuestion:
    place = None if at is None else ("commands", 0, at)
    return CommandQuestion(group="purses", partition=0, id=id, key=key, at=place, **more)


def queries_of(driver: TestDriver[Any], member: int = 0) -> Any:
    return driver._world.members[member].source._run.queries()
