"""Find the handler of a record by its type header: a dict, frozen when the source starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from streams.errors import RegistrationError
from streams.events import EventType
from streams.formats.cloudevents import CloudEvents
from streams.model.own_metrics import OwnMetric
from streams.model.topics import TypesRecords
from streams.model.tracing import Tracer
from streams.outcomes import POLICIES, ErrorPolicy, Retry, is_policy
from streams.records import TYPE_HEADER, VERSION_HEADER, ReceivedHeaders
from streams.sak.users_code import calling_location, location_of
from streams.settings.once import OnceBounds


def type_and_version(headers: ReceivedHeaders | None) -> tuple[bytes | None, bytes | None]:
    """Return the first type and the first version header's contents; ``None`` without one, empty where it is null."""
    name = version = None
    for header, content in headers or ():
        if header == TYPE_HEADER and name is None:
            name = content or b""
        elif header == VERSION_HEADER and version is None:
            version = content or b""
    return name, version


def check_callable(what: str, function: object, *arguments: str) -> None:
    """Check that a function can be called, with ``arguments`` if any are named; else ``RegistrationError``."""
    if not callable(function):
        raise RegistrationError(f"{what} is {function!r}, which cannot be called{calling_location()}")
    if not arguments:
        return
    try:
        # Not the signature of the wrapped function: a decorator's wrapper may well take other arguments.
        signature = inspect.signature(function, follow_wrapped=False)
    except Exception:  # some functions written in C have none, and reading annotations may run anything
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        name = getattr(function, "__qualname__", None) or repr(function)
        where = (not isinstance(function, type) and location_of(function)) or calling_location()
        raise RegistrationError(
            f"{what} is {name}{signature}{where}; it is called with ({', '.join(arguments)})"
        ) from None


SAMPLED: Final = 64
"""One slice of plain handlers in so many begins with an event that is timed, and one other event of a type in so many
is."""


class Route:
    """An event type's handler and policy. ``wire_version`` is the version header that needs no upcasting. ``ahead``
    (``async_work.async_stage.Ahead``): the stage that does the work of these events ahead of their turn. ``kind``
    (``runtime.partition.handler_kind.HandlerKind``): of handlers in their turn that are not plain. ``decode_policy``:
    of records of the type that cannot be read; ``None``: that of the source. ``once``
    (``runtime.partition.once.OnceRule``): the ids of events that are handled once. ``users``: the user's function that
    a handler of ours calls, which dead letters and queues name. ``handled``: its events that have completed in this
    run, committed or not; ``failed``: those that have failed for good, by what was done about them."""

    __slots__ = (
        "ahead",
        "bare_decode",
        "decode",
        "decode_policy",
        "event_type",
        "failed",
        "handled",
        "handler",
        "is_async",
        "is_blocking",
        "is_timed",
        "kind",
        "name",
        "once",
        "plain",
        "policy",
        "users",
        "version",
        "wire_version",
    )

    def __init__(
        self,
        name: str,
        event_type: EventType[Any] | None,
        handler: Callable[..., Any],
        *,
        blocking: bool,
        policy: ErrorPolicy,
        ahead: Any = None,
        kind: Any = None,
        decode_policy: ErrorPolicy | None = None,
        once: Any = None,
    ) -> None:
        check_callable(f"the handler of {name}", handler)
        what = f"the handler of {name}{location_of(handler)}"
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise RegistrationError(f"{what} has a yield, so a call would run nothing of it; use ctx.forward to send")
        for option, given in (("on_error", policy), ("on_decode_error", decode_policy)):
            if not (is_policy(given) or (given is None and given is decode_policy)):
                raise RegistrationError(f"{what}: {option} is {given!r}; it must be an error policy: {POLICIES}")
        self.name = name
        self.event_type = event_type
        self.handler = handler
        self.is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )
        self.is_blocking = blocking
        if self.is_async and blocking:
            raise RegistrationError(f"{what} is async; blocking=True is for plain functions")
        self.kind = kind
        if kind is not None and (self.is_async or blocking):
            raise RegistrationError(
                f"{what} has {kind.option}, which is for plain functions, without blocking=True; {kind.instead}"
            )
        self.ahead = ahead
        self.once = once
        self.plain = not self.is_async and not blocking and ahead is None and kind is None and once is None
        self.policy = policy
        self.decode_policy = decode_policy
        self.is_timed = not isinstance(policy, Retry) or policy.timeout_seconds is not None
        self.users: Callable[..., Any] | None = None
        self.handled = 0
        self.failed: dict[str, int] = {}
        self.decode: Callable[..., Any] = event_type.decode if event_type is not None else _as_it_is
        self.bare_decode: Callable[[bytes], Any] = event_type.bare_decode if event_type is not None else _as_it_is
        self.version = event_type.version if event_type is not None else 1
        self.wire_version = None if self.version == 1 else b"%d" % self.version

    @property
    def is_plain_once(self) -> bool:
        """Check for a handler that is plain, but for the ids of its events."""
        return not self.is_async and not self.is_blocking and self.ahead is None and self.once is not None

    @property
    def has_turn(self) -> bool:
        """Check for a handler that runs in its turn on the event loop, plain or async, for each of its events."""
        return not self.is_blocking and self.ahead is None and self.kind is None and self.once is None

    @property
    def handler_name(self) -> str:
        """``module.function``; of a callable without a name its class's."""
        found = self.handler if self.users is None else self.users
        handler = found if hasattr(found, "__qualname__") else type(found)
        return f"{handler.__module__}.{handler.__qualname__}"

    def is_sample(self) -> bool:
        """Count a completed event. Returns whether it is one of those that are timed: what takes a batch, or has worked
        ahead of its turn, is not."""
        self.handled += 1
        is_single = self.event_type is not None and self.kind is None and self.ahead is None
        return is_single and self.handled % SAMPLED == 1

    def with_policy(self, policy: ErrorPolicy) -> Route:
        made, arguments = self.__reduce__()
        return made(*arguments, policy=policy).named(self.users)

    def named(self, users: Callable[..., Any] | None) -> Route:
        """Name the user's function that the handler calls. Returns the route."""
        self.users = users
        return self

    def __reduce__(self) -> tuple[Callable[..., Route], tuple[Any, ...]]:
        """Pickle the arguments only: another process builds its own decoders, which cannot be pickled."""
        made = partial(
            Route,
            blocking=self.is_blocking,
            policy=self.policy,
            ahead=self.ahead,
            kind=self.kind,
            once=self.once,
            decode_policy=self.decode_policy,
        )
        return made, (self.name, self.event_type, self.handler)


