"""The records of joined tables, as a kind of handlers: each changes a row, and the table's update handler gets it.

A row changes in the transaction that moves the position in the table's topic, whatever its update handler does: if that
fails for good, its effects go the way of its policy, and the row is changed all the same, or the table would differ
from its topic for good.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from streams.core.origin import Origin
from streams.core.router import Route
from streams.core.timers import Timer
from streams.errors import DecodeError, RecordRefused, RegistrationError
from streams.records import Change, IncomingRecord
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import describe
from streams.runtime.partition.handler_kind import Keep
from streams.runtime.partition.host import Host
from streams.runtime.partition.joined_rows import ROUTE_PREFIX, RowTable, row_key
from streams.runtime.partition.state import Partition
from streams.runtime.partition.unit import Unit

StoreT = TypeVar("StoreT")


class RowChange:
    """A row that is being changed by an event; it is changed as soon as this is made."""

    __slots__ = ("_before", "_change", "_old", "_row", "_table")

    def __init__(self, topic: str, table: RowTable, row: Any) -> None:
        self._change = Change(row_key(topic, row.key), row.value)
        self._table, self._row = table, row
        self._old = table.row(row.key)  # before the exchange: the update handler gets the row as it was
        self._before = table.exchange_row(row.key, self._change)

    def undo(self) -> None:
        """Take it back: the event has failed, and each further attempt is to see the same row before."""
        self._table.put_back_row(self._row.key, self._change, self._before)

    def admitted(self, origin: Origin) -> Change:
        """Return the change for the transaction of the event, which is complete."""
        self._change.origin = origin
        return self._change

    def update(self) -> Any:
        """Make the argument of the update handler."""
        return self._table.update(self._row, self._old)


class UpdateContext(EventContext[StoreT]):
    """The context of an update handler; the row is changed already."""

    _change: RowChange | None = None

    @property
    def _row(self) -> RowChange | None:
        """The change of the row; ``None``: the record is passed over."""
        return self._change


class RowContext(UpdateContext[StoreT]):
    """The context of a row without update handler. In a slice it has none (``JoinKind.keep``), so a store that observes
    events must not see it here: what it does would depend on the slices."""

    @property
    def _is_observed(self) -> bool:
        return False


class JoinKind:
    """The kind of a joined table's records; see ``handler_kind.HandlerKind``. ``handler``: whether the table has an
    update handler."""

    name = "update"
    option = "register_update"
    instead = "to wait for something, forward an event whose handler does"

    def __init__(self, topic: str = "", *, has_handler: bool = False) -> None:
        self.topic = topic
        self.has_handler = has_handler

    def __reduce__(self) -> tuple[type[JoinKind], tuple[str]]:
        """Travel to other processes by its topic: what runs there has no tables."""
        return JoinKind, (self.topic,)

    @property
    def keep(self) -> Keep | None:
        """See ``HandlerKind.keep``."""
        return None if self.has_handler else self._keep

    def argument(self, partition: Partition, host: Host, record: IncomingRecord, event: Any) -> Any:
        """Check that the row can be read, and written. Raises ``DecodeError``."""
        row = self._table_of(partition, record).read(record, host.message_limit)
        known = partition.failures.of_event(record.offset)
        error = None if known is None else known.error
        # Only if the row itself was refused. What its handler stores goes to the changelog, too: then the row stands.
        if row is not None and isinstance(error, RecordRefused) and error.key == row_key(self.topic, row.key):
            raise DecodeError(f"the changelog does not take the row: {describe(error)}")

    def context(
        self,
        partition: Partition,
        host: Host,
        records: Sequence[IncomingRecord],
        attempt: int = 1,
        timer: Timer | None = None,
        origin: Origin | None = None,
    ) -> UpdateContext[Any]:
        """Make the context of an attempt, and change the row."""
        (record,) = records
        table = partition.joined.tables[self.topic]
        row = table.read(record, host.message_limit)
        made: type[UpdateContext[Any]] = UpdateContext if self.has_handler else RowContext
        ctx = made(partition.store, partition.reading, record, [], [], host.message_limit, attempt, partition.timers)
        ctx._host = host
        ctx._change = None if row is None else RowChange(self.topic, table, row)
        return ctx

    def run(
        self, partition: Partition, host: Host, route: Route, records: list[IncomingRecord], start: int, stop: int
    ) -> tuple[int, BaseException | None]:
        """Change rows, and call the update handler for each. Returns as ``HandlerKind.run``."""
        if not self.has_handler or partition.reading.topic != self.topic:
            return start, None
        table, position = partition.joined.tables[self.topic], start
        unit, limit, handler = Unit(partition, [], []), host.message_limit, route.handler
        error: Exception | None = None
        unit.begin()
        for record in records[start:stop]:
            try:
                row = table.read(record, limit)
            except DecodeError:
                break  # read again by Execution.one, which reports it
            first = unit.begin_next()
            ctx: UpdateContext[Any] = UpdateContext(
                partition.store,
                partition.reading,
                record,
                unit.outputs,
                unit.journal,
                limit,
                1,
                partition.timers,
                first,
            )
            ctx._change = None if row is None else RowChange(self.topic, table, row)
            try:
                unit.observe(ctx)
                answer = handler(ctx, None)
            except BaseException as raised:
                error = unit.fail(ctx, raised)
            else:
                if inspect.iscoroutine(answer):  # a plain function around an async one
                    answer.close()
                    ctx._error = RegistrationError(f"the update handler of {self.topic} is asynchronous")
                error = unit.complete(ctx, answer, record.offset + 1)
            if error is not None:
                break
            position += 1
        if error is None:
            unit.end()
        unit.admit(host.pool)  # also behind a failure: the rows before it are complete
        return position, error

    def _keep(self, partition: Partition, record: IncomingRecord, size_limit: int) -> Change | None:
        """Change the row of a record. Raises ``DecodeError``, and ``TopicError`` for one that is misplaced."""
        table = self._table_of(partition, record)
        row = table.read(record, size_limit)
        if row is None:
            return None
        change = Change(row_key(self.topic, row.key), row.value, origin=record.offset)
        table.set_row(row.key, change)
        return change

    def _table_of(self, partition: Partition, record: IncomingRecord) -> RowTable:
        if record.topic != self.topic:
            raise DecodeError(f"the type {ROUTE_PREFIX}{self.topic} is for rows of the joined table {self.topic} only")
        return partition.joined.tables[self.topic]


def keep_row(ctx: EventContext[Any], _: object) -> None:
    """Handle the rows of a table without update handler: there is nothing else to do."""


def with_update(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an update handler as the handler of its records."""

    def handle(ctx: EventContext[Any], update: object) -> Any:
        row = ctx._row
        if update is None and row is not None:  # else it was parked, and its row is changed already
            update = row.update()
        return None if update is None else function(ctx, update)

    handle.__qualname__, handle.__module__ = getattr(function, "__qualname__", repr(function)), function.__module__
    return handle


def update_again(
    route: Route, record: IncomingRecord, old: bytes | None, partition: Partition
) -> Callable[[EventContext[Any]], Any]:
    """Return the update handler of a record that was parked, for the change of its row from ``old``."""

    def handle(ctx: EventContext[Any]) -> Any:
        table = partition.joined.tables[record.topic]
        row = table.read(record, ctx._limit)
        return None if row is None else route.handler(ctx, table.update(row, old))

    return handle
