"""Registrations of an event source before it starts: handlers by event type, and scheduled interjections."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, overload

from streams.core.router import Route, Router, check_callable
from streams.core.schedule import MissedRuns, Schedule
from streams.errors import ConfigError, RegistrationError
from streams.events import event_type_of
from streams.model.topics import InputSpec, TopicSpec
from streams.model.topology import Topology, TopologyHandler, TopologyTopic
from streams.model.tracing import Tracer
from streams.outcomes import ExecutionState, Retry
from streams.records import IncomingRecord
from streams.runtime import source_topics
from streams.runtime.async_work.async_stage import Ahead, StageDefinition
from streams.runtime.async_work.concurrent_stage import ConcurrentStageDefinition, key_of
from streams.runtime.async_work.invoke import check_planner
from streams.runtime.partition.batch_handlers import BATCH, BatchContext
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.joined_rows import ROUTE_PREFIX
from streams.runtime.partition.joining import keep_row
from streams.runtime.partition.visiting import requested
from streams.sak.numbers import is_number, is_whole
from streams.sak.users_code import calling_place, name_of, parameter_types, place_of, unknown_name
from streams.settings.config import EventSourceConfig
from streams.settings.groups import check_type
from streams.settings.jobs import SchedulerConfig
from streams.source.lookups import Lookup, LookupDeclarations
from streams.source.visits import VisitDeclarations

StoreT = TypeVar("StoreT")
E = TypeVar("E")
P = TypeVar("P", bound=Callable[..., Any])
Answer = ExecutionState | None
Handler = Callable[[EventContext[StoreT], E], Answer | Awaitable[Answer]]
BatchHandler = Callable[[BatchContext[StoreT], list[E]], Answer]
InterjectionHandler = Callable[[EventContext[StoreT]], Answer | Awaitable[Answer]]


class Handlers(VisitDeclarations[StoreT], LookupDeclarations):
    """The registering half of ``EventSource``."""

    def __init__(self, config: EventSourceConfig) -> None:
        check_type((EventSourceConfig,), "the config of the event source", config, "an EventSourceConfig")
        self.config = config
        self._router = Router()
        self._is_stateless = False
        self._schedules: list[tuple[Schedule, Route]] = []
        self._outputs: dict[str, TopicSpec] = {}
        self._inputs: dict[str, InputSpec] = self._own_inputs()
        self._lookups: dict[str, Lookup[Any, Any]] = {}

    def set_tracer(self, tracer: Tracer) -> None:
        """Have events traced by this (``observability.OpenTelemetryTraces`` calls it). Raises ``RegistrationError``
        after the start, and for a second one."""
        self._router.set_tracer(tracer)

    @overload
    def register_event_type(
        self,
        event_class: type[E],
        handler: Handler[StoreT, E] | None = None,
        /,
        *,
        on_error: Retry | None = None,
        blocking: bool = False,
        concurrency: int | SchedulerConfig | None = None,
        batch: Literal[False] = False,
    ) -> Callable[[Handler[StoreT, E]], Handler[StoreT, E]]: ...

    @overload
    def register_event_type(
        self,
        event_class: type[E],
        handler: BatchHandler[StoreT, E] | None = None,
        /,
        *,
        on_error: Retry | None = None,
        batch: Literal[True],
    ) -> Callable[[BatchHandler[StoreT, E]], BatchHandler[StoreT, E]]: ...

    def register_event_type(
        self,
        event_class: type[Any],
        handler: Callable[..., Any] | None = None,
        /,
        *,
        on_error: Retry | None = None,
        blocking: bool = False,
        concurrency: int | SchedulerConfig | None = None,
        batch: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the handler of one event type, as a decorator or with the handler as second argument.

        The handler is a plain function or ``async def``. It returns ``None`` (complete) or an ``ExecutionState``.
        Either kind keeps the order of the partition. ``blocking=True`` runs a plain function on a thread of the
        partition, so that it may take its time. ``on_error`` overrides ``config.error_policy``. Raises
        ``RegistrationError``.

        ``concurrency``: up to so many ``async def`` handlers of these events run at a time in this process, ahead of
        their turn; those of one record key one after the other. Such a handler has no store until it has awaited
        ``ctx.turn()``. Calls before that may happen again after a crash (at least once); its changes and outputs take
        effect once and in the order of the partition. With a ``SchedulerConfig`` its other bounds hold too
        (``timeout_seconds`` is not for handlers; retries are ``on_error``'s).

        ``batch=True``: a plain function gets a ``BatchContext`` and a list of events that follow each other in one
        partition, as many as are handled in one go (one at least, 128 at most). They take effect together or not at
        all. When such a call fails it is undone, and its events are handed in one by one, so that errors, attempts and
        dead letters are those of one event. Where the lists are cut must not matter.
        """
        event_type = event_type_of(event_class)
        settings = SchedulerConfig(concurrency=concurrency) if isinstance(concurrency, int) else concurrency
        if settings is not None and not isinstance(settings, SchedulerConfig):
            raise ConfigError(
                f"the concurrency of the handler of {event_type.name} is {settings!r}; it must be a whole number, or a "
                "SchedulerConfig"
            )

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            policy, name = on_error or self.config.error_policy, event_type.name
            self._check(f"the handler of {name}", function, "ctx", "events" if batch else "event")
            if batch and settings is not None:
                raise RegistrationError(
                    f"the handler of {name}{place_of(function)} has batch=True and a concurrency: its events have "
                    "their turn already; for work on many items ahead of it there is AsyncBatcher"
                )
            ahead = None if settings is None else _concurrent(name, function, policy, settings)
            kind = BATCH if batch else None
            route = Route(name, event_type, function, blocking=blocking, policy=policy, ahead=ahead, kind=kind)
            self._router.add(route)
            return function

        if handler is not None:
            register(handler)
        return register

    @overload
    def on(self, handler: Handler[StoreT, E], /) -> Handler[StoreT, E]: ...

    @overload
    def on(
        self,
        /,
        *,
        on_error: Retry | None = None,
        blocking: bool = False,
        concurrency: int | SchedulerConfig | None = None,
        batch: Literal[False] = False,
    ) -> Callable[[Handler[StoreT, E]], Handler[StoreT, E]]: ...

    @overload
    def on(
        self, /, *, on_error: Retry | None = None, batch: Literal[True]
    ) -> Callable[[BatchHandler[StoreT, E]], BatchHandler[StoreT, E]]: ...

    def on(self, handler: Callable[..., Any] | None = None, /, **options: Any) -> Callable[..., Any]:
        """Register the handler of the event type that its second parameter is annotated with: ``@source.on``, or with
        options ``@source.on(on_error=DEAD_LETTER)``.

        The short form of ``register_event_type``, whose options it takes; with ``batch=True`` the annotation is
        ``list[Deposited]``. Raises ``RegistrationError`` for a handler whose annotation names no class.
        """

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            if isinstance(function, type):
                raise RegistrationError(
                    f"@source.on got the class {name_of(function)}{calling_place()}; it takes the event's class from "
                    f"the handler's annotation. To name the class: @source.register_event_type({function.__name__})"
                )
            check_callable("the handler", function, "ctx", "event")
            event_class = _annotated_class(function, batch=bool(options.get("batch")))
            self.register_event_type(event_class, function, **options)
            return function

        return register if handler is None else register(handler)

    def _check(self, what: str, function: Callable[..., Any], *arguments: str) -> None:
        """Refuse a function that cannot be called so, or that wants a store of a source without one."""
        check_callable(what, function, *arguments)
        ctx = next(iter(parameter_types(function)), None) if self._is_stateless else None
        store = next(iter(get_args(ctx)), None)
        is_context = issubclass(get_origin(ctx) or object, EventContext)
        if is_context and store not in (None, type(None), Any) and not isinstance(store, TypeVar):
            raise RegistrationError(
                f"{what}{place_of(function)} has the annotation {ctx}, but the event source has no store; give it one: "
                "EventSource(config, store=Table.factory(key=..., value=...))"
            )

    def register_default_handler(
        self,
        handler: Handler[StoreT, bytes | None] | None = None,
        /,
        *,
        on_error: Retry | None = None,
        blocking: bool = False,
    ) -> Callable[[Handler[StoreT, bytes | None]], Handler[StoreT, bytes | None]]:
        """Register the handler of records whose type has no handler; it gets the value's bytes as they came."""

        def register(function: Handler[StoreT, bytes | None]) -> Handler[StoreT, bytes | None]:
            self._check("the default handler", function, "ctx", "value")
            policy = on_error or self.config.error_policy
            self._router.set_default(Route("(default)", None, function, blocking=blocking, policy=policy))
            return function

        if handler is not None:
            register(handler)
        return register

    def schedule_interjection(
        self,
        handler: InterjectionHandler[StoreT] | None = None,
        /,
        *,
        every: float | timedelta,
        jitter: float | timedelta = 0.0,
        missed: MissedRuns = MissedRuns.SKIP,
        on_error: Retry | None = None,
        blocking: bool = False,
    ) -> Callable[[InterjectionHandler[StoreT]], InterjectionHandler[StoreT]]:
        """Run a handler on every active partition, every so many seconds, within its order and transaction.

        The first run is one interval after the partition became active; ``missed`` decides about runs that come
        late. A failed run is undone; then ``on_error`` (default: ``config.error_policy``) decides whether the source
        stops or waits for the next run. ``blocking=True`` runs a plain function on a thread of the partition. Raises
        ``ConfigError``, ``RegistrationError``.
        """
        schedule = Schedule(_seconds("every", every), _seconds("jitter", jitter), missed)

        def register(function: InterjectionHandler[StoreT]) -> InterjectionHandler[StoreT]:
            if self._router.is_frozen:
                raise RegistrationError(
                    "schedule_interjection comes too late: register before the event source is started"
                )
            self._check("the interjection", function, "ctx")
            policy = on_error or self.config.error_policy
            route = Route(name_of(function), None, function, blocking=blocking, policy=policy)
            self._schedules.append((schedule, route))
            return function

        if handler is not None:
            register(handler)
        return register

    def input(self, topic: str, *, event: type[Any] | None = None, nulls: Retry | None = None) -> str:
        """Declare a further topic that the source reads. Returns its name.

        Partition p of the source is partition p of all its inputs, with one state, one order and one position: so all
        have the same number of partitions, and the same key is in the same partition of each (which a start cannot
        see). Between topics there is no order but time: the record with the oldest timestamp comes first, as far as
        records are here; an input that may have older ones is waited for ``alignment_seconds``.

        Handlers are found by the type header, as in the source's own topic. ``event``: every record is of this type,
        whatever headers it has; its handlers see that type's header. ``nulls``: the error policy of records without a
        value (``SKIP``, say), else ``decode_policy``.

        A start verifies the topic, and never makes it: ``kes topics apply`` does, or ``create_source``. Where a
        partition begins in an input that was not one before is decided by ``auto_offset_reset``. Raises
        ``ConfigError``; ``RegistrationError`` after the start, and for a second declaration.
        """
        source_topics.check_declarable(self._router, self.config, "input", topic, "it cannot be a further input")
        if topic in self._inputs:
            raise RegistrationError(f"the input {topic!r} is declared twice")
        if self.config.source_is_elsewhere:
            raise ConfigError(
                f"source.input({topic!r}): the source's topic is on another cluster (source_bootstrap_servers); a "
                "source with several inputs has all of them where its group is"
            )
        if nulls is not None and not isinstance(nulls, Retry):
            raise ConfigError(
                f"nulls of source.input({topic!r}) is {nulls!r}; it must be an error policy, such as SKIP"
            )
        headers = None if event is None else tuple(event_type_of(event).headers)
        self._inputs[topic] = InputSpec(topic, headers, nulls)
        return topic

    @property
    def inputs(self) -> list[str]:
        """Return the inputs beside the source's own topic: requests for visits, its loop, and the declared
        ones in their order."""
        return [*self._inputs]

    def received(self, topic: str, records: list[IncomingRecord]) -> list[IncomingRecord]:
        """Return records of an input as its handlers have them: with the headers of the input's type."""
        spec = self._inputs.get(topic)
        return records if spec is None else spec.received(records)

    def input_topics(self) -> list[TopicSpec]:
        """Return the declared inputs as they must be."""
        return [source_topics.spec_of_input(self.config, spec) for spec in self._inputs.values() if not spec.is_own]

    def _check_inputs(self) -> None:
        """Check that an input's events have a handler. Raises ``RegistrationError``."""
        for spec in self._inputs.values():
            name = None if spec.headers is None else spec.headers[0][1]
            if name is not None and name not in self._router.routes and self._router.default is None:
                raise RegistrationError(
                    f"all records of the input {spec.topic!r} are {name.decode()!r}, which has no handler: register one"
                )

    def output(
        self,
        topic: str,
        *,
        num_partitions: int | None = None,
        replication_factor: int | None = None,
        configs: Mapping[str, str] | None = None,
    ) -> str:
        """Declare a topic that handlers forward to. Returns its name.

        Once one is declared, handlers forward to declared topics only (and to the source's own): a record for another
        one is refused, and its event meets its error policy. A start verifies partitions, replication and ``configs``
        (a topic's settings by their Kafka names) of each declared topic; what is not given is as the source's settings
        have it. A topic that is missing, or different, is an error: outputs are made by ``kes topics apply`` or
        ``create_source``, never in silence. Raises ``ConfigError``; ``RegistrationError`` after the start, and for a
        second declaration.
        """
        config = self.config
        source_topics.check_declarable(self._router, config, "output", topic, "it needs no declaration as output")
        if topic in self._outputs:
            raise RegistrationError(f"the output {topic!r} is declared twice")
        what = f"of source.output({topic!r})"
        for name, value in (("num_partitions", num_partitions), ("replication_factor", replication_factor)):
            if value is not None and (not is_whole(value) or value < 1):
                raise ConfigError(f"{name} {what} is {value!r}; it must be a whole number, 1 or more")
        given: Mapping[Any, Any] = configs or {}  # whatever it is
        for name, setting in given.items():
            if not isinstance(name, str) or not isinstance(setting, str):
                raise ConfigError(f"configs {what} has {name!r}: {setting!r}; names and settings are texts, as Kafka's")
        self._outputs[topic] = source_topics.spec(config, topic, num_partitions, replication_factor, configs)
        return topic

    @property
    def outputs(self) -> list[TopicSpec]:
        """Return the declared outputs, as they must be, in the order of their declarations."""
        return [*self._outputs.values()]

    @property
    def topology(self) -> Topology:
        """Return what the source reads, handles, keeps and sends, as a value: see ``Topology``."""
        own = [
            TopologyTopic(spec.name, source_topics.purposes(self.config)[spec.name], spec.partitions)
            for spec in source_topics.specs(self.config)
        ]
        declared = [
            TopologyTopic(name, source_topics.purpose_of_input(spec), self.config.num_partitions)
            for name, spec in self._inputs.items()
            if not spec.is_own
        ]
        declared += [TopologyTopic(name, source_topics.LOOKUP, 0) for name in self._lookups]
        declared += [TopologyTopic(spec.name, source_topics.OUTPUT, spec.partitions) for spec in self.outputs]
        default = [] if self._router.default is None else [self._router.default]
        visits = [route for route, _ in self._router.visits.values()]
        routes = [*self._router.routes.values(), *default, *visits]
        handlers = [_shown(route) for route in routes if route.handler not in (keep_row, requested)]
        interjections = tuple(route.name for _, route in self._schedules)
        return Topology(self.config.group_id, (*own, *declared), tuple(handlers), interjections, not self._is_stateless)

    @property
    def _topics_sent_to(self) -> frozenset[str] | None:
        """The only topics that records may be sent to; ``None``: any, since no output is declared."""
        return frozenset(self._outputs) | frozenset(source_topics.purposes(self.config)) if self._outputs else None

    def _register_planner(
        self,
        stage: StageDefinition,
        handler: Callable[..., Any] | None,
        check: Callable[[str, IncomingRecord, Any], Any],
        event_class: type[Any],
        planner: Callable[..., Any] | None,
        key: Callable[[Any], Any] | None,
        on_error: Retry | None,
    ) -> Callable[[P], P]:
        """Register a stage that carries out the plan of ``planner`` for each event of a class, ahead of the event's
        turn; or, with ``key`` alone, the event itself under its key. ``check`` turns a plan into the stage's input;
        ``handler`` names the route (default: the planner). Returns a decorator for planners. Raises
        ``RegistrationError``."""
        name = event_class.__name__
        what = f"{stage.name}: the function that plans the work of {name}"
        if planner is not None and key is not None:
            raise RegistrationError(f"{stage.name}: give {name} a function that plans its work, or a key; not both")

        def register(function: P) -> P:
            check_planner(what, function)
            event_type = event_type_of(event_class)
            ahead = Ahead(stage, lambda record, event: check(what, record, function(record, event)))
            policy, worker = on_error or self.config.error_policy, handler or function
            self._router.add(Route(event_type.name, event_type, worker, blocking=False, policy=policy, ahead=ahead))
            return function

        if planner is not None:
            register(cast(Any, planner))
        elif key is not None:
            check_callable(f"{stage.name}: the key of {name}", key)
            register(cast(Any, lambda _, event: (key(event), event)))
        return register


