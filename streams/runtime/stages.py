"""Stages: what does the work of events ahead of their turn. Defined once per event source, opened once per run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from streams.records import IncomingRecord
from streams.runtime.line import Entry
from streams.statistics import StageStatistics

if TYPE_CHECKING:
    from streams.runtime.host import Host


class Stage(Protocol):
    """One running stage. On the loop; nothing here may block or wait."""

    def begin(self, entry: Entry) -> bool:
        """Take the entry in, and settle it some time. ``False``: there is no room for it, and ``entry.wake`` is called
        when there may be. Never raises for what the user's code does: the entry fails."""
        ...

    def statistics(self) -> StageStatistics: ...
    def close(self) -> None: ...


class StageDefinition(Protocol):
    """What an event source knows of a stage."""

    @property
    def name(self) -> str: ...

    def open(self, host: Host) -> Stage: ...


@dataclass(frozen=True, eq=False)
class Ahead:
    """How the events of one type get to a stage. ``plan`` makes of an event what the stage finds in ``Entry.work``: the
    user's code, and what it raises fails the event."""

    stage: StageDefinition
    plan: Callable[[IncomingRecord, Any], Any]


class Stages:
    """The stages of one run, opened when they are first needed."""

    def __init__(self, host: Host) -> None:
        self._host = host
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

    def close(self) -> None:
        """Let all of them go; what still runs is cancelled."""
        for _, stage in self._open.values():
            stage.close()
        self._open.clear()


class Blocked:
    """Entries that found no room; all of them look again when some comes free."""

    def __init__(self) -> None:
        self._wakes: set[Callable[[], None]] = set()

    def add(self, entry: Entry) -> None:
        """Wake it next time."""
        self._wakes.add(entry.wake)

    def wake(self) -> None:
        """There may be room."""
        if self._wakes:
            wakes, self._wakes = self._wakes, set()
            for wake in wakes:
                wake()
