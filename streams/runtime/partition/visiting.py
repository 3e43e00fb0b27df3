"""Visits of one partition: requests are taken into its state, and runs go over the keys of its store between events.

Each key is an event of its own, as that of a timer. The state of the run that it belongs to (``core.visits``) is set
further in the transaction of its effects, so whatever happens the next owner goes on behind the last key that is
committed: a key is visited once per run.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterator
from itertools import islice
from typing import Any, Final, Protocol

from streams.core.origin import INTERJECTION
from streams.core.router import Route
from streams.core.visits import LONGEST_NAME, TIMER_PREFIX, VisitedKey, VisitRequest, VisitState, state_of
from streams.errors import DecodeError, EventFailure, RegistrationError
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.execution import Execution
from streams.runtime.partition.host import Host
from streams.runtime.partition.merged_inputs import MergedInputs
from streams.runtime.partition.state import Partition
from streams.runtime.partition.timers import as_record
from streams.statistics import VisitStatistics

_log = logging.getLogger(__name__)

AT_ONCE: Final = 64
"""Keys that are visited between two events, at most: a visit of a large table must not hold events up."""
LONGEST_SECONDS: Final = 0.005
"""Seconds after which no further key is visited between two events."""


class VisitableTable(Protocol):
    """A table whose keys are visited (``stores.table.Table``)."""

    @property
    def has_order(self) -> bool: ...
    def keys_after(self, key: bytes | None) -> Iterator[bytes]: ...
    def entry(self, key: bytes) -> tuple[Any, Any] | None: ...


def table_of(store: Any, visit: str, table: str | None) -> VisitableTable:
    """Return the table that a visit goes over. Raises ``RegistrationError``: there is none of this name, or it has no
    order."""
    found: Any = store if table is None else getattr(store, table, None)
    if not hasattr(found, "keys_after"):
        named = "the store" if table is None else f"{table!r} of the store"
        raise RegistrationError(
            f"the visit {visit!r}: {named} ({type(found).__name__}) is no Table; of a Stores, name one of its tables: "
            "register_visit(name, table=...)"
        )
    tables: VisitableTable = found
    if not tables.has_order:
        raise RegistrationError(
            f"the visit {visit!r}: the table keeps no order of its keys, and a run goes on behind the last key that it "
            "has visited; make it with ordered=True, or on disk"
        )
    return tables


async def requested(ctx: EventContext[Any], request: VisitRequest) -> Any:
    """Handle a request: take it into the state of its visit, or visit a key again."""
    timers = ctx._timers
    assert timers is not None  # it has its turn
    if request.action == "again":
        return await _again(ctx, request)
    if ctx.topic_partition.topic != (topic := ctx._host.config.visits_topic):
        raise DecodeError(f"runs of visits are requested by records of {topic}, where it takes a right of its own")
    shortest_run = 0 if request.action == "cancel" else 1
    if not (1 <= len(request.visit) <= LONGEST_NAME and shortest_run <= len(request.run) <= LONGEST_NAME):
        raise DecodeError(
            f"names of visits and runs have 1 to {LONGEST_NAME} letters; this is no request of start_visit"
        )
    name = TIMER_PREFIX + request.visit
    state = state_of(timers.visits.get(name))
    if state is None:
        raise RegistrationError(f"the state of the visit {request.visit!r} is that of a newer release of this package")
    then = state.requested(request)
    if then is not state:
        ctx._timer_changes = {name: then.as_timer(request.visit)}
    return None


async def _again(ctx: EventContext[Any], request: VisitRequest) -> Any:
    """Visit a key whose dead letter was sent again, if it is still there. The run's state is not concerned."""
    timers, key = ctx._timers, None if ctx.input is None else ctx.input.key
    known = None if timers is None else timers.router.visits.get(request.visit)
    if known is None:
        raise RegistrationError(f"this source has no visit {request.visit!r}")
    route, table = known
    entry = table_of(ctx.store, request.visit, table).entry(key or b"")
    if entry is None:
        return None
    if route.is_blocking:
        return await ctx._host.handler_threads.call(ctx.topic_partition.partition, route.handler, ctx, *entry)
    answer = route.handler(ctx, *entry)
    return await answer if isinstance(answer, Awaitable) else answer