class Router:
    """The routes of an event source: filled before the start, then only read."""

    def __init__(self) -> None:
        self.routes: dict[bytes, Route] = {}
        self.default: Route | None = None
        self.visits: dict[str, tuple[Route, str | None]] = {}
        """The visits of the source, by name: the handler, and the table of its store (``None``: the store is one)."""
        self.jobs: dict[str, Any] | None = {}
        """The definitions of the source's jobs, by name; without one: two have it. ``None``: of a replay, which starts
        no jobs."""
        self.tracer: Tracer | None = None
        """What records the spans of events; ``None``: nothing does."""
        self.types: TypesRecords | None = None
        """The rule that gives records of the source's own topic their types; ``None``: their headers do."""
        self.forms: dict[str, CloudEvents] = {}
        """The topics whose events are sent in another form than with our headers."""
        self.own_metrics: dict[str, OwnMetric] = {}
        """The metrics of the source's own, by name."""
        self.runs_ahead = True
        """Whether any route, as far as they are known, has work that runs ahead of its turn."""
        self._frozen = False

    def add(self, route: Route) -> None:
        """Register a type. Raises ``RegistrationError`` for a second handler of the same name, or after the start."""
        self.refuse_if_frozen(f"the handler of {route.name}")
        names = (route.name,) if route.event_type is None else route.event_type.names
        for name in names:
            # Keys are bytes, as in headers: no name is decoded for a record.
            known = self.routes.get(name.encode())
            if known is not None:
                first = location_of(known.handler)
                raise RegistrationError(
                    f"the event type {name!r} has a handler already; one type, one handler"
                    + (f" (the first is{first})" if first else "")
                    + (f"; {name!r} is an alias" if name not in (route.name, known.name) else "")
                )
        self.routes |= dict.fromkeys([name.encode() for name in names], route)

    def set_default(self, route: Route) -> None:
        """Register the handler of everything that has no handler of its own."""
        self.refuse_if_frozen("the default handler")
        if self.default is not None:
            raise RegistrationError("there is a default handler already")
        self.default = route

    def add_visit(self, name: str, route: Route, table: str | None) -> None:
        """Register a visit. Raises ``RegistrationError`` for a second one of the name, or after the start."""
        self.refuse_if_frozen(f"the visit {name!r}")
        if name in self.visits:
            raise RegistrationError(f"there is a visit {name!r} already")
        self.visits[name] = route, table

    def set_tracer(self, tracer: Tracer) -> None:
        """Have the events traced. Raises ``RegistrationError`` after the start, and for a second tracer."""
        self.refuse_if_frozen("the tracer")
        if self.tracer is not None:
            raise RegistrationError("the event source has a tracer already")
        self.tracer = tracer

    def current(self, headers: ReceivedHeaders | None) -> Route | None:
        """Find the route of a record with these headers, if that takes their version without an upcaster."""
        name, version = type_and_version(headers)
        route = self.routes.get(name or b"")
        return route if route is not None and version == route.wire_version else None

    @property
    def each(self) -> tuple[Route, ...]:
        """The routes of all types, each once: ``routes`` has one with aliases several times."""
        return tuple(dict.fromkeys(self.routes.values()))

    @property
    def handled(self) -> dict[str, int]:
        """The completed events of each type that has any; rows of joined tables are none."""
        return {route.name: route.handled for route in self.each if route.handled and route.event_type is not None}

    @property
    def failed(self) -> dict[str, dict[str, int]]:
        """The events of each type that have failed for good, by what was done about them."""
        return {route.name: dict(route.failed) for route in self.each if route.failed and route.event_type is not None}

    def freeze(self) -> None:
        """Refuse changes from now on: the source starts. Raises ``RegistrationError``."""
        self._frozen = True
        routes = [*self.each, *([self.default] if self.default is not None else [])]
        for route in routes:
            if route.event_type is not None and route.event_type.splits and not route.has_turn:
                raise RegistrationError(
                    f"{route.name} has an upcaster with many=True, whose events are handled in their turn: its handler "
                    "has no concurrency=, batch=, blocking= or once="
                )
        self.runs_ahead = any(route.ahead is not None for route in routes)
        _ = self.once_bounds

    @property
    def once_bounds(self) -> OnceBounds | None:
        """Return what holds for the ids of a partition; ``None``: no type has ``once=``. Raises
        ``RegistrationError``."""
        return OnceBounds.of(route.once.settings for route in self.each if route.once is not None)

    @property
    def is_frozen(self) -> bool:
        return self._frozen

    def refuse_if_frozen(self, what: str) -> None:
        """Raise ``RegistrationError`` after the start, which ``what`` comes too late for."""
        if self._frozen:
            raise RegistrationError(f"{what} comes too late: register before the event source is started")


def _as_it_is(value: bytes | None, version: int = 1) -> bytes | None:
    """Return the value as it came: the default handler decodes nothing."""
    return value
