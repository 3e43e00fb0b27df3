"""The interface of a kind of handlers that run in their turn, beside the plain ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from streams.core.origin import Origin
from streams.core.router import Route
from streams.core.timers import Timer
from streams.records import Change, IncomingRecord
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.host import Host
from streams.runtime.partition.state import Partition

Keep: TypeAlias = Callable[[Partition, IncomingRecord, int], Change | None]
"""Takes a record, and the bytes that a record of the changelog may have. Returns the change of it for the changelog,
with its origin. If it raises, nothing was done: ``Execution.one`` handles the record, and reports the error."""


class HandlerKind(Protocol):
    """The arguments of the handlers of one kind (``Route.kind``), and their way in a slice. Without state.

    Replays compare ``name``. ``option`` is the argument that registers such handlers, ``instead`` the way for functions
    that wait: for error messages.
    """

    @property
    def name(self) -> str: ...
    @property
    def option(self) -> str: ...
    @property
    def instead(self) -> str: ...
    @property
    def keep(self) -> Keep | None:
        """The work on each record, if that calls no handler: then records have their turn among the plain handlers of a
        slice."""
        ...

    def argument(self, partition: Partition, host: Host, record: IncomingRecord, event: Any) -> Any:
        """Make the second argument of an attempt on a single event. Raises ``DecodeError``."""
        ...

    def context(
        self,
        partition: Partition,
        host: Host,
        records: Sequence[IncomingRecord],
        attempt: int = 1,
        timer: Timer | None = None,
        origin: Origin | None = None,
    ) -> EventContext[Any]:
        """Make the context of an attempt; with a timer the only record is that timer's event. ``origin``: that of the
        first event in a parked key's queue."""
        ...

    def run(
        self, partition: Partition, host: Host, route: Route, records: list[IncomingRecord], start: int, stop: int
    ) -> tuple[int, BaseException | None]:
        """Handle and admit, in one ``Unit``, some of the records from ``start`` to ``stop``; the first one is of this
        route, in its current version. Returns the position behind and ``None``; or ``start``, when the first one cannot
        be read, or with the reason why it failed."""
        ...
