"""Declare the handlers of an event source: by event type, and scheduled interjections."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast, get_args, get_origin

from streams.core.cron import AnySchedule, CronSchedule
from streams.core.router import Route, check_callable
from streams.core.schedule import MissedRuns, Schedule
from streams.errors import ConfigError, RegistrationError
from streams.events import event_type_of
from streams.outcomes import ErrorPolicy
from streams.records import IncomingRecord
from streams.runtime.async_work.async_stage import Ahead, StageDefinition
from streams.runtime.async_work.concurrent_stage import ConcurrentStageDefinition, key_of
from streams.runtime.async_work.invoke import check_planner
from streams.runtime.partition.batch_handlers import BATCH
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.once import OnceRule
from streams.sak.numbers import is_number
from streams.sak.users_code import calling_location, location_of, name_of, parameter_types, unknown_name
from streams.settings.jobs import SchedulerConfig
from streams.settings.once import Once
from streams.source.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])


class DeclaredHandlers:
    """The handlers of a source: The router has their routes, ``schedules`` the interjections that come by time."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.schedules: list[tuple[AnySchedule, Route]] = []

    def register_event_type(
        self,
        event_class: type[Any],
        handler: Callable[..., Any] | None,
        *,
        on_error: ErrorPolicy | None = None,
        on_decode_error: ErrorPolicy | None = None,
        blocking: bool = False,
        concurrency: int | SchedulerConfig | None = None,
        batch: bool = False,
        once: Once | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """See ``EventSource.register_event_type``."""
        event_type = event_type_of(event_class)
        rule = once_rule(event_class, event_type.name, once)
        settings = SchedulerConfig(concurrency=concurrency) if isinstance(concurrency, int) else concurrency
        if settings is not None and not isinstance(settings, SchedulerConfig):
            raise ConfigError(
                f"the concurrency of the handler of {event_type.name} is {settings!r}; it must be a whole number, or a "
                "SchedulerConfig"
            )

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            policy, name = self._registry.policy(on_error), event_type.name
            self._check(f"the handler of {name}", function, "ctx", "events" if batch else "event")
            if batch and settings is not None:
                raise RegistrationError(
                    f"the handler of {name}{location_of(function)} has batch=True and a concurrency: its events have "
                    "their turn already; for work on many items ahead of it there is AsyncBatcher"
                )
            ahead = None if settings is None else _concurrent(name, function, policy, settings)
            kind = BATCH if batch else None
            self._registry.router.add(
                Route(
                    name,
                    event_type,
                    function,
                    blocking=blocking,
                    policy=policy,
                    ahead=ahead,
                    kind=kind,
                    once=rule,
                    decode_policy=on_decode_error,
                )
            )
            return function

        if handler is not None:
            register(handler)
        return register

    def _check(self, what: str, function: Callable[..., Any], *arguments: str) -> None:
        """Refuse a function that cannot be called so, or that wants a store of a source without one."""
        check_callable(what, function, *arguments)
        # By its annotation, where it has one: without this check the first event would find out.
        ctx = None if self._registry.has_store else next(iter(parameter_types(function)), None)
        store = next(iter(get_args(ctx)), None)
        is_context = issubclass(get_origin(ctx) or object, EventContext)
        if is_context and store not in (None, type(None), Any) and not isinstance(store, TypeVar):
            raise RegistrationError(
                f"{what}{location_of(function)} has the annotation {ctx}, but the event source has no store; "
                "give it one: EventSource(config, store=Table.factory(key=..., value=...))"
            )

    def set_default(self, handler: F | None, on_error: ErrorPolicy | None, blocking: bool) -> Callable[[F], F]:
        """See ``EventSource.register_default_handler``."""

        def register(function: F) -> F:
            self._check("the default handler", function, "ctx", "value")
            policy = self._registry.policy(on_error)
            self._registry.router.set_default(Route("(default)", None, function, blocking=blocking, policy=policy))
            return function

        if handler is not None:
            register(handler)
        return register

    def schedule(
        self,
        handler: F | None,
        *,
        every: float | timedelta | None,
        jitter: float | timedelta,
        missed: MissedRuns,
        on_error: ErrorPolicy | None,
        blocking: bool,
        cron: str | None = None,
        zone: str | None = None,
    ) -> Callable[[F], F]:
        """See ``EventSource.schedule_interjection``."""
        schedule = _schedule(every, jitter, missed, cron, zone)

        def register(function: F) -> F:
            if self._registry.router.is_frozen:
                raise RegistrationError(
                    "schedule_interjection comes too late: register before the event source is started"
                )
            self._check("the interjection", function, "ctx")
            if isinstance(schedule, CronSchedule):
                self._check_named(function)
            policy = self._registry.policy(on_error)
            route = Route(name_of(function), None, function, blocking=blocking, policy=policy)
            self.schedules.append((schedule, route))
            return function

        if handler is not None:
            register(handler)
        return register

    def _check_named(self, function: Callable[..., Any]) -> None:
        """Refuse a function whose name does not tell its timer apart, also in the next deployment."""
        name = getattr(function, "__qualname__", None)
        if name is None:
            raise RegistrationError(
                f"the interjection {function!r} has no name, by which its timer is known in the next deployment: give "
                "schedule_interjection(cron=...) a function"
            )
        if any(isinstance(known, CronSchedule) and route.name == name for known, route in self.schedules):
            raise RegistrationError(
                f"the interjection {name}{location_of(function)} is the second one with a cron and this name, by which "
                "its timer is known: give it another name"
            )

    def register_planner(
        self,
        stage: StageDefinition,
        handler: Callable[..., Any] | None,
        check: Callable[[str, IncomingRecord, Any], Any],
        event_class: type[Any],
        planner: Callable[..., Any] | None,
        key: Callable[[Any], Any] | None,
        on_error: ErrorPolicy | None,
        once: Once | None = None,
    ) -> Callable[[F], F]:
        """Register a stage that carries out the plan of ``planner`` for each event of a class, ahead of the event's
        turn; or, with ``key`` alone, the event itself under its key. ``check`` turns a plan into the stage's input;
        ``handler`` names the route (default: the planner). Returns a decorator for planners. Raises
        ``RegistrationError``."""
        name = event_class.__name__
        what = f"{stage.name}: the function that plans the work of {name}"
        if planner is not None and key is not None:
            raise RegistrationError(f"{stage.name}: give {name} a function that plans its work, or a key; not both")

        def register(function: F) -> F:
            check_planner(what, function)
            event_type = event_type_of(event_class)
            ahead = Ahead(stage, lambda record, event: check(what, record, function(record, event)))
            policy, worker = self._registry.policy(on_error), handler or function
            rule = once_rule(event_class, event_type.name, once)
            self._registry.router.add(
                Route(event_type.name, event_type, worker, blocking=False, policy=policy, ahead=ahead, once=rule)
            )
            return function

        if planner is not None:
            register(cast(Any, planner))
        elif key is not None:
            check_callable(f"{stage.name}: the key of {name}", key)
            register(cast(Any, lambda _, event: (key(event), event)))
        return register


def _schedule(
    every: float | timedelta | None, jitter: float | timedelta, missed: MissedRuns, cron: str | None, zone: str | None
) -> AnySchedule:
    if (every is None) == (cron is None):
        raise ConfigError("schedule_interjection takes either every=, or cron= with zone=")
    spread = _seconds("jitter", jitter)
    if every is not None:
        if zone is not None:
            raise ConfigError(f"zone is {zone!r}; it belongs to cron=, and every= counts seconds")
        return Schedule(_seconds("every", every), spread, missed)
    if spread:
        raise ConfigError(f"jitter is {jitter!r}; it belongs to every=, and a cron has its runs when they are due")
    return CronSchedule(cast(str, cron), cast(str, zone), missed)


def once_rule(event_class: type[Any], name: str, once: Once | None) -> OnceRule | None:
    """Make what looks up the ids of an event type. Raises ``ConfigError``, and ``RegistrationError`` for a field that
    the class does not have."""
    given: object = once  # whatever it is
    if given is None:
        return None
    if not isinstance(given, Once):
        raise ConfigError(f"once of {name} is {given!r}; it must be a Once(...)")
    field = given.id.partition(".")[0] if isinstance(given.id, str) else ""
    known = {one for cls in event_class.__mro__ for one in getattr(cls, "__annotations__", {})}
    if field and known and field not in known and not hasattr(event_class, field):
        raise RegistrationError(
            f"once of {name} takes the id from the field {field!r}, and {event_class.__name__} has none of this name "
            f"(it has {', '.join(sorted(known))})"
        )
    return OnceRule(given, name)


def by_annotation(
    handler: Callable[..., Any] | None, register_event_type: Callable[..., Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """Register a handler of the event type that its second parameter is annotated with; see ``EventSource.on``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, type):
            raise RegistrationError(
                f"@source.on got the class {name_of(function)}{calling_location()}; it takes the event's class from "
                f"the handler's annotation. To name the class: @source.register_event_type({function.__name__})"
            )
        check_callable("the handler", function, "ctx", "event")
        event_class = _annotated_class(function, batch=bool(options.get("batch")))
        register_event_type(event_class, function, **options)
        return function

    return register if handler is None else register(handler)


def _annotated_class(function: Callable[..., Any], *, batch: bool) -> Any:
    annotated = next(iter(parameter_types(function)[1:2]), None)
    if batch and annotated is not None:
        annotated = next(iter(get_args(annotated)), None)
    if (get_origin(annotated) or annotated) is EventContext:
        where = f"{name_of(function)}{location_of(function)}"
        raise RegistrationError(f"the handler {where} has its context second; it is called with (ctx, event)")
    if isinstance(annotated, type):
        return annotated
    wanted = "events: list[Deposited]" if batch else "event: Deposited"
    raise RegistrationError(
        f"the handler {name_of(function)}{location_of(function)} has no class as the annotation of its second parameter"
        f"{unknown_name(function, 1)}; write {wanted}, or name the class: @source.register_event_type(Deposited)"
    )


def _concurrent(name: str, handler: Callable[..., Any], policy: ErrorPolicy, settings: SchedulerConfig) -> Ahead:
    what = f"the handler of {name}{location_of(handler)}"
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
