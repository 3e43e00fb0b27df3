"""Commands of an event source: functions that decide about them, and functions that make the next state."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

from streams.core.commands import MOST_EVENTS, CommandRules, encode_reply, request_of
from streams.core.router import Router, check_callable
from streams.core.seen import digest_of
from streams.errors import ConfigError, RecordError, RegistrationError
from streams.events import event_type_of
from streams.metrics import CommandHandled
from streams.model.commands import SCOPE, VERSION_HEADER, Versioned
from streams.outcomes import Retry
from streams.records import ID_HEADER
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.seen_ids import keep_reply
from streams.sak.users_code import location_of, name_of, parameter_types, unknown_name
from streams.settings.once import Once, header
from streams.source.registering import DeclaredHandlers

S = TypeVar("S")
C = TypeVar("C")
E = TypeVar("E")


class AggregateRules(Generic[S]):
    """The commands of a source (``EventSource.aggregate``). ``decide`` and ``evolve`` are decorators, for use before
    the start; both leave the function as it is, to be called by tests."""

    def __init__(
        self,
        handlers: DeclaredHandlers,
        router: Router,
        initial: S,
        events: str,
        remember: timedelta,
        on_error: Retry | None,
    ) -> None:
        topic: object = events  # whatever they are
        window: object = remember
        if isinstance(initial, type):
            raise RegistrationError(
                f"the initial state is the class {initial.__name__}; give a state: {initial.__name__}()"
            )
        if not isinstance(topic, str) or not topic:
            raise ConfigError(f"events is {events!r}; it is the name of the topic that events go to")
        if not isinstance(window, timedelta) or not timedelta(minutes=1) <= window <= timedelta(days=366):
            raise ConfigError(f"remember is {remember!r}; it is a timedelta from a minute to 366 days")
        self._handlers = handlers
        self._router = router
        self._on_error = on_error
        self.topic = events
        self.remember = remember
        self.rules: CommandRules[S] = CommandRules(partial(copy.deepcopy, initial), type(initial))

    def decide(self, function: Callable[[S, C], Sequence[Any]], /) -> Callable[[S, C], Sequence[Any]]:
        """Register the function that decides about commands of one class, that of its second parameter.

        It is called with the state of the command's key and the command. It returns a list of events, 128 at most, or
        raises ``Rejected``: both are answers, which the caller gets once they are committed. It must be plain and
        without effects of its own, as it may be called again. Any other exception meets ``on_error``. Raises
        ``RegistrationError``.
        """
        command = _class_of("decide", function, "command", self.rules.decides)
        _check("decide", function, "state", "command")
        handle = _handler(self.rules, self.topic, event_type_of(command).name)
        handle.__qualname__, handle.__module__ = name_of(function), function.__module__
        once = Once(header(ID_HEADER), within=self.remember, scope=SCOPE)
        self._handlers.register_event_type(
            command, handle, on_error=self._on_error, blocking=False, concurrency=None, batch=False, once=once
        )
        self.rules.decides[command] = function
        return function

    def evolve(self, function: Callable[[S, E], S], /) -> Callable[[S, E], S]:
        """Register the function that makes the next state of a state and an event of one class, that of its second
        parameter. Plain, without effects. Raises ``RegistrationError``."""
        event = _class_of("evolve", function, "event", self.rules.evolves)
        _check("evolve", function, "state", "event")
        event_type_of(event)
        self._router.refuse_if_frozen(f"evolve {name_of(function)}")
        self.rules.evolves[event] = function
        return function

    def apply(self, ctx: EventContext[Any], key: str | bytes, events: Sequence[Any], /) -> Versioned[S]:
        """Apply events to the state of a key in a handler of another kind (which may set timers, start jobs): evolve
        it, and send them with their numbers, in the transaction of the handler's event. Returns the state behind them.

        The key must be one of the handler's partition, as that of its record is. No more than 128 events; no reply is
        kept. Raises what ``evolve`` raises, ``RecordError``, and as ``ctx.forward``.
        """
        if not isinstance(events, list | tuple) or len(events) > MOST_EVENTS:
            raise RecordError(f"apply takes a list of {MOST_EVENTS} events, at most")
        after = self.rules.evolved(ctx.store.get(key), events)
        if events:
            _take_effect(ctx, self.topic, key, key.encode() if isinstance(key, str) else key, events, after)
        return after


def _check(what: str, function: Callable[..., Any], *arguments: str) -> None:
    check_callable(f"{what} {name_of(function)}", function, *arguments)
    if any(
        check(function)
        for check in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    ):
        raise RegistrationError(
            f"{what} {name_of(function)}{location_of(function)} is async, or has a yield; it is a plain function that "
            "returns its result"
        )


def _handler(rules: CommandRules[Any], topic: str, kind: str) -> Callable[[EventContext[Any], Any], None]:
    """Make the handler of the commands of one type. Without the declarations: it may travel to other processes."""

    def handle(ctx: EventContext[Any], command: Any) -> None:
        record, timers = ctx.input, ctx._timers
        if record is None or timers is None:
            raise RecordError(f"{ctx.where}: {kind} is a timer's event; a command is a record with an id")
        request = request_of(record)
        if record.key is None:
            raise RecordError(f"{record.where}: the command has no key; its state is that of its record's key")
        key = ctx.store.decode_key(record.key)
        handled = rules.handle(lambda: ctx.store.get(key), command, request)
        if handled.state is not None:
            _take_effect(ctx, topic, key, record.key, handled.events, handled.state)
        keep_reply(ctx, encode_reply(handled.reply))
        # Those who wait look again when the event is complete: nothing runs between here and there.
        timers.awaited.notify(digest_of(SCOPE, request.id))
        waited_ms = timers.now_ms() - record.timestamp_ms if record.timestamp_ms >= 0 else 0
        timers.measure(CommandHandled(record.partition, kind, handled.reply.outcome, max(0, waited_ms) / 1000))

    return handle


def _take_effect(
    ctx: EventContext[Any], topic: str, key: Any, record_key: bytes, events: Sequence[Any], after: Versioned[Any]
) -> None:
    for version, event in enumerate(events, after.version - len(events) + 1):
        ctx.forward(topic, event, key=record_key, headers=[(VERSION_HEADER, b"%d" % version)])
    ctx.store.put(key, after)


def _class_of(what: str, function: Callable[..., Any], argument: str, known: dict[type[Any], Any]) -> type[Any]:
    """Return the class in the annotation of a function's second parameter. Raises ``RegistrationError``."""
    check_callable(what, function)
    where = f"{what} {name_of(function)}{location_of(function)}"
    found = next(iter(parameter_types(function)[1:2]), None)
    if not isinstance(found, type):
        raise RegistrationError(
            f"{where} has no class as the annotation of its second parameter{unknown_name(function, 1)}; write "
            f"{argument}: Withdraw"
        )
    if found in known:
        raise RegistrationError(f"{where}: there is one for {found.__name__} already; one class, one function")
    return found
