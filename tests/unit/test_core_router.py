"""Registering handlers: what kind a handler is, what is refused, and when it is too late."""

from __future__ import annotations

import functools
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from streams import (
    SKIP,
    AsyncJobScheduler,
    BatchContext,
    ErrorResponse,
    EventContext,
    EventSource,
    EventSourceConfig,
    SimpleStore,
    Table,
)
from streams.core.router import Route, Router, check_callable, type_and_version
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


@event_type("core.router.several", version=2)
@dataclass
class Several:
    text: str


@upcaster(Several, from_version=1, many=True)
def split(old: dict[str, Any]) -> list[Any]:
    return []


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


@pytest.mark.parametrize("options", [{"blocking": True}, {"kind": BATCH}], ids=["blocking", "batch"])
def test_several_events_of_one_record_are_for_handlers_with_a_turn(options: dict[str, Any]) -> None:
    for made in (route(plain, event_class=Several), route(plain, event_class=Several, **options)):
        router = Router()
        router.add(made)
        refused = pytest.raises(RegistrationError, match="many=True, whose events are handled in their turn")
        with nullcontext() if made.has_turn else refused:
            router.freeze()
    assert not made.has_turn


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


def keeps(ctx: EventContext[Table[str, int]], event: First) -> None: ...


def of_one(ctx: EventContext[Any], event: First) -> None: ...


def of_int(ctx: EventContext[Any], event: int) -> None: ...


def yields(ctx: EventContext[Any], event: First) -> Iterator[None]:
    yield


async def yields_async(ctx: EventContext[Any], event: First) -> AsyncIterator[None]:
    yield


def swapped(event: First, ctx: EventContext[Any]) -> None: ...


def of_nobody(ctx: EventContext[Any], event: OnlyForCheckers) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (lambda: route(slow, blocking=True), r"the handler of a at .* is async"),
        (lambda: route("plain"), "the handler of a is 'plain', which cannot be called"),
        (lambda: route(slow, kind=BATCH), "the handler of a at .* has batch=True, which is for plain functions"),
        (lambda: route(plain, blocking=True, kind=BATCH), "the handler of a at .* has batch=True, which is for plain"),
        (
            lambda: Source().register_event_type(First, one),
            r"the handler of core\.router\.first is one\(ctx.*\(ctx, event\)",
        ),
        (lambda: Source().register_event_type(First, one, batch=True), r"is one\(ctx.*\(ctx, events\)"),
        (lambda: Source().register_default_handler(one), r"the default handler is one\(ctx.*\(ctx, value\)"),
        (lambda: Source().schedule_interjection(plain, every=1.0), r"the interjection is plain\(ctx.*\(ctx\)"),
        (
            lambda: AsyncJobScheduler(Source(), one).register_event_type(First, one),
            r"plans the work of First is one\(ctx.*\(record, event\)",
        ),
        (
            lambda: Source().register_event_type(plain),
            r"plain at .* is no class.*@source\.register_event_type\(Deposited\)",
        ),
        (
            lambda: Source(Table),
            rf"such as Table\.factory\(\.\.\.\), is Table\(.* at {__file__}:\d+; it is called with",
        ),
        (lambda: Source(dict), rf"is the class dict at {__file__}:\d+, which is no store"),
        (lambda: Source(object()), "which cannot be called"),
        (lambda: Source().on(First), rf"got the class First at {__file__}:\d+; .*register_event_type\(First\)"),
        (lambda: Source().on(of_int), rf"int at {__file__}:\d+ is no dataclass"),
        (lambda: Source().on(yields), r"the handler of core\.router\.first at .* has a yield"),
        (lambda: Source().on(yields_async), r"the handler of core\.router\.first at .* has a yield"),
        (
            lambda: Source().on(on_error=ErrorResponse.DEAD_LETTER)(of_one),
            r"the handler of core\.router\.first at .*: on_error is <ErrorResponse.*must be an error policy: STOP",
        ),
        (lambda: Source().on(concurrency=2)(of_one), "the handler of .* at .* has a concurrency, so it must be async"),
        (
            lambda: AsyncJobScheduler(Source(), one, plain),
            r"finalizer of the jobs one is plain\(.*\(ctx, item, result\)",
        ),
        (lambda: Source().register_event_type(First, keeps), r" at .*Table\[str, int\].* has no store; give it one"),
        (lambda: Source().on(one), r"the handler is one\(ctx.*\(ctx, event\)"),
        (lambda: Source().on(lambda ctx, event: None), r"the handler <lambda>.* at .* has no class as the annotation"),
        (lambda: Source().on(batch=True)(of_one), r"the handler of_one at .* write events: list\[Deposited\]"),
        (
            lambda: Source().on(of_nobody),
            r"has no class as the annotation .* \('OnlyForCheckers' is no name at this place\)",
        ),
        (
            lambda: Source().on(swapped),
            r"the handler swapped at .* has its context second; it is called with \(ctx, event",
        ),
        (lambda: Source().on(print), "print has no class as the annotation of its second parameter; write event"),
        (lambda: [source.on(of_one) for source in [Source()] * 2], r"has a handler already; .* \(the first is at .*\)"),
    ],
)
def test_mistakes_are_told_at_registration_with_their_place(register: Any, said: str) -> None:
    with pytest.raises(RegistrationError, match=said) as refused:
        register()
    if "is one(" in str(refused.value) or "of_one" in said:
        written = one if "is one(" in str(refused.value) else of_one
        assert f" at {__file__}:{written.__code__.co_firstlineno}" in str(refused.value)


class WithStore:
    def __call__(self, ctx: EventContext[Any], event: Second) -> None: ...


def test_the_short_form_takes_the_type_from_the_annotation() -> None:
    @dataclass
    class Inner:
        text: str

    source, handlers = Source(), list[Any]()

    @source.on
    def local(ctx: EventContext[Any], event: Inner) -> None: ...

    @source.on(batch=True, on_error=SKIP)
    def batch(ctx: BatchContext[Any], events: list[First]) -> None: ...

    handlers = [local, batch, source.on(WithStore())]
    routes = [source._declared.router.routes[name] for name in (b"Inner", b"core.router.first", b"core.router.second")]
    assert [route.handler for route in routes] == handlers
    assert [route.policy for route in routes] == [STOP, SKIP, STOP]
    assert routes[1].kind is BATCH


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
    with pytest.raises(StoreError, match=rf"t\[3\]: ctx\.store\.put was used at {__file__}:\d+, but .* store=Table"):
        store.put("a", 1)
    assert not hasattr(store, "get")
    assert not hasattr(store, "_journal")


def test_a_source_has_one_tracer_from_its_start_on() -> None:
    tracer: Any = object()
    router = Router()
    router.set_tracer(tracer)
    with pytest.raises(RegistrationError, match="has a tracer already"):
        router.set_tracer(tracer)
    router.freeze()
    with pytest.raises(RegistrationError, match="the tracer"):
        router.set_tracer(tracer)
    assert router.tracer is tracer


def test_the_first_type_and_the_first_version_count() -> None:
    first, null = [("__grv__", b"2"), ("__grt__", b"a"), ("other", b"x")], [("__grt__", None), ("__grv__", None)]
    assert type_and_version((*first, ("__grt__", b"b"), ("__grv__", b"3"))) == (b"a", b"2")
    assert type_and_version(tuple(null)) == (b"", b"")
    assert type_and_version(None) == (None, None)