class Visiting:
    """The runs of one partition's visits. On its task."""

    def __init__(self, partition: Partition, host: Host, execution: Execution) -> None:
        self._partition = partition
        self._host = host
        self._execution = execution
        self._warned: set[str] = set()

    async def step(self, inputs: MergedInputs | None) -> bool:
        """Visit some keys of a run that is under way. Returns whether there was one. Raises as
        ``PartitionWorker.run``."""
        # Requests come first, so that a run that stops the source can be cancelled.
        visits = self._partition.timers.visits
        if inputs is None or not visits or not inputs.has_taken(self._host.config.visits_topic):
            return False
        next_one: tuple[str, VisitState, Route, str | None] | None = None
        for name, timer in visits.items():
            visit, state = name.removeprefix(TIMER_PREFIX), state_of(timer)
            known = self._host.router.visits.get(visit)
            # Left as it is: a member of a release that knows the visit may go on with the run.
            if state is None or (state.run and known is None):
                self._warn(visit)
            elif known is not None and state.run and (next_one is None or state.keys):
                next_one = (visit, state, *known)  # one that has begun: a restore may have changed their order
        if next_one is None:
            return False
        await self._go_on(*next_one)
        return True

    def statistics(self) -> tuple[VisitStatistics, ...]:
        """Return the figures of its visits."""
        found = [(name, state_of(timer)) for name, timer in self._partition.timers.visits.items()]
        return tuple(
            VisitStatistics(
                name.removeprefix(TIMER_PREFIX),
                state.run,
                state.keys,
                state.waiting,
                {one.run: one.keys for one in state.finished if not one.cancelled},
                {one.run: one.keys for one in state.finished if one.cancelled},
            )
            for name, state in found
            if state is not None
        )

    async def _go_on(self, visit: str, state: VisitState, route: Route, table_name: str | None) -> None:
        partition, now = self._partition, self._host.now
        table, began = table_of(partition.store, visit, table_name), now()
        is_over = True
        for key in islice(table.keys_after(state.after), AT_ONCE):
            is_over = False
            await self._visit(VisitedKey.of(visit, state, key, self._host.wall_ms()), route, table, key)
            if partition.is_closing or now() - began > LONGEST_SECONDS:
                return  # without a step of the iterator: the store may be gone
            state = state.visited(key)
        if is_over:
            self._end(visit, state)

    async def _visit(self, visited: VisitedKey, route: Route, table: VisitableTable, key: bytes) -> None:
        execution, handler, limit = self._execution, route.handler, self._host.message_limit
        if 2 * len(key) > limit:  # as base64 in base64; its refusal would be that of each policy, without end
            raise EventFailure(
                f"{visited.title} of {self._partition.topic_partition}: the key has {len(key)} bytes. The place of a "
                f"run is a key, which may have half of message.max.bytes of the producer ({limit}) at most. Raise that "
                "in client_settings (and max.message.bytes of the changelog), or cancel the run: kes visit --cancel"
            )

        def handle(ctx: EventContext[Any]) -> Any:
            # Read within the attempt: an event may have changed or removed the key since its run began.
            entry = table.entry(key)
            return None if entry is None else handler(ctx, *entry)

        record = as_record(visited, self._partition.topic_partition)
        with execution.traced(record):
            await execution.retrying(record, route, handle, timer=visited)

    def _end(self, visit: str, state: VisitState) -> None:
        """Note that a run has visited all keys; the next one begins."""
        partition = self._partition
        timer = state.ended().as_timer(visit)
        # No event, so the watermark is sent again: without an offset a transaction has no fence (R1).
        changes = partition.timers.admitted({timer.name: timer}, INTERJECTION)
        self._host.pool.admit(partition.partition, partition.watermark, [], changes, events=0)
        _log.info(
            "%s: run %s of the visit %r is over: %d keys", partition.topic_partition, state.run, visit, state.keys
        )

    def _warn(self, visit: str) -> None:
        if visit not in self._warned:
            self._warned.add(visit)
            _log.warning(
                "%s: a run of the visit %r is under way, which this release of the source (or of this package) does "
                "not know: it waits there until one that does works on the partition",
                self._partition.topic_partition,
                visit,
            )
