"""Issue events into a partition's reorder buffer: work ahead of the turn begins, or waits outside for room."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from streams.core.policy import Decision
from streams.core.router import Route, type_and_version
from streams.errors import DecodeError
from streams.model.tracing import Tracer, carried
from streams.records import IncomingRecord
from streams.runtime.partition.execution import Execution
from streams.runtime.partition.failures import of_policy
from streams.runtime.partition.host import Host
from streams.runtime.partition.hot_path import LONGEST_SLICE_SECONDS
from streams.runtime.partition.judging import judged
from streams.runtime.partition.reorder_buffer import Entry, ReorderBuffer
from streams.runtime.partition.state import Partition

MOST_AT_ONCE: Final = 64
"""Events that enter the reorder buffer before the loop runs other tasks, their jobs among them, at most."""


class Issuer:
    """The way of one partition's events into its reorder buffer. On the partition's task."""

    def __init__(self, partition: Partition, host: Host, execution: Execution, buffer: ReorderBuffer) -> None:
        self._partition = partition
        self._host = host
        self._router = host.router
        self._execution = execution
        self._buffer = buffer
        self._next: Entry | None = None  # would be the buffer's last one, but finds no room

    @property
    def is_blocked(self) -> bool:
        """Check for a next event that has found no room for its work."""
        return self._next is not None

    def goes_ahead(self, record: IncomingRecord) -> bool:
        """Check for a record whose work runs ahead of its turn."""
        if not self._router.runs_ahead:
            return False
        route = self._route(record)[0]
        return route is not None and route.ahead is not None

    def issue(self, records: Sequence[IncomingRecord], start: int) -> int:
        """Begin the work of these records, or have them wait behind those in front, as far as there is room and time.
        Returns how many were issued."""
        now, entries, stages = self._host.now, self._buffer.entries, self._host.stages
        stop, until = min(start + MOST_AT_ONCE, len(records)), now() + LONGEST_SLICE_SECONDS
        position, parked = start, self._partition.parked
        while position < stop:
            # The one that found no room is this record's: it is planned already, and no planner is called twice.
            entry = self._next or self._entry(records[position], parked)
            if self._next is not None and entry.record.key in parked:
                entry.give_up()  # its key was parked while there was no room
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
        """Forget the event that found no room."""
        blocked, self._next = self._next, None
        if blocked is not None:
            blocked.drop()

    def _route(self, record: IncomingRecord) -> tuple[Route | None, bytes | None]:
        """Find the route and the version header of a record, as ``Execution.read`` does."""
        name, version = type_and_version(record.headers)
        router = self._router
        return (router.default if name is None else router.routes.get(name, router.default)), version

    def _entry(self, record: IncomingRecord, parked: Container[bytes | None]) -> Entry:
        route, version = self._route(record)
        entry = Entry(self._partition.epoch, record, route, None, self._buffer)
        if route is None or route.ahead is None:
            # No work of its own, but it stands behind some: admitted at once it would leave a gap in front of it.
            entry.settle(None)
            return entry
        if record.key in parked:  # to spare its work; the turn decides
            entry.give_up()
            return entry
        if version != route.wire_version:  # another version than the class has: this way leads to the upcasters
            _, entry.event, unreadable = self._execution.read(record)
        else:
            unreadable = None
            try:
                entry.event = route.decode(record.value, route.version)
            except DecodeError as error:
                unreadable = error
        if unreadable is not None:
            entry.settle(None)  # read again at its turn by Execution.one, which reports the error
            return entry
        known = self._partition.failures.of_event(record.offset)
        if known is not None:
            judgement = judged(known, route.policy, record, route.name)
            if judgement.policy.waits == "key" or judgement.decision is not Decision.RETRY:
                entry.fail(known.error, known.attempts)  # from before a restart: its work would be done for nothing
                return entry
        if route.once is not None and not self._has_id(entry, route):
            return entry
        if self._router.tracer is not None:
            self._trace(entry, self._router.tracer)
        try:
            entry.plan = route.ahead.plan(record, entry.event)
        except BaseException as error:
            entry.fail(of_policy(error, record.where), 1)
        return entry

    def _has_id(self, entry: Entry, route: Route) -> bool:
        """Look an event up, to spare work in vain; the turn decides. ``False``: its work is not to begin."""
        try:
            entry.digest = route.once.digest(entry.record, entry.event)
        except BaseException as error:
            entry.fail(of_policy(error, entry.record.where), 1)
            return False
        if entry.digest is not None and self._partition.seen.find(entry.digest) is not None:
            entry.settle(None)  # at its turn it is looked up again by Execution.one
            return False
        return True

    def _trace(self, entry: Entry, tracer: Tracer) -> None:
        """Begin the entry's span, if its record is sampled."""
        if parent := carried(entry.record.headers):
            entry.trace = tracer.process(entry.record, parent)
