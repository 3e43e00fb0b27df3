"""Events of an older version that upcasters make several of (``@upcaster(..., many=True)``): one event to the engine.

They have one offset, one undo and one policy. So a route is made for them, whose handler calls those of the parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from streams.core.router import Route
from streams.errors import DecodeError, RegistrationError
from streams.events import EventType, event_type_of
from streams.outcomes import ExecutionState


def split_event(
    routes: Mapping[bytes, Route], route: Route, value: bytes | None, version: int
) -> tuple[Route, list[Any]]:
    """Return the parts of an event of an older version, and the route that handles them. Raises ``DecodeError``."""
    whole: EventType[Any] | None = route.event_type
    assert whole is not None
    handlers, events = [], []
    for target, plain in whole.parts(value, version):
        part = _route_of(routes, whole.name, target)
        codec: Any = None if part.event_type is None else part.event_type._codec
        if not hasattr(codec, "from_dict"):
            raise DecodeError(f"{whole.name}: an upcaster makes a {part.name!r}, whose codec has no dict form")
        if not part.has_turn:
            raise DecodeError(
                f"{whole.name}: an upcaster makes a {part.name!r}, which is handled in its turn: its handler has no "
                "concurrency=, batch=, blocking= or once="
            )
        handlers.append(part.handler)
        events.append(codec.from_dict(plain))

    async def handle(ctx: Any, events: list[Any]) -> Any:
        for handler, event in zip(handlers, events, strict=True):
            made.users = handler  # if it fails, it is the one to be named
            answer = handler(ctx, event)
            if isinstance(answer, Awaitable):
                answer = await answer
            if answer is not None and answer is not ExecutionState.COMPLETE:
                return answer
        return None

    made = Route(route.name, whole, handle, blocking=False, policy=route.policy)
    return made.named(handlers[0] if handlers else route.handler), events


def _route_of(routes: Mapping[bytes, Route], whole: str, target: type[Any] | str) -> Route:
    try:
        name = target if isinstance(target, str) else event_type_of(target).name
        return routes[name.encode()]
    except (KeyError, RegistrationError):
        shown = target if isinstance(target, str) else target.__qualname__
        raise DecodeError(f"{whole}: an upcaster makes a {shown!r}, which has no handler") from None
