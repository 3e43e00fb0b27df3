"""Declare the visits of an event source: handlers for each key of its store, in runs that are started by request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from streams.core.router import Route, Router, check_callable
from streams.core.visits import LONGEST_NAME, VisitRequest
from streams.errors import ConfigError
from streams.events import event_type_of
from streams.model.topics import InputSpec
from streams.outcomes import ExecutionState, Retry
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.visiting import requested, table_of
from streams.settings.config import EventSourceConfig
from streams.source.joins import JoinDeclarations

StoreT = TypeVar("StoreT")
VisitAnswer = ExecutionState | None
VisitHandler = Callable[[EventContext[StoreT], Any, Any], VisitAnswer | Awaitable[VisitAnswer]]


class VisitDeclarations(JoinDeclarations[StoreT], Generic[StoreT]):
    """The part of ``EventSource`` about visits."""

    config: EventSourceConfig
    _router: Router

    def register_visit(
        self,
        name: str,
        handler: VisitHandler[StoreT] | None = None,
        /,
        *,
        table: str | None = None,
        on_error: Retry | None = None,
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
        if not self.config.visits:
            raise ConfigError(f"the visit {name!r} needs EventSourceConfig(visits=True): a topic for its requests")
        check_visit_name("the name of a visit", name)

        def register(function: VisitHandler[StoreT]) -> VisitHandler[StoreT]:
            check_callable(f"the handler of the visit {name!r}", function, "ctx", "key", "value")
            policy = on_error or self.config.error_policy
            route = Route(f"visit {name}", None, function, blocking=blocking, policy=policy)
            self._router.add_visit(name, route, table)
            return function

        if handler is not None:
            register(handler)
        return register

    def _own_inputs(self) -> dict[str, InputSpec]:
        """Return the inputs that the settings ask for, and register what they need."""
        config = self.config
        if config.visits:
            event_type = event_type_of(VisitRequest)
            route = Route(event_type.name, event_type, requested, blocking=False, policy=config.error_policy)
            self._router.add(route)
        awaited = config.loop_topic  # no event is the worse for a request that comes a moment later
        return {topic: InputSpec(topic, is_own=True, is_awaited=topic == awaited) for topic in config.own_inputs}

    def _check_visits(self, make: Callable[[], Any]) -> None:
        """Check that the tables of visits can be visited; ``make`` makes a store to be looked at. Raises
        ``RegistrationError``."""
        if self._router.visits:
            store = make()
            for name, (_, table) in self._router.visits.items():
                table_of(store, name, table)
            store.revoked()


def check_visit_name(what: str, name: object) -> None:
    """Check the name of a visit, or of a run. Raises ``ConfigError``."""
    if not isinstance(name, str) or not name.isascii() or not name.isprintable() or not 1 <= len(name) <= LONGEST_NAME:
        raise ConfigError(f"{what} is {name!r}; it must have 1 to {LONGEST_NAME} printable ASCII characters")
