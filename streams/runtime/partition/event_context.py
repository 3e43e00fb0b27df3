"""The context of a handler while it works on one event."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, overload

from msgspec import UNSET, UnsetType

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.jobs import JobEnd
from streams.core.origin import INTERJECTION
from streams.core.timers import Timer
from streams.errors import EncodeError, RegistrationError, StoreError
from streams.events import event_type_of
from streams.formats.cloudevents import CloudEvent, attributes_of
from streams.model.own_metrics import MetricKind
from streams.outcomes import ExecutionState
from streams.records import Change, OwnSample, Record
from streams.runtime.changelog import encode_timer
from streams.runtime.partition import forwarding, looping, starting_jobs
from streams.runtime.partition.context_fields import OWN_NAME, ContextFields, check_name, outlived, too_large
from streams.runtime.partition.joined_rows import JoinedTopic
from streams.runtime.partition.starting_jobs import Startable
from streams.runtime.ports import LookupTopic
from streams.sak.numbers import is_number

StoreT = TypeVar("StoreT")
TableT = TypeVar("TableT")

LATEST_SECONDS: Final = 253_402_300_800
"""Seconds from the epoch to the end of the year 9999, which is as far as a datetime goes."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND: Final = timedelta(milliseconds=1)


class StartedJob(NamedTuple):
    """A durable job that has ended: its name, its id outside, and the key of the event at its end."""

    name: str
    id: str
    key: bytes | None


