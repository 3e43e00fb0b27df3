"""Registering handlers: what kind a handler is, what is refused, and when it is too late."""

from __future__ import annotations

import functools
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from streams import AsyncJobScheduler, EventSource, EventSourceConfig, SimpleStore, Table
from streams.core.router import Route, Router, check_callable
from streams.errors import RegistrationError, StoreError
from streams.events import event_type, event_type_of, upcaster
from streams.outcomes import STOP
from streams.records import TopicPartition
from streams.runtime.partition.batch_handlers import BATCH
from streams.stores.stateless import Stateless


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


def route(handler: Any, *, blocking: bool = False, event_class: type | None = None, kind: Any = None) -> Route:
    event_type = event_type_of(event_class) if event_class is not None else None
    return Route("a", event_type, handler, blocking=blocking, policy=STOP, kind=kind)


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


def test_what_a_route_decodes() -> None:
    """Without an event type the bytes come as they are; a version header names what needs no upcasting."""
    bare, first, second = route(plain), route(plain, event_class=First), route(plain, event_class=Second)
    assert (bare.decode(b"x"), bare.decode(None, 3), first.decode(b'{"text":"x"}')) == (b"x", None, First("x"))
    assert [made.wire_version for made in (bare, first, second)] == [None, None, b"2"]


@pytest.mark.parametrize("event_class", [None, First, Second])
def test_a_route_that_is_sent_away_is_made_anew_there(event_class: type | None) -> None:
    made = route(plain, event_class=event_class)
    sent: Route = pickle.loads(pickle.dumps(made))
    assert (sent.name, sent.event_type, sent.handler, sent.policy) == (made.name, made.event_type, plain, STOP)
    assert (sent.is_blocking, sent.kind, sent.ahead) == (False, None, None)
    assert sent.bare_decode(b'{"text":"x"}') == made.decode(b'{"text":"x"}', made.version)


@pytest.mark.parametrize(
    ("again", "late", "what"),
    [
        (Router.add, "the handler of a", "'a' has a handler"),
        (Router.set_default, "the default handler", "a default handler"),
    ],
)
def test_one_handler_and_not_too_late(again: Any, late: str, what: str) -> None:
    router = Router()
    again(router, route(plain))
    with pytest.raises(RegistrationError, match=f"{what} already"):
        again(router, route(slow))
    kept = [*router.routes.values(), *([router.default] if router.default else [])]
    assert [one.handler for one in kept] == [plain]
    frozen = Router()
    frozen.freeze()
    with pytest.raises(RegistrationError, match=f"{late} comes too late"):
        again(frozen, route(plain))


class Source(EventSource[Any]):
    """One that is wrong on purpose: of ``Any``, so that no type checker says so before."""

    def __init__(self, store: Any = None) -> None:
        super().__init__(EventSourceConfig(group_id="g", topic="t", num_partitions=1), store)


def one(ctx: object) -> None: ...


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (lambda: route(slow, blocking=True), "the handler of a is async"),
        (lambda: route("plain"), "the handler of a is 'plain', which cannot be called"),
        (lambda: route(slow, kind=BATCH), "the handler of a has batch=True, which is for plain functions"),
        (lambda: route(plain, blocking=True, kind=BATCH), "the handler of a has batch=True, which is for plain"),
        (
            lambda: Source().register_event_type(First, one),
            r"the handler of core\.router\.first is one\(ctx.*\(ctx, event\)",
        ),
        (lambda: Source().register_event_type(First, one, batch=True), r"is one\(ctx.*\(ctx, events\)"),
        (lambda: Source().register_default_handler(one), r"the default handler is one\(ctx.*\(ctx, value\)"),
        (lambda: Source().schedule_interjection(plain, every=1.0), r"the interjection is plain\(ctx.*\(ctx\)"),
        (
            lambda: AsyncJobScheduler(Source(), one, plain).register_event_type(First, one),
            r"plans the work of First is one\(ctx.*\(record, event\)",
        ),
        (lambda: Source().register_event_type(plain), r"plain is no class.*@source\.register_event_type\(Deposited\)"),
        (lambda: Source(Table), r"a factory such as Table\.factory\(\.\.\.\), is Table\("),
        (lambda: Source(object()), "which cannot be called"),
    ],
)
def test_mistakes_are_told_at_registration(register: Any, said: str) -> None:
    with pytest.raises(RegistrationError, match=said):
        register()


def test_a_function_whose_parameters_nobody_knows_is_taken() -> None:
    check_callable("the handler of a", min, "ctx", "event")  # a built-in without a signature
    Source().register_event_type(First, lambda *anything: None)
    Source(SimpleStore.factory(First, key=lambda first: first.text))


def test_a_decorator_may_change_the_arguments() -> None:
    """The wrapper is called, and not what it wraps."""

    def with_database(handler: Any) -> Any:
        @functools.wraps(handler)
        def wrapper(ctx: Any, event: Any) -> Any:
            return handler(ctx, event, "database")

        return wrapper

    Source().register_event_type(First, with_database(lambda ctx, event, database: None))


def test_the_store_that_was_forgotten() -> None:
    store: Any = Stateless(TopicPartition("t", 3))
    with pytest.raises(StoreError, match=r"t\[3\]: ctx\.store\.put was used, but .* store=Table\.factory"):
        store.put("a", 1)
    assert not hasattr(store, "get")
    assert not hasattr(store, "_journal")