def _shown(route: Route) -> TopologyHandler:
    """Describe a route for the topology."""
    if route.ahead is not None:
        stage = route.ahead.stage
        kind = "concurrent" if isinstance(stage, ConcurrentStageDefinition) else stage.name
    elif route.kind is not None:
        kind = route.kind.name
    else:
        kind = "blocking" if route.is_blocking else "async" if route.is_async else "plain"
    return TopologyHandler(route.name.removeprefix(ROUTE_PREFIX), route.handler_name, kind)


def _annotated_class(function: Callable[..., Any], *, batch: bool) -> Any:
    annotated = next(iter(parameter_types(function)[1:2]), None)
    if batch and annotated is not None:
        annotated = next(iter(get_args(annotated)), None)
    if (get_origin(annotated) or annotated) is EventContext:
        where = f"{name_of(function)}{place_of(function)}"
        raise RegistrationError(f"the handler {where} has its context second; it is called with (ctx, event)")
    if isinstance(annotated, type):
        return annotated
    wanted = "events: list[Deposited]" if batch else "event: Deposited"
    raise RegistrationError(
        f"the handler {name_of(function)}{place_of(function)} has no class as the annotation of its second parameter"
        f"{unknown_name(function, 1)}; write {wanted}, or name the class: @source.register_event_type(Deposited)"
    )


def _concurrent(name: str, handler: Callable[..., Any], policy: Retry, settings: SchedulerConfig) -> Ahead:
    what = f"the handler of {name}{place_of(handler)}"
    if not inspect.iscoroutinefunction(handler):
        raise RegistrationError(
            f"{what} has a concurrency, so it must be async def; for plain functions there is AsyncJobScheduler"
        )
    if settings.timeout_seconds is not None or settings.retry is not None:
        raise RegistrationError(
            f"{what}: timeout_seconds and retry are for the jobs of AsyncJobScheduler; a handler has "
            "on_error=Retry(attempts=...), and asyncio.timeout"
        )
    return Ahead(ConcurrentStageDefinition(name=name, handler=handler, policy=policy, config=settings), key_of)


def _seconds(name: str, value: object) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not is_number(value):
        raise ConfigError(f"{name} is {value!r}; it must be seconds, or a timedelta")
    return float(value)