class EventContext(ContextFields, Generic[StoreT], eq=False, weakref=True):
    """One event, its partition's store, and what the event sends. Valid while its handler runs, not longer.

    Nothing is sent by ``forward`` itself: outputs are collected, and go into the transaction when the event completes.
    Use it from the handler only (for ``blocking=True`` that is the handler's thread).
    """

    if TYPE_CHECKING:
        store: StoreT

    @property
    def _row(self) -> Any:
        """The change of a row: of an update's context (``joining.UpdateContext``)."""
        return None

    @property
    def _is_observed(self) -> bool:
        """Check whether an observing store gets it: there is a handler (not so: ``joining.RowContext``)."""
        return True

    @property
    def _moves_time(self) -> bool:
        """Check whether it may move its partition's time: see ``InputSpec.moves_time``."""
        timers = self._timers
        return timers is None or self.topic_partition.topic not in timers.timeless

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.where}>"

    @property
    def is_interjection(self) -> bool:
        """Check whether this is work without an input record: scheduled, requested, or a timer's (see ``timer``)."""
        return self.input is None

    @property
    def is_muted(self) -> bool:
        """Check for a source that follows another one muted (``shadow_of``): what it sends is dropped. For logging."""
        return self._timers is not None and self._timers.is_muted

    @property
    def cloudevent(self) -> CloudEvent | None:
        """The attributes of the input record, if it is a CloudEvent; ``None``: it is none, or there is none."""
        return attributes_of(self.input)

    if TYPE_CHECKING:  # the leaf's function

        @overload
        def forward(self, topic: Record, /) -> None: ...

        @overload
        def forward(
            self,
            topic: str,
            event: object,
            /,
            *,
            key: str | bytes | None = None,
            headers: Iterable[tuple[str, bytes | None]] = (),
            partition: int = -1,
            timestamp_ms: int = 0,
        ) -> None: ...

        def forward(
            self,
            topic: str | Record,
            event: object = None,
            /,
            *,
            key: str | bytes | None = None,
            headers: Iterable[tuple[str, bytes | None]] = (),
            partition: int = -1,
            timestamp_ms: int = 0,
        ) -> None:
            """Send an event object, or a ready ``Record``, in this event's transaction: see ``forwarding.forward``."""

    else:
        forward = forwarding.forward

    def loop(self, event: object, /, *, key: str | bytes, headers: Iterable[tuple[str, bytes | None]] = ()) -> None:
        """Send an event to this source itself (``EventSourceConfig(loop=True)``), in this event's transaction: the
        partition of its key handles it, once, in its own order, before further input. Raises as ``forward``, and
        ``LoopTooLong`` when ``max_loop_hops`` events have led to one another already."""
        looping.loop(self, event, key, headers)

    def count(self, metric: str, amount: float = 1, /, **labels: object) -> None:
        """Add to a counter of the source's own (``source.metric``). It is exported when this event is committed: once,
        however often the event is attempted or sent again, and not if it fails. Raises ``StoreError``."""
        self._sample("counter", metric, amount, labels)

    def observe(self, metric: str, amount: float, /, **labels: object) -> None:
        """Observe a value in a histogram of the source's own. As ``count``."""
        self._sample("histogram", metric, amount, labels)

    def _sample(self, kind: MetricKind, metric: str, amount: float, labels: dict[str, object]) -> None:
        if self._closed:
            raise outlived("count" if kind == "counter" else "observe", self)
        router = self._host.router if self._timers is None else self._timers.router
        known = router.own_metrics.get(metric)
        if known is None:
            raise StoreError(f"{self.where}: there is no metric {metric!r}; declare it: source.metric({metric!r}, ...)")
        value, texts = known.values(kind, amount, labels)
        self._outputs.append(
            OwnSample(
                "", b"", None, None, -1, 0, self.topic_partition.partition, self._origin,
                name=metric, amount=value, labels=texts,
            )
        )  # fmt: skip

    def record_change(self, *changes: Change) -> None:
        """Write changes of an own ``StateStore`` to the changelog, in this event's transaction (the last per key
        wins).

        Stores that journal by themselves (``Table``, ``SimpleStore``) need no call; calling it all the same is
        harmless: a change that is in the journal already is not written again, or it could hide a later one of the
        same key.
        """
        if self._closed:
            raise outlived("record_change", self)
        # All are checked before the first is kept: a call that raises has recorded nothing.
        for change in changes:
            if change.key.startswith(RESERVED_KEY_PREFIX):
                raise StoreError(
                    f"the key {change.key!r} begins with a prefix that is reserved for the changelog itself"
                )
        for change in changes:
            # By identity: of the changes A, B, A of one key the last one counts, although A is in the journal already.
            if not any(change is known for known in self._journal[self._first :]):
                self._journal.append(change)

    def joined(self, table: JoinedTopic[TableT]) -> TableT:
        """Return the rows of a joined table (``source.join``) in this partition: a ``ReadTable``, as of this
        event's place in the order. Raises ``StoreError`` ahead of the event's turn, after the handler ended, and for
        what this source does not join."""
        if self._closed:
            raise outlived("joined", self)
        if self._timers is None:
            raise StoreError(f"{self.where}: joined was called ahead of the event's turn; await ctx.turn() first")
        found: Any = self._timers.joined.of_table(table)
        if found is None:
            raise StoreError(f"{self.where}: {table!r} is no joined table of this source; source.join(...) makes one")
        rows: TableT = found
        return rows

    def lookup(self, table: LookupTopic[TableT]) -> TableT:
        """Return the table of a lookup (``source.lookup``): all of its topic, read-only, as of now. It may change while
        the handler runs. Also ahead of the event's turn. Raises ``StoreError`` after the handler ended, and for what
        this source does not look into."""
        if self._closed:
            raise outlived("lookup", self)
        tables = self._host.lookups if self._timers is None else self._timers.lookups
        found: TableT | None = tables.table(table)
        if found is None:
            raise StoreError(f"{self.where}: {table!r} is no lookup of this source; source.lookup(...) makes one")
        return found

    def is_parked(self, key: str | bytes) -> bool:
        """Check whether events of this key wait in its partition's queue (``PARK``): what they would change in the
        store is missing. Keys of this partition. Raises ``StoreError`` ahead of the event's turn, and after the handler
        ended."""
        if self._closed:
            raise outlived("is_parked", self)
        if self._timers is None:
            raise StoreError(f"{self.where}: is_parked was called ahead of the event's turn; await ctx.turn() first")
        return (key.encode() if isinstance(key, str) else key) in self._timers.parked.keys

    # -- timers --------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time of day in UTC, as timers count it: to the millisecond, and virtual in a simulated world."""
        return datetime.fromtimestamp(self._now_ms / 1000, UTC)

    def schedule_at(
        self, when: datetime | float, event: object, *, name: str | None = None, key: str | bytes | None = None
    ) -> str:
        """Set a durable timer: at ``when`` (an aware datetime, or seconds since the epoch) the handler of this event's
        type gets the event, once, in this partition's order, as an interjection with ``ctx.timer``. Returns its name.

        The timer is part of this event's transaction: it is set when the event completes, and not if it fails. It is
        kept in the changelog, so it fires wherever the partition is then; never early, and if no member works on the
        partition at that time, as soon as one does. ``name`` is one of this partition's timers: one that is set is
        replaced; without it the timer gets a name of its own. ``key`` is ``ctx.timer.key`` then (default: the key of
        the record, or timer, that is being handled). Raises ``EncodeError``, ``RecordRefused`` (too large),
        ``RegistrationError`` (no event class, or no handler for it), ``StoreError`` (after the handler ended).
        """
        if self._closed:
            raise outlived("schedule_at", self)
        event_type = event_type_of(type(event))
        router = self._host.router if self._timers is None else self._timers.router
        if router.default is None and event_type.name.encode() not in router.routes:
            raise RegistrationError(
                f"a timer was set with an event of type {event_type.name!r}, which has no handler: register one "
                "for it, or a default handler"
            )
        changes = self._changes
        if name is None:
            number = len(changes)
            name = self._own_name(number)
            # The timer that fires now may have fired before, for the same time: what it set then may still be there.
            while name in changes or (self._timers is not None and name in self._timers):
                number += 1
                name = self._own_name(number)
        else:
            check_name("timer", name)
        if key is None:
            known = self.input or self.timer
            key = None if known is None else known.key
        elif isinstance(key, str):
            key = key.encode()
        elif not isinstance(key, bytes):
            raise EncodeError(f"the key of a timer is a {type(key).__name__}; use str, bytes or None")
        trace, by = () if self._trace is None else self._trace.carrier, self._origin
        if by == INTERJECTION:  # they all have one origin
            by = self._host.rng.getrandbits(32)
        timer = Timer(
            name, _due_ms(when), event_type.name, event_type.encode(event), event_type.version, key, trace, by
        )
        # Here the handler gets the error. The broker would refuse the record later, and the transaction with it.
        size = len(encode_timer(timer))
        if size > self._limit:
            raise too_large(f"the changelog (the timer {name!r})", size, self._limit)
        changes[name] = timer
        return name

    def schedule_in(
        self, delay: timedelta | float, event: object, *, name: str | None = None, key: str | bytes | None = None
    ) -> str:
        """``schedule_at`` that time from ``now`` (timedelta, or seconds)."""
        given: object = delay  # whatever it is
        if not isinstance(given, timedelta) and not is_number(given):
            raise StoreError(f"a timer was set for {given!r} from now; give a timedelta, or seconds")
        try:
            when = self.now + (delay if isinstance(delay, timedelta) else timedelta(seconds=delay))
        except (OverflowError, ValueError):
            raise StoreError(f"a timer was set for {delay!r} from now: that is no time from 1970 to 9999") from None
        return self.schedule_at(when, event, name=name, key=key)

    def cancel_timer(self, name: str) -> bool:
        """Remove a timer of this partition, in this event's transaction. ``False``: there is none of this name (any
        more). Raises ``StoreError`` ahead of the event's turn, and after the handler ended."""
        if self._closed:
            raise outlived("cancel_timer", self)
        if self._timers is None:
            raise StoreError(f"{self.where}: cancel_timer was called ahead of the event's turn; await ctx.turn() first")
        changes = self._changes
        there = changes[name] is not None if name in changes else name in self._timers
        run = None if self.timer is None else self.timer.following
        if run is not None and changes.get(name) is run:
            return False  # the state of the visit that this event belongs to is no timer of a handler
        if there:
            changes[name] = None
        return there

    # -- durable jobs --------------------------------------------------------------------------------------------------

    @property
    def job(self) -> StartedJob | None:
        """The job whose end this event is, in its finalizer and ``on_failure``."""
        end = self.timer
        if not isinstance(end, JobEnd):
            return None
        return StartedJob(end.job_name, end.state.id, end.key)

    def start_job(
        self,
        jobs: Startable,
        item: object,
        *,
        name: str | None = None,
        delay: timedelta | float = 0,
        key: str | bytes | UnsetType | None = UNSET,
        order: str | bytes | UnsetType | None = UNSET,
    ) -> str:
        """Start a durable job of an ``AsyncJobScheduler``, after ``delay`` (timedelta, or seconds). Returns its name.

        The start is part of this event's transaction: the job begins once that is committed, and never if it is not.
        Nothing waits for it. Its end is an event of this partition, exactly once: the scheduler's ``finalizer`` with
        its result, or ``on_failure`` with its error. It runs at least once, under one id (``JobRun.id``), over
        restarts, moves and retries. ``name`` is one of this partition's jobs: one that has it is cancelled; without it
        the job gets a name of its own. ``key`` is the key of the event at its end (``ctx.job.key``; default: that of
        the record that is being handled). Jobs of one ``order`` (default: the key) run one after the other, over their
        retries; ``None``: in no order. Raises ``RegistrationError`` (jobs that cannot be durable, or of another
        source), ``EncodeError``, ``RecordRefused`` (too large), ``JobsFull``, ``StoreError``.
        """
        return starting_jobs.start(self, jobs, item, name, self._own_name, delay, key, order)

    def cancel_job(self, name: str) -> bool:
        """Cancel a job of this partition, in this event's transaction: neither ``finalizer`` nor ``on_failure`` is
        called for it, and what runs of it is cancelled after the commit. ``False``: there is none of this name (any
        more). Raises ``StoreError`` ahead of the event's turn, and after the handler ended."""
        return starting_jobs.cancel(self, name)

    def _begin_timer(self, timer: Timer) -> None:
        """Make the context that of the timer's event, which removes the timer when it completes (or, of a visited key,
        sets the next)."""
        self.timer = timer
        self._timer_changes = {timer.name: timer.following}

    def _own_name(self, number: int) -> str:
        if self.input is None and self.timer is None:
            return f"{OWN_NAME}{self._host.rng.getrandbits(64):x}/{number}"
        return f"{OWN_NAME}{self._named(self._origin)}/{number}"

    def _named(self, origin: int) -> str:
        """Name an event among those of all inputs. By the topic of a further input: its place may be another one in the
        next release, and timers outlive it."""
        topic = self.topic_partition.topic
        own = self._host.config.topic if self._timers is None else self._timers.source_topic
        return str(origin) if self.timer is not None or topic == own else f"{topic}@{origin}"

    async def turn(self) -> None:
        """Wait until everything before this event in its partition is complete: from then on it may use the store.

        For handlers registered with ``concurrency=...``, which run ahead of their turn; whatever they await after it
        holds up the partition. In any other handler it is the event's turn already, and this returns at once.
        """

    def fail(self, error: BaseException) -> ExecutionState:
        """Fail the event for this reason: ``return ctx.fail(error)``. Raises ``TypeError`` for what is no exception."""
        given: object = error  # whatever it is
        if not isinstance(given, BaseException):
            raise TypeError(f"ctx.fail was given {given!r}; it takes an exception")
        self._error = error
        return ExecutionState.FAIL


def _due_ms(when: object) -> int:
    """Milliseconds since the epoch, rounded up: never early."""
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise StoreError(f"a timer was set for {when.isoformat()} without a time zone; give an aware datetime")
        due_ms = -((EPOCH - when) // MILLISECOND)  # the floor of the negative difference rounds up
    elif is_number(when):
        due_ms = math.ceil(when * 1000) if -LATEST_SECONDS < when < LATEST_SECONDS else LATEST_SECONDS * 1000
    else:
        raise StoreError(
            f"a timer was set for {when!r}; give an aware datetime, or seconds since the epoch (schedule_in takes a "
            "delay)"
        )
    if not 0 <= due_ms < LATEST_SECONDS * 1000:
        raise StoreError(f"a timer was set for {when!r}: that is no time from 1970 to 9999 (seconds, not milliseconds)")
    return due_ms
