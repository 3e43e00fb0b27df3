"""Declare the visits of an event source: handlers for each key of its store, in runs that are started by request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from streams.core.router import Route, check_callable
from streams.core.visits import LONGEST_NAME
from streams.errors import ConfigError, RegistrationError
from streams.outcomes import POLICIES, ErrorPolicy, is_policy, parks, unparked
from streams.runtime.partition.visiting import table_of
from streams.source.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])


class DeclaredVisits:
    """The visits of a source, which its router has by name."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def declare(
        self, name: str, handler: F | None, *, table: str | None, on_error: ErrorPolicy | None, blocking: bool
    ) -> Callable[[F], F]:
        """See ``EventSource.register_visit``."""
        if not self._registry.config.visits:
            raise ConfigError(f"the visit {name!r} needs EventSourceConfig(visits=True): a topic for its requests")
        check_visit_name("the name of a visit", name)

        def register(function: F) -> F:
            check_callable(f"the handler of the visit {name!r}", function, "ctx", "key", "value")
            if on_error is not None and not is_policy(on_error):
                raise RegistrationError(
                    f"on_error of the visit {name!r} is {on_error!r}; it must be an error policy: {POLICIES}"
                )
            if parks(on_error):
                raise RegistrationError(
                    f"on_error of the visit {name!r} parks a key, and a visited key is no event of one: use STOP, SKIP "
                    "or DEAD_LETTER"
                )
            policy = unparked(self._registry.policy(on_error))
            route = Route(f"visit {name}", None, function, blocking=blocking, policy=policy)
            self._registry.router.add_visit(name, route, table)
            return function

        if handler is not None:
            register(handler)
        return register

    def check(self, make: Callable[[], Any]) -> None:
        """Check that the tables of visits can be visited; ``make`` makes a store to be looked at. Raises
        ``RegistrationError``."""
        visits = self._registry.router.visits
        if visits:
            store = make()
            for name, (_, table) in visits.items():
                table_of(store, name, table)
            store.revoked()  # it was made to be looked at: no partition has it


def check_visit_name(what: str, name: object) -> None:
    """Check the name of a visit, or of a run. Raises ``ConfigError``."""
    if not isinstance(name, str) or not name.isascii() or not name.isprintable() or not 1 <= len(name) <= LONGEST_NAME:
        raise ConfigError(f"{what} is {name!r}; it must have 1 to {LONGEST_NAME} printable ASCII characters")
