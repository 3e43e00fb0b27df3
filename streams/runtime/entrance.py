"""The way into a partition's line: whose work runs ahead of its turn begins it, or waits outside for room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from streams.core.router import Route, type_and_version
from streams.errors import DecodeError
from streams.records import IncomingRecord
from streams.runtime.failures import cancelled_inside, is_last
from streams.runtime.line import Entry, Line
from streams.runtime.slices import LONGEST_SLICE_SECONDS

if TYPE_CHECKING:
    from streams.runtime.partition_worker import PartitionWorker

MOST_AT_ONCE: Final = 64
"""Events that enter between two looks at the loop: their jobs begin then."""


class Entrance:
    """One partition's. On its task."""

    def __init__(self, worker: PartitionWorker, line: Line) -> None:
        self._worker = worker
        self._line = line
        self._next: Entry | None = None  # would be the line's last one, but finds no room

    @property
    def is_blocked(self) -> bool:
        """Whether the next event has found no room for its work."""
        return self._next is not None

    def goes_ahead(self, record: IncomingRecord) -> bool:
        """Whether its work runs ahead of its turn."""
        route = self._route(record)[0]
        return route is not None and route.ahead is not None

    def enter(self, records: Sequence[IncomingRecord], start: int) -> int:
        """Let the work of these begin, or have them wait behind those in front, as far as there is room and time.
        Returns how many entered."""
        now, entries, stages = self._worker.engine.now, self._line.entries, self._worker.engine.stages
        stop, until = min(start + MOST_AT_ONCE, len(records)), now() + LONGEST_SLICE_SECONDS
        position = start
        while position < stop:
            entry = self._next or self._entry(records[position])
            self._next = None
            if not entry.is_settled:
                assert entry.route is not None
                if not stages.get(entry.route.ahead.stage).begin(entry):
                    self._next = entry
                    break
            entries.append(entry)
            position += 1
            if now() > until:
                break
        return position - start

    def drop(self) -> None:
        """Nobody enters any more."""
        self._next = None

    def _route(self, record: IncomingRecord) -> tuple[Route | None, bytes | None]:
        """Who handles it, and the version header; as ``Attempts.read`` finds them."""
        name, version = type_and_version(record.headers)
        router = self._worker.engine.router
        return (router.default if name is None else router.routes.get(name, router.default)), version

    def _entry(self, record: IncomingRecord) -> Entry:
        route, version = self._route(record)
        entry = Entry(self._worker.epoch, record, route, None, self._line)
        if route is None or route.ahead is None:
            entry.settle(None)
            return entry
        if version != route.wire_version:
            _, entry.event, unreadable = self._worker.attempts.read(record)
        else:
            unreadable = None
            try:
                entry.event = route.decode(record.value, route.version)
            except DecodeError as error:
                unreadable = error
        if unreadable is not None:
            entry.settle(None)  # met again at its turn, by those who know what to do
            return entry
        attempts = self._worker.attempts
        known = attempts.known_failures.get(record.offset) if attempts.known_failures else None
        if known is not None and is_last(route.policy, *known):
            entry.fail(known[1], known[0])  # no use in doing its work again
            return entry
        try:
            entry.plan = route.ahead.plan(record, entry.event)
        except (Exception, asyncio.CancelledError) as error:
            entry.fail(error if isinstance(error, Exception) else cancelled_inside(error), 1)
        return entry
