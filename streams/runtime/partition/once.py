"""Events that are handled once (``once=``): their ids, and the slice of plain handlers that have them.

Whether an event is a duplicate is decided at its turn: then everything before it in its partition is complete, or
undone, or waits in a queue. A duplicate is passed: no context is made, nothing but the position moves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol

from streams.core.origin import INTERJECTION
from streams.core.router import Route
from streams.core.seen import BYTES_PER_ID, Digests
from streams.core.timers import Timer
from streams.errors import DecodeError, EventFailure
from streams.metrics import EventDuplicate, IdMissing, IdsForgotten
from streams.records import Change, IncomingRecord
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import of_policy
from streams.runtime.partition.host import Host
from streams.runtime.partition.seen_ids import NOTE, note_of
from streams.runtime.partition.state import Partition
from streams.settings.once import HeaderId, Once

_log = logging.getLogger(__name__)


class OnceRule:
    """The ids of one event type. ``scope``: what they are compared within."""

    def __init__(self, settings: Once, name: str) -> None:
        self.settings = settings
        self.scope = name if settings.scope is None else settings.scope
        self.within_s = settings.within_s
        self.digest_of = Digests(self.scope).of
        self.id_of = _id_of(settings.id)

    def digest(self, record: IncomingRecord, event: Any) -> bytes | None:
        """Return the digest of an event's id; ``None``: it has none. Raises ``DecodeError``, and what the user's
        function raises."""
        id = self.id_of(record, event)
        try:
            return None if id is None else self.digest_of(id)
        except ValueError as error:
            raise DecodeError(f"{record.where} (once=): {error}") from error

    def __reduce__(self) -> tuple[type[OnceRule], tuple[Once, str]]:
        """Travel to other processes by what it is made of."""
        return OnceRule, (self.settings, self.scope)

    def note(self, digests: Sequence[bytes]) -> Timer:
        """Return the note of an event, or of a batch, with these ids."""
        return note_of(digests, self.within_s)

    def passed(self, partition: Partition, host: Host, route: Route, records: Sequence[IncomingRecord]) -> None:
        """Count duplicates, which are passed."""
        partition.seen.duplicates[route.name] += len(records)
        host.measure(EventDuplicate(partition.partition, records[-1].offset, route.name, len(records)))
        for record in records if _log.isEnabledFor(logging.DEBUG) else ():
            _log.debug("%s (%s) is a duplicate: an event with its id was handled before", record.where, route.name)

    def unfiltered(self, partition: Partition, host: Host, route: Route, events: int) -> None:
        """Count events without an id, which are handled in any case."""
        partition.seen.missing[route.name] += events
        host.measure(IdMissing(partition.partition, route.name, events))

    def of_batch(
        self, partition: Partition, host: Host, route: Route, records: list[IncomingRecord], events: list[Any]
    ) -> OnceBatch:
        """Return the first of these events as a batch without duplicates; or duplicates in front of it, which are
        admitted; or nothing: the first event is for ``Execution``."""
        seen, own, batch = partition.seen, set[bytes](), OnceBatch(partition, host, route)
        for record, event in zip(records, events, strict=True):
            try:
                digest = None if seen.is_full else self.digest(record, event)
            except Exception:
                break  # done again by Execution.one, which handles the error
            if seen.is_full:
                break
            is_duplicate = digest is not None and (digest in own or seen.find(digest) is not None)
            if batch.duplicates and not batch.records and not is_duplicate:
                break  # the first event of a batch is that of its first record
            batch.covered += 1
            if is_duplicate:
                batch.duplicates.append(record)
                continue
            batch.records.append(record)
            batch.events.append(event)
            if digest is not None:
                own.add(digest)
                batch.digests.append(digest)
        if batch.duplicates and not batch.records:
            partition.watermark = records[batch.covered - 1].offset + 1
            host.pool.admit(partition.partition, partition.watermark, [], [], events=batch.covered)
            batch.count()
        return batch

    @staticmethod
    def keep(record: Change, reply: bytes) -> int:
        """Keep a reply beside an id, in its record. Returns the room that it takes."""
        record.value = (record.value or b"") + reply
        return 1 + len(record.value) // BYTES_PER_ID

    def recorded(self, partition: Partition, new: dict[bytes, Change], value: bytes) -> list[Change]:
        """Record the ids of a slice's complete events, most of them with this ``value``. Returns the changes for its
        transaction."""
        last = next(reversed(new))
        if new[last].origin >= partition.watermark:  # its event has failed, or was interrupted
            del new[last]
        seen = partition.seen
        seen.rows.set_new(new, value)
        return [*new.values(), *seen.forget(len(new), INTERJECTION)]

    def count(
        self,
        partition: Partition,
        host: Host,
        route: Route,
        passed: Sequence[IncomingRecord],
        missing: Sequence[IncomingRecord],
    ) -> None:
        """Count duplicates, and events without an id."""
        if passed:
            self.passed(partition, host, route, passed)
        if missing:
            self.unfiltered(partition, host, route, len(missing))


class OnceBatch:
    """Some events that follow each other, without duplicates. ``covered``: so many records, duplicates among them."""

    def __init__(self, partition: Partition, host: Host, route: Route) -> None:
        self._where = partition, host, route
        self.records: list[IncomingRecord] = []
        self.events: list[Any] = []
        self.digests: list[bytes] = []
        self.duplicates: list[IncomingRecord] = []
        self.covered = 0

    def note(self, ctx: EventContext[Any]) -> None:
        """Note the ids in the batch's context: they are recorded if it completes."""
        if self.digests:
            ctx._changes[NOTE] = self._where[2].once.note(self.digests)

    def count(self) -> None:
        """Count what it has passed, and the events without an id: they are complete."""
        partition, host, route = self._where
        if self.duplicates:
            route.once.passed(partition, host, route, self.duplicates)
        if len(self.records) > len(self.digests):
            route.once.unfiltered(partition, host, route, len(self.records) - len(self.digests))


