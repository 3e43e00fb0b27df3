"""What handlers of each kind leave behind: failures and policies, answers, tables, stores that cannot undo."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import anyio.lowlevel
import msgspec
import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    STOP,
    AsyncJobScheduler,
    Change,
    ErrorResponse,
    EventContext,
    EventSource,
    ExecutionState,
    Record,
    Retry,
    SimpleStore,
    Table,
)
from streams.errors import EventFailure, StoreError
from streams.metrics import EventFailed, Measurement
from streams.runtime.partition.dead_letters import LONGEST_TEXT
from streams.runtime.partition.failures import LONGEST_TRACE
from streams.testing import TestDriver
from tests.unit.handlers_kit import OUT, config, counts, driven, letters, misbehave, send, totals
from tests.vocabulary import KINDS, TOTALS, Added, Total, Words, count, register, tell_total, write

RETRIED = Retry(attempts=3, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER)


class Own(BaseException):
    """No ``Exception``: it is for the process."""


# -- failures, policies and answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [GeneratorExit, Own])  # asyncio ends the test itself by a SystemExit
@pytest.mark.parametrize("kind", [*KINDS, "batch", "concurrent", "planner"])
def test_what_is_no_exception_ends_the_process_and_names_its_event(
    kind: str, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """As ``sys.exit`` in a library: no policy is asked, nothing of the event is left, and the log says which it was."""
    source = EventSource(config(error_policy=SKIP), TOTALS)

    def work(ctx: Any, event: Any) -> None:
        event = event[0] if isinstance(event, list) else event
        if event.deed:
            raise error(0)
        tell_total(ctx, event, OUT)

    async def call(event: Added) -> None: ...

    if kind in KINDS:
        register(source, work, kind)
    elif kind == "batch":
        source.register_event_type(Added, work, batch=True)
    elif kind == "planner":

        def key(event: Added) -> str:
            if event.deed:
                raise error(0)
            return event.name

        def finish(ctx: EventContext[Any], event: Added, result: None) -> None:
            work(ctx, event)

        AsyncJobScheduler(source, call, finish).register_event_type(Added, key=key)
    else:

        @source.register_event_type(Added, concurrency=2)
        async def handler(ctx: EventContext[Any], event: Added) -> None:
            await ctx.turn()
            work(ctx, event)

    driver = TestDriver(source, topics={OUT: 1})
    try:
        send(driver, "first")
        with pytest.raises(error):
            send(driver, "bad", deed="exit")
        assert totals(driver) == [("first", 1)]
        assert driver.committed_offsets() == {0: 1}
    finally:
        with contextlib.suppress(BaseException):
            driver.close()
    said = [line.getMessage() for line in caplog.records if line.levelname == "CRITICAL"]
    assert len(said) == 1
    assert said[0].startswith(f"in[0]@1: the handler raised {error.__name__}: ")


@pytest.mark.parametrize("policy", [SKIP, DEAD_LETTER, RETRIED, STOP], ids=["skip", "dead letter", "retried", "stop"])
@pytest.mark.parametrize("deed", ["raise", "ctx.fail", "FAIL", "FATAL", "COMPLETE"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_failure_leaves_behind(kind: str, deed: str, policy: Retry) -> None:
    """No effect of the event, the policy's response, its neighbours in order. FATAL stops whatever the policy is."""
    tried: list[tuple[str, int]] = []
    measured: list[Measurement] = []

    def work(ctx: EventContext[Any], event: Added) -> ExecutionState | None:
        tried.append((event.name, ctx.attempt))
        ctx.store.put("touched", ctx.store.get("touched", 0) + 1)
        tell_total(ctx, event, OUT)
        return misbehave(ctx, event.deed)

    with driven(work, kind, policy, metrics_handler=measured.append) as driver:
        send(driver, "first", "second")
        stops = deed == "FATAL" or (policy is STOP and deed != "COMPLETE")
        if stops:
            with pytest.raises(EventFailure, match=r"in\[0\]@2"):
                send(driver, "bad", deed=deed)
            assert (driver.committed_offsets(), totals(driver)) == ({0: 2}, [("first", 1), ("second", 1)])
            with pytest.raises(EventFailure, match=r"in\[0\]@2"):
                driver.restart()  # meets it again
            return
        send(driver, "bad", deed=deed)
        send(driver, "third")
        passed = ["first", "second", *(["bad"] if deed == "COMPLETE" else []), "third"]
        attempts = 3 if policy is RETRIED and deed != "COMPLETE" else 1
        assert tried == [("first", 1), ("second", 1), *(("bad", 1 + n) for n in range(attempts)), ("third", 1)]
        assert totals(driver) == [(name, 1) for name in passed]
        assert counts(driver) == {"touched": len(passed)} | dict.fromkeys(passed, 1)
        failed = deed != "COMPLETE"
        assert letters(driver, "offset", "attempts") == [("2", str(attempts))] * (failed and policy is not SKIP)
        if deed in ("raise", "ctx.fail") and policy is not SKIP:
            assert letters(driver, "error", "message") == [("KeyError", "'the reason'")]
        failures = [m for m in measured if isinstance(m, EventFailed)]
        assert [m.offset for m in failures] == [2] * len(failures)
        assert (failures[-1].response if failures else None) == (policy.then.value if failed else None)
        driver.check()


