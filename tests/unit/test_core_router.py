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
    assert (sent.is_blocking, sent.kind, sent.ahead) == (False, None, None)
    assert sent.bare_decode(b'{"text":"x"}') == made.decode(b'{"text":"x"}', made.version)


def test_the_version_header_that_needs_no_upcasting() -> None:
    assert route(plain, event_class=First).wire_version is None
    assert route(plain, event_class=Second).wire_version == b"2"
    assert route(plain, event_class=First).decode(b'{"text":"x"}') == First("x")


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


def test_what_can_be_no_handler() -> None:
    with pytest.raises(RegistrationError, match="the handler of a is 'plain', which cannot be called"):
        Route("a", None, "plain", blocking=False, policy=STOP)  # type: ignore[arg-type]
    for handler, blocking in ((slow, False), (plain, True)):
        with pytest.raises(RegistrationError, match="the handler of a has batch=True, which is for plain functions"):
            Route("a", None, handler, blocking=blocking, policy=STOP, kind=BATCH)


class Source(EventSource[Any]):
    """One that is wrong on purpose: of ``Any``, so that no type checker says so before."""

    def __init__(self, store: Any = None) -> None:
        super().__init__(EventSourceConfig(group_id="g", topic="t", num_partitions=1), store)


def one(ctx: object) -> None: ...


@pytest.mark.parametrize(
    ("register", "said"),
    [
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