def _id_of(given: Any) -> Callable[[IncomingRecord, Any], Any]:
    if isinstance(given, HeaderId):
        return lambda record, _: record.header(given.name)
    if isinstance(given, str):
        field = attrgetter(given)
        return lambda _, event: field(event)
    function: Callable[[IncomingRecord, Any], Any] = given
    return function


class EventEnds(Protocol):
    """The ends of an event whose handler is not called (``execution.Execution``)."""

    def context(self, record: IncomingRecord) -> EventContext[Any]: ...
    async def complete(self, ctx: EventContext[Any], watermark: int) -> None: ...
    async def failed(
        self, record: IncomingRecord, route: Route | None, error: BaseException, attempts: int
    ) -> None: ...


class OnceTurns:
    """The turns of one partition's events that are handled once, outside of slices. On its task."""

    def __init__(self, partition: Partition, host: Host, ends: EventEnds) -> None:
        self._partition = partition
        self._host = host
        self._ends = ends
        self._known: tuple[IncomingRecord, Timer | None] | None = None  # of the event that has its turn

    def is_duplicate(self, record: IncomingRecord, route: Route, event: Any) -> bool:
        """Look an event up at its turn. Raises as ``OnceRule.digest``, and ``EventFailure`` if there is no room for a
        further id."""
        rule: OnceRule = route.once
        digest = rule.digest(record, event[0] if route.kind is not None else event)  # a batch of one
        return self.is_known(record, route, digest)

    def is_known(self, record: IncomingRecord, route: Route, digest: bytes | None) -> bool:
        """Look up the event with this id at its turn. Raises ``EventFailure``."""
        seen = self._partition.seen
        self._known = record, None
        if digest is None:
            return False
        if seen.find(digest) is not None:
            return True
        if seen.is_full:
            make_room(self._partition, self._host, record)
        self._known = record, route.once.note([digest])
        return False

    def note(self, ctx: EventContext[Any], record: IncomingRecord) -> None:
        """Note the id in an attempt's context: it is recorded if the event completes."""
        known = self._known
        if known is not None and known[0] is record and known[1] is not None:
            ctx._changes[NOTE] = known[1]

    async def settles(self, record: IncomingRecord, route: Route, event: Any) -> bool:
        """End an event that is a duplicate, or that has failed for its id. ``False``: it is neither. Raises
        ``EventFailure``."""
        try:
            is_duplicate = self.is_duplicate(record, route, event)
        except EventFailure:
            raise
        except BaseException as error:
            await self._ends.failed(record, route, of_policy(error, record.where), 1)
            return True
        if is_duplicate:
            route.once.passed(self._partition, self._host, route, [record])
            self._partition.failures.meet(record.offset)
            await self._ends.complete(self._ends.context(record), record.offset + 1)
        elif self._known == (record, None):
            route.once.unfiltered(self._partition, self._host, route, 1)
        return is_duplicate

    def sweep(self) -> bool:
        """Let some ids go whose time is over, between two turns. Returns whether there may be more."""
        partition, host = self._partition, self._host
        forgotten, partition.seen.unmeasured = partition.seen.unmeasured, 0
        if forgotten:
            host.measure(IdsForgotten(partition.partition, forgotten))
        now_s = due_s(partition, host)
        if now_s is None or host.pool.is_full:
            return False
        changes = partition.seen.sweep(now_s)
        if changes:
            host.pool.admit(partition.partition, partition.watermark, [], changes, events=0)
        return bool(changes)


def due_s(partition: Partition, host: Host) -> int | None:
    """Return the partition's time in seconds if there are ids to go by it; ``None``: there are none."""
    next_s, last = partition.seen.rows.next_s, partition.last_handled
    if next_s is None or last is None:
        return None
    # Of a backlog it is the time of its records, so a copy in it is found however long the source stood still; and it
    # is no later than the clock.
    time_ms = last[0].timestamp_ms
    now_s = (min(host.wall_ms(), time_ms) if time_ms > 0 else host.wall_ms()) // 1000
    return now_s if now_s >= next_s else None


def make_room(partition: Partition, host: Host, record: IncomingRecord) -> None:
    """Let ids go whose time is over by the clock, for the next one. Raises ``EventFailure`` if there are none."""
    seen = partition.seen
    changes = seen.sweep(host.wall_ms() // 1000)
    if changes:
        host.pool.admit(partition.partition, partition.watermark, [], changes, events=0)
    if seen.is_full:
        assert seen.bounds is not None
        raise EventFailure(
            f"{record.where}: there is no room for its id: the partition remembers {len(seen)} ids, as many as "
            f"Once.max_ids ({seen.bounds.max_ids}) allows; the source stops, and the next start meets the event "
            "again. Raise max_ids, make within shorter, keep them on disk (engine=), or let the oldest go "
            '(when_full="forget")'
        )
