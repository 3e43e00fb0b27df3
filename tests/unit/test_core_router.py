"""Registering handlers: what kind a handler is, what is refused, and when it is too late."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from streams.core.router import Route, Router
from streams.errors import RegistrationError
from streams.events import event_type, event_type_of, upcaster
from streams.outcomes import STOP


@event_type("core.router.first")
@dataclass
class First:
    text: str


@event_type("core.router.second", version=2)
@dataclass
class Second:
    text: str


@upcaster(Second, from_version=1)
def as_it_was(old: dict[str, Any]) -> dict[str, Any]:
    return old


def plain(ctx: object, value: object) -> None: ...


async def slow(ctx: object, value: object) -> None: ...


class AsyncObject:
    async def __call__(self, ctx: object, value: object) -> None: ...


def route(handler: Any, *, blocking: bool = False, event_class: type | None = None, name: str = "a") -> Route:
    event_type = event_type_of(event_class) if event_class is not None else None
    return Route(name, event_type, handler, blocking=blocking, policy=STOP)


@pytest.mark.parametrize(
    ("handler", "blocking", "kind"),
    [
        (plain, False, (False, False, True)),
        (plain, True, (False, True, False)),
        (slow, False, (True, False, False)),
        (AsyncObject(), False, (True, False, False)),
    ],
)
def test_the_kind_of_a_handler(handler: Any, blocking: bool, kind: tuple[bool, bool, bool]) -> None:
    made = route(handler, blocking=blocking)
    assert (made.is_async, made.is_blocking, made.plain) == kind


def test_an_async_handler_needs_no_thread() -> None:
    with pytest.raises(RegistrationError, match="the handler of a is async"):
        route(slow, blocking=True)


def test_without_an_event_type_the_bytes_come_as_they_are() -> None:
    made = route(plain)
    assert made.decode(b"x") == b"x"
    assert made.decode(None, 3) is None
    assert made.wire_version is None


@pytest.mark.parametrize("event_class", [None, First, Second])
def test_a_route_that_is_sent_away_is_made_anew_there(event_class: type | None) -> None:
    made = route(plain, event_class=event_class)
    sent: Route = pickle.loads(pickle.dumps(made))
    assert (sent.name, sent.event_type, sent.handler, sent.policy) == (made.name, made.event_type, plain, STOP)
    assert (sent.is_blocking, sent.is_batch, sent.ahead) == (False, False, None)
    assert sent.bare_decode(b'{"text":"x"}') == made.decode(b'{"text":"x"}', made.version)


def test_the_version_header_that_needs_no_upcasting() -> None:
    assert route(plain, event_class=First).wire_version is None
    assert route(plain, event_class=Second).wire_version == b"2"
    assert route(plain, event_class=First).decode(b'{"text":"x"}') == First("x")


def test_one_type_one_handler() -> None:
    router = Router()
    router.add(route(plain))
    with pytest.raises(RegistrationError, match="'a' has a handler already"):
        router.add(route(slow))
    assert router.routes[b"a"].handler is plain
    assert router.default is None


def test_one_default_handler() -> None:
    router = Router()
    router.set_default(route(plain))
    with pytest.raises(RegistrationError, match="a default handler already"):
        router.set_default(route(slow))
    assert router.default is not None
    assert router.default.handler is plain


def test_frozen_is_too_late() -> None:
    router = Router()
    router.freeze()
    with pytest.raises(RegistrationError, match="the handler of a comes too late"):
        router.add(route(plain))
    with pytest.raises(RegistrationError, match="the default handler comes too late"):
        router.set_default(route(plain))


def test_what_can_be_no_handler() -> None:
    with pytest.raises(RegistrationError, match="the handler of a is 'plain', which cannot be called"):
        Route("a", None, "plain", blocking=False, policy=STOP)  # type: ignore[arg-type]
    for handler, blocking in ((slow, False), (plain, True)):
        with pytest.raises(RegistrationError, match="the handler of a has batch=True, which is for plain functions"):
            Route("a", None, handler, blocking=blocking, policy=STOP, batch=True)
