"""Stages: what does the work of events ahead of their turn. Defined once per event source, opened once per run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from streams.records import IncomingRecord
from streams.runtime.line import Entry, Line
from streams.statistics import StageStatistics

if TYPE_CHECKING:
    from streams.runtime.event_context import EventContext
    from streams.runtime.host import Host


class Stage(Protocol):
    """One running stage. On the loop; nothing here may block or wait."""

    def begin(self, entry: Entry) -> bool:
        """Take the entry in, and settle it some time. ``False``: there is no room for it, and ``entry.line.wake`` is
        called when there may be. Never raises for what the user's code does: the entry fails."""
        ...

    def statistics(self) -> StageStatistics: ...

    def close(self) -> Collection[asyncio.Task[Any]]:
        """Cancel what still runs. Returns the tasks that take a moment to end."""
        ...


class Follower(Stage, Protocol):
    """A stage that goes on where another one ends (``then``)."""

    def has_room(self, entry: Entry, key: Hashable) -> bool:
        """Whether an event may begin whose work comes here later; if not, ``entry.line.wake`` is called when it may.
        (Events that are on their way here are not counted: those are as many as the stages before have room for.)"""
        ...

    def add(self, entry: Entry, key: Hashable, item: Any) -> None:
        """Go on with an entry, whose work has this key and this result so far. Whether there is room is not asked: its
        event is in the line already."""
        ...

    async def complete(self, ctx: EventContext[Any], item: Any) -> Any:
        """The same for a handler that has its turn. Returns what the event's handler answers."""
        ...


class StageDefinition(Protocol):
    """What an event source knows of a stage."""

    @property
    def name(self) -> str: ...

    @property
    def described(self) -> tuple[str, ...]:
        """What two copies of it have in common, as far as it can be seen from outside."""
        ...

    def open(self, host: Host) -> Stage: ...


@dataclass(frozen=True, eq=False)
class Ahead:
    """How the events of one type get to a stage. ``plan`` makes of an event what the stage finds in ``Entry.plan``: the
    user's code, and what it raises fails the event."""

    stage: StageDefinition
    plan: Callable[[IncomingRecord, Any], Any]


class Stages:
    """The stages of one run, opened when they are first needed."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.loop = asyncio.get_running_loop()
        self._open: dict[int, tuple[StageDefinition, Stage]] = {}

    def get(self, definition: StageDefinition) -> Stage:
        """The running stage of this definition."""
        known = self._open.get(id(definition))
        if known is None:
            known = self._open[id(definition)] = (definition, definition.open(self._host))
        return known[1]

    def statistics(self) -> tuple[StageStatistics, ...]:
        """One value per stage that is open."""
        return tuple(stage.statistics() for _, stage in self._open.values())

    def close(self) -> list[asyncio.Task[Any]]:
        """Let all of them go; what still runs is cancelled. Returns the tasks that take a moment to end."""
        tasks = [task for _, stage in self._open.values() for task in stage.close()]
        self._open.clear()
        return tasks


def described(*functions: Callable[..., Any] | None) -> tuple[str, ...]:
    """The names of a stage's functions, for ``StageDefinition.described``."""
    return tuple(
        ""
        if function is None
        else f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        for function in functions
    )


class Blocked:
    """Entries that found no room; all of them look again when some comes free."""

    def __init__(self) -> None:
        self._lines: dict[Line, None] = {}  # not a set: in the order in which they came

    def add(self, entry: Entry) -> None:
        """Wake it next time."""
        self._lines[entry.line] = None

    def wake(self) -> None:
        """There may be room."""
        if self._lines:
            lines, self._lines = self._lines, {}
            for line in lines:
                line.wake()