def test_a_policy_per_event_type_and_the_default_handler() -> None:
    def refuse(ctx: EventContext[Any], event: object) -> None:
        ctx.store.put("trace", 1)
        raise RuntimeError(f"{event!r}")

    source = EventSource(config(error_policy=DEAD_LETTER), TOTALS)
    source.register_event_type(Added, refuse, on_error=SKIP)
    source.register_event_type(Total, refuse)
    source.register_default_handler(refuse, on_error=Retry(attempts=2, backoff_seconds=0))
    with TestDriver(source) as driver:
        driver.send(Added("a"))
        driver.send(Total("a", 1))
        with pytest.raises(EventFailure, match=r"in\[0\]@2.*2 attempt\(s\)"):
            driver.send_record(Record("in", b"\xff\x00", partition=0))
        assert letters(driver, "offset") == [("1",)]
        assert driver.changelog(0) == {}


class Rude(Exception):
    def __str__(self) -> str:
        return "\ud800" + "x" * 5_000_000


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [Rude, Speechless])
def test_whatever_an_exception_says_its_letter_is_small_and_readable(error: type[Exception]) -> None:
    def work(ctx: EventContext[Any], event: Added) -> None:
        tell_total(ctx, event, OUT)
        if event.deed:
            raise error

    with driven(work, on_error=DEAD_LETTER) as driver:
        send(driver, "a", "b", deed="raise")
        send(driver, "good")
        assert letters(driver, "error") == [(error.__name__,)] * 2
        assert {len(message) == LONGEST_TEXT for (message,) in letters(driver, "message")} == {error is Rude}
        assert counts(driver) == {"good": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_letter_names_handler_member_and_the_lines_of_the_users_code(kind: str) -> None:
    def inner(depth: int) -> None:
        if depth:
            inner(depth - 1)
        raise ValueError("deep down")

    def work(ctx: EventContext[Any], event: Added) -> None:
        inner(3 if event.deed == "once" else 60)

    with driven(work, kind, on_error=DEAD_LETTER) as driver:
        send(driver, "a", deed="once")
        send(driver, "b", deed="deep")
        [(handler, instance, trace), (_, _, deep)] = letters(driver, "handler", "instance", "trace")
    assert handler.endswith("patient" if kind == "async" else "<locals>.work")
    assert instance == "member-0"
    assert trace.count("in inner\n") == 4
    assert trace.endswith('raise ValueError("deep down")')
    assert "streams" not in trace.replace(__file__, "")
    assert (len(deep) <= LONGEST_TRACE, deep.endswith('raise ValueError("deep down")')) == (True, True)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_context_does_after_its_handler_is_refused(kind: str) -> None:
    kept: list[EventContext[Any]] = []
    with driven(lambda ctx, event: kept.append(ctx), kind) as driver:
        send(driver, "a")
        [ctx] = kept
        with pytest.raises(Exception, match="after the handler"):
            ctx.forward(OUT, Total("late", 1))
        with pytest.raises(StoreError, match="outside of an event"):
            ctx.store.put("late", 1)
        driver.leave()
        with pytest.raises(StoreError, match="revoked"):
            ctx.store.get("late")
        assert (driver.outputs(OUT), driver.changelog(0)) == ([], {})


@pytest.mark.parametrize("store", [TOTALS, Words], ids=["undoes", "does not"])
def test_a_plain_function_may_return_a_coroutine(store: Any) -> None:
    """What its plain part did before nobody could know that counts once; and it is known from then on."""
    calls = 0

    async def later(ctx: EventContext[Any], total: int) -> None:
        await anyio.lowlevel.checkpoint()
        ctx.forward(OUT, Total("n", total), key="n")

    def work(ctx: EventContext[Any], event: Added) -> Any:
        nonlocal calls
        calls += 1
        if isinstance(ctx.store, Words):
            write(ctx, event)
            return later(ctx, len(ctx.store.words[b"n"]))
        count(ctx, event)
        return later(ctx, ctx.store.get("n", 0))

    with driven(work, store=store) as driver:
        send(driver, *"n" * 40, deed="x", wait=False)
        driver.settle()
        assert totals(driver) == [("n", number) for number in range(1, 41)]
        assert calls <= 41


MISUSES: dict[str, Callable[[EventContext[Any]], object]] = {
    "null key": lambda ctx: ctx.store.put(None, 1),
    "wrong value": lambda ctx: ctx.store.put("a", "text"),
    "wrong key": lambda ctx: ctx.store.put(5, 1),
    "reserved key": lambda ctx: ctx.record_change(Change(b"\xff\xffkes.offset", b"{}")),
    "no event class": lambda ctx: ctx.forward(OUT, object()),
    "wrong key of an output": lambda ctx: ctx.forward(OUT, Total("a", 1), key=5),  # type: ignore[arg-type]
    "key that UTF-8 lacks": lambda ctx: ctx.forward(OUT, Total("a", 1), key="a\udcff"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_in_a_handler_is_a_failed_event(misuse: str) -> None:
    def work(ctx: EventContext[Any], event: Added) -> None:
        ctx.store.put(event.name, 1)
        if event.deed:
            MISUSES[misuse](ctx)

    with driven(work, on_error=DEAD_LETTER) as driver:
        send(driver, "bad", deed="misuse")
        send(driver, "good")
        assert (letters(driver, "offset"), counts(driver)) == ([("0",)], {"good": 1})


async def cancelled() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


def test_a_handler_that_is_cancelled_from_within() -> None:
    """It awaits something that was cancelled elsewhere: an error like any other, not the partition's silent end."""

    async def handler(ctx: EventContext[Any], event: Added) -> None:
        ctx.store.put(event.name, 1)
        if event.deed:
            await cancelled()

    async def interjection(ctx: EventContext[Any]) -> None:
        ctx.store.put("interjected", 1)
        await cancelled()

    source = EventSource(config(), TOTALS)
    source.register_event_type(Added, handler, on_error=DEAD_LETTER)
    with TestDriver(source) as driver:
        send(driver, "bad", deed="cancel")
        send(driver, "good")
        with pytest.raises(Exception):  # noqa: B017, PT011  # whatever it is: it ends
            driver.interject(0, interjection)
        send(driver, "good")
        assert (letters(driver, "offset"), counts(driver)) == ([("0",)], {"good": 1})


# -- tables and simple stores ------------------------------------------------------------------------------------------


class Basket(msgspec.Struct):
    """A mutable value with a mutable part."""

    items: list[str] = []
    total: int = 0


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_handler_leaves_no_trace_in_a_table(kind: str, ordered: bool) -> None:
    """It changed what it had read, wrote several keys, deleted others, wrote one key twice and deleted what it made."""

    def work(ctx: EventContext[Table[str, Basket]], event: Added) -> None:
        basket = ctx.store.get(event.name) or Basket()
        basket.items.append(event.deed)
        basket.total += event.amount
        ctx.store.put(event.name, basket)
        if event.deed == "raise":
            for name in ("a", "b"):
                other = ctx.store.get(name)
                assert other is not None
                other.items.clear()
                ctx.store.put(name, other)
            ctx.store.delete("a")
            ctx.store.put("new", Basket(["x"], 1))
            ctx.store.put("new", Basket(["y"], 2))
            ctx.store.delete("new")
            ctx.store.put("newer", Basket())
            basket.total = 1_000_000  # a reference that was put stays the handler's own
            raise ValueError("after all that")

    with driven(work, kind, SKIP, store=Table.factory(key=str, value=Basket, ordered=ordered)) as driver:
        send(driver, "a", "b", deed="one")
        send(driver, "b", deed="raise")
        assert counts(driver) == {"a": Basket(["one"], 1), "b": Basket(["one"], 1)}
        send(driver, "a", deed="two")
        assert counts(driver) == {"a": Basket(["one", "two"], 2), "b": Basket(["one"], 1)}
        driver.check()


class Item(msgspec.Struct, frozen=True):
    name: str
    count: int


def test_a_simple_store_with_changes_that_are_recorded_again() -> None:
    """With ``record_change`` at each step and without; a failure leaves nothing."""

    def work(ctx: EventContext[SimpleStore[Item]], event: Added) -> None:
        old = ctx.store.get(event.name)
        change = ctx.store.put(Item(event.name, event.amount + (old.count if old else 0)))
        if event.deed:
            ctx.record_change(change)
        if event.deed == "raise":
            ctx.store.delete("a")
            raise ValueError("no")
        if event.deed == "delete":
            gone = ctx.store.delete(event.name)
            assert gone is not None
            ctx.record_change(gone)

    with driven(work, on_error=SKIP, store=SimpleStore.factory(Item, key=lambda item: item.name)) as driver:
        send(driver, "a", deed="record")
        send(driver, "a", "b", "c")
        send(driver, "b", deed="raise")
        send(driver, "c", deed="delete")
        driver.crash()
        driver.restart()
        send(driver, "b")
        assert list(driver.store(0)) == list(driver.restored_store(0)) == [Item("a", 2), Item("b", 2)]


# -- stores that cannot undo -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_cannot_undo_is_made_anew_after_a_failed_event(kind: str) -> None:
    """It is filled from the changelog, with the types of its entries; then the policy decides."""
    made: list[Words] = []
    tried: list[tuple[int, dict[bytes, bytes]]] = []

    def store(partition: Any) -> Words:
        made.append(Words(partition))
        return made[-1]

    def work(ctx: EventContext[Any], event: Added) -> None:
        if event.deed in ("fail", "once"):
            tried.append((ctx.attempt, dict(ctx.store.words)))
        write(ctx, event)
        ctx.forward(OUT, Total(event.name, ctx.attempt), key=event.name)
        if event.deed == "fail" or (event.deed == "once" and ctx.attempt == 1):
            ctx.store.words.clear()
            raise ValueError("spoiled")

    policy = Retry(attempts=2, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER)
    with driven(work, kind, policy, store=store) as driver:
        for name, deed in (("w", "a"), ("v", "a"), ("w", "fail"), ("w", "b"), ("w", "once"), ("v", "c")):
            send(driver, name, deed=deed)
        before, then = {b"w": b"a", b"v": b"a"}, {b"w": b"ab", b"v": b"a"}
        assert tried == [(1, before), (2, before), (1, then), (2, then)]
        assert driver.changelog(0) == driver.store(0).words == {b"w": b"abo", b"v": b"ac"}
        assert letters(driver, "offset", "attempts") == [("2", "2")]
        assert totals(driver) == [("w", 1), ("v", 1), ("w", 1), ("w", 2), ("v", 1)]
        at_work = [one for one in made if not one.revocations]
        assert [one for one in at_work if one.words] == [driver.store(0)]
        assert {one.revocations for one in made} <= {0, 1}
        assert any(one.types == ["word", "word"] for one in made), "the entry's type travels with it"
        driver.check()


class Picky(Words):
    def receive_change(self, change: Change, /) -> None:
        raise ValueError("unheard of")


def test_a_store_that_cannot_restore_stops_the_source() -> None:
    """The state cannot be trusted: no policy applies."""
    stores: list[Any] = [Words, Words, Picky]
    with driven(write, store=lambda p: stores.pop(0)(p), decode_policy=SKIP, error_policy=SKIP) as driver:
        stores[:] = [Words] * 9
        send(driver, "a", deed="x")
        driver.crash()
        stores[:] = [Picky] * 9
        with pytest.raises(Exception, match="unheard of"):
            driver.restart()


def test_a_store_that_is_none() -> None:
    """The factory's mistake is named where it is made."""
    with pytest.raises(Exception, match="receive_change"):
        driven(write, store=dict.fromkeys)
