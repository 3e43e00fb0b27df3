"""The methods of ``EventSource`` that declare handlers: of event types, by time, of visits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar, overload

from streams.core.schedule import MissedRuns
from streams.model.tracing import Tracer
from streams.outcomes import ErrorPolicy, ExecutionState
from streams.runtime.partition.batch_handlers import BatchContext
from streams.runtime.partition.event_context import EventContext
from streams.settings.jobs import SchedulerConfig
from streams.settings.once import Once
from streams.source.declarations import Declarations
from streams.source.registering import by_annotation

StoreT = TypeVar("StoreT")
E = TypeVar("E")
Answer = ExecutionState | None
Handler = Callable[[EventContext[StoreT], E], Answer | Awaitable[Answer]]
BatchHandler = Callable[[BatchContext[StoreT], list[E]], Answer]
InterjectionHandler = Callable[[EventContext[StoreT]], Answer | Awaitable[Answer]]
VisitHandler = Callable[[EventContext[StoreT], Any, Any], Answer | Awaitable[Answer]]


class DeclaringHandlers(Generic[StoreT]):
    """The methods of ``EventSource`` that declare handlers. Each calls a part of ``Declarations``."""

    _declared: Declarations

    @overload
    def register_event_type(
        self,
        event_class: type[E],
        handler: Handler[StoreT, E] | None = None,
        /,
        *,
        on_error: ErrorPolicy | None = None,
        on_decode_error: ErrorPolicy | None = None,
        blocking: bool = False,
        concurrency: int | SchedulerConfig | None = None,
        batch: Literal[False] = False,
        once: Once | None = None,
    ) -> Callable[[Handler[StoreT, E]], Handler[StoreT, E]]: ...

    @overload
    def register_event_type(
        self,
        event_class: type[E],
        handler: BatchHandler[StoreT, E] | None = None,
        /,
        *,
        on_error: ErrorPolicy | None = None,
        on_decode_error: ErrorPolicy | None = None,
        batch: Literal[True],
        once: Once | None = None,
    ) -> Callable[[BatchHandler[StoreT, E]], BatchHandler[StoreT, E]]: ...

    def register_event_type(
        self, event_class: type[Any], handler: Callable[..., Any] | None = None, /, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the handler of one event type, as a decorator or with the handler as second argument.

        The handler is a plain function or ``async def``. It returns ``None`` (complete) or an ``ExecutionState``.
        Either kind keeps the order of the partition. ``blocking=True`` runs a plain function on a thread of the
        partition, so that it may take its time. ``on_error`` overrides ``config.error_policy``; ``on_decode_error``
        overrides ``config.decode_policy`` for records of this type (by their header, or the rule of their input) that
        cannot be read. Raises ``RegistrationError``.

        ``concurrency``: up to so many ``async def`` handlers of these events run at a time in this process, ahead of
        their turn; those of one record key one after the other. Such a handler has no store until it has awaited
        ``ctx.turn()``. Calls before that may happen again after a crash (at least once); its changes and outputs take
        effect once and in the order of the partition. With a ``SchedulerConfig`` its other bounds hold too
        (``timeout_seconds`` is not for handlers; retries are ``on_error``'s).

        ``batch=True``: a plain function gets a ``BatchContext`` and a list of events that follow each other in one
        partition, as many as are handled in one go (one at least, 128 at most). They take effect together or not at
        all. When such a call fails it is undone, and its events are handed in one by one, so that errors, attempts and
        dead letters are those of one event. Where the lists are cut must not matter.

        ``once=Once("payment_id", within=timedelta(days=7))`` passes events whose id was handled in this partition
        within that time: see ``Once``. An id is recorded with the event that completes, and not of one that failed, was
        skipped or waits. Events of timers and visits have no id.
        """
        return self._declared.handlers.register_event_type(event_class, handler, **options)

    @overload
    def on(self, handler: Handler[StoreT, E], /) -> Handler[StoreT, E]: ...

    @overload
    def on(
        self,
        /,
        *,
        on_error: ErrorPolicy | None = None,
        on_decode_error: ErrorPolicy | None = None,
        blocking: bool = False,
        concurrency: int | SchedulerConfig | None = None,
        batch: Literal[False] = False,
        once: Once | None = None,
    ) -> Callable[[Handler[StoreT, E]], Handler[StoreT, E]]: ...

    @overload
    def on(
        self,
        /,
        *,
        on_error: ErrorPolicy | None = None,
        on_decode_error: ErrorPolicy | None = None,
        batch: Literal[True],
        once: Once | None = None,
    ) -> Callable[[BatchHandler[StoreT, E]], BatchHandler[StoreT, E]]: ...

    def on(self, handler: Callable[..., Any] | None = None, /, **options: Any) -> Callable[..., Any]:
        """Register the handler of the event type that its second parameter is annotated with: ``@source.on``, or with
        options ``@source.on(on_error=DEAD_LETTER)``.

        The short form of ``register_event_type``, whose options it takes; with ``batch=True`` the annotation is
        ``list[Deposited]``. Raises ``RegistrationError`` for a handler whose annotation names no class.
        """
        return by_annotation(handler, self.register_event_type, options)

    def register_default_handler(
        self,
        handler: Handler[StoreT, bytes | None] | None = None,
        /,
        *,
        on_error: ErrorPolicy | None = None,
        blocking: bool = False,
    ) -> Callable[[Handler[StoreT, bytes | None]], Handler[StoreT, bytes | None]]:
        """Register the handler of records whose type has no handler; it gets the value's bytes as they came."""
        return self._declared.handlers.set_default(handler, on_error, blocking)

    def schedule_interjection(
        self,
        handler: InterjectionHandler[StoreT] | None = None,
        /,
        *,
        every: float | timedelta | None = None,
        jitter: float | timedelta = 0.0,
        missed: MissedRuns = MissedRuns.SKIP,
        on_error: ErrorPolicy | None = None,
        blocking: bool = False,
        cron: str | None = None,
        zone: str | None = None,
    ) -> Callable[[InterjectionHandler[StoreT]], InterjectionHandler[StoreT]]:
        """Run a handler on every active partition, every so many seconds, or by a cron, within its order and
        transaction.

        The first run is one interval after the partition became active; ``missed`` decides about runs that come
        late. A failed run is undone; then ``on_error`` (default: ``config.error_policy``) decides whether the source
        stops or waits for the next run. ``blocking=True`` runs a plain function on a thread of the partition.

        ``cron="30 2 * * 1-5", zone="Europe/Amsterdam"``, in place of ``every``: a text of five fields (Debian's rules),
        by the clock of that zone. A durable timer of each partition has one run per due time, over restarts and moves
        (``ctx.timer.due``); the function's name is that of the timer. Attempts of ``on_error`` count, and without
        ``missed=CATCH_UP`` one run stands for all that are late. It needs the extra ``cron``. Raises ``ConfigError``
        (also for an unknown zone, and a time that never comes), ``RegistrationError``.
        """
        return self._declared.handlers.schedule(
            handler,
            every=every,
            jitter=jitter,
            missed=missed,
            on_error=on_error,
            blocking=blocking,
            cron=cron,
            zone=zone,
        )

    def register_visit(
        self,
        name: str,
        handler: VisitHandler[StoreT] | None = None,
        /,
        *,
        table: str | None = None,
        on_error: ErrorPolicy | None = None,
        blocking: bool = False,
    ) -> Callable[[VisitHandler[StoreT]], VisitHandler[StoreT]]:
        """Register a visit, as a decorator or with the handler as second argument: a function of ``(ctx, key, value)``,
        for each key of the store. It needs ``EventSourceConfig(visits=True)``.

        ``start_visit``, or ``kes visit``, starts a run. Each partition then visits its keys in the order of their
        bytes, some between two events (64, or 5 ms, at most). A key that is there from the start of a run to its end
        is visited once in that run, whatever dies or moves; one that is put meanwhile, once or not at all; one that is
        deleted before its turn, not. The value is that of the key's turn.

        Each key is an event of its own, as that of a timer: ``ctx.input`` is ``None``, its effects are one transaction
        with its place in the run, and a failure meets ``on_error`` (default: ``config.error_policy``); a dead letter
        has the key. ``table`` is the attribute of the table in a ``Stores``; the table is ordered, or on disk.
        ``blocking=True`` runs a plain function on a thread of the partition. Raises ``ConfigError``,
        ``RegistrationError``.
        """
        return self._declared.visits.declare(name, handler, table=table, on_error=on_error, blocking=blocking)

    def set_tracer(self, tracer: Tracer) -> None:
        """Have events traced by this (``observability.OpenTelemetryTraces`` calls it). Raises ``RegistrationError``
        after the start, and for a second one."""
        self._declared.router.set_tracer(tracer)
