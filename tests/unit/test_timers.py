"""Durable timers over a broker in memory: set, fired, removed, and what is left of them after everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import anyio.lowlevel
import msgspec
import pytest
import pytest_asyncio

from streams import AsyncBatcher, BatchItem, EventContext
from streams.async_jobs import AsyncJobScheduler
from streams.errors import EventFailure, StoreError
from streams.job_settings import SchedulerConfig
from streams.metrics import EventFailed
from streams.outcomes import DEAD_LETTER, SKIP, STOP, ErrorPolicy, ErrorResponse
from tests.unit.runtime_kit import CHANGELOG, MISSING, PATIENCE, TABLE, Named, Unforgiving
from tests.unit.timer_kit import Clocked, Ring, alarmed, ring

pytestmark = pytest.mark.asyncio

STORES = pytest.mark.parametrize("store", [TABLE, Unforgiving], ids=["journalled", "plain"])


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Clocked]:
    made = Clocked()
    yield made
    if made.tasks and not made.tasks[-1].done():
        await made.stop()


@STORES
async def test_a_timer_fires_once_when_it_is_due(bench: Clocked, store: Any) -> None:
    alarmed(bench, store=store)
    bench.run()
    await bench.handled("a+10", "b+5")
    assert bench.timers() == ["a", "b"]
    bench.seconds += 9.9
    await bench.rang("b")
    await bench.wait_for_nothing()
    assert bench.timers() == ["a"], "never early"
    bench.seconds += 0.1
    await bench.rang("b", "a")
    assert bench.timers() == []
    bench.seconds += 100
    await bench.again()
    await bench.wait_for_nothing()
    await bench.rang("b", "a")


@STORES
async def test_late_ones_fire_after_the_start_in_due_order(bench: Clocked, store: Any) -> None:
    alarmed(bench, store=store)
    bench.run()
    await bench.handled("c+30", "a+10", "b+20", "d+10000")
    await bench.stop()
    bench.seconds += 1000
    bench.run()
    await bench.rang("a", "b", "c")
    assert bench.timers() == ["d"]


async def test_its_removal_is_in_the_transaction_of_its_effects(bench: Clocked) -> None:
    alarmed(bench)
    bench.run()
    await bench.handled("a+1")
    before = len(bench.broker.logs[CHANGELOG, 0])
    bench.seconds += 1
    await bench.rang("a")
    kinds = [record.key[:7] for record in bench.broker.logs[CHANGELOG, 0][before:] if record.key]
    assert len(kinds) == 3, "the store's change, the tombstone of the timer, and the offset, once"
    assert [record.value for record in bench.broker.logs[CHANGELOG, 0][before:]].count(None) == 1


async def test_setting_the_same_name_again_replaces(bench: Clocked) -> None:
    alarmed(bench)
    bench.run()
    await bench.handled("a+5", "a+50", "b+50", "b+5")
    bench.seconds += 10
    await bench.rang("b")
    await bench.wait_for_nothing()
    bench.seconds += 40
    await bench.rang("b", "a")


async def test_a_cancelled_one_does_not_fire(bench: Clocked) -> None:
    alarmed(bench)
    bench.run()
    await bench.handled("a+5", "b+6", "a-")
    assert bench.timers() == ["b"]
    bench.seconds += 10
    await bench.rang("b")


async def test_cancel_tells_whether_there_was_one(bench: Clocked) -> None:
    told: list[bool] = []

    def handler(ctx: EventContext[Any], event: Named) -> None:
        told.append(ctx.cancel_timer("a"))
        ctx.schedule_in(5, Ring("a"), name="a")
        told.append(ctx.cancel_timer("a"))
        told.append(ctx.cancel_timer("a"))
        if event.name == "last":
            ctx.schedule_in(5, Ring("a"), name="a")

    source = bench.make(handler)
    source.register_event_type(Ring, ring)
    bench.run()
    await bench.handled("first", "last", "again")
    assert told == [False, True, False, False, True, False, True, True, False]
    assert bench.timers() == []


@STORES
async def test_a_failed_event_sets_and_cancels_nothing(bench: Clocked, store: Any) -> None:
    alarmed(bench, store=store, named=SKIP)
    bench.run()
    await bench.handled("a+5", "!b+5", "!a-")
    assert bench.timers() == ["a"]
    bench.seconds += 10
    await bench.rang("a")
    await bench.again()
    await bench.rang("a")


async def test_what_a_handler_knows(bench: Clocked) -> None:
    seen: list[tuple[Any, ...]] = []

    def handler(ctx: EventContext[Any], event: Ring) -> None:
        assert ctx.timer is not None
        assert (ctx.is_interjection, ctx.input, ctx.offset) == (True, None, -1)
        seen.append((event.name, ctx.timer.name, ctx.timer.due, ctx.timer.key, ctx.now))
        if ctx.timer.name == "first":
            ctx.schedule_in(1, Ring("second"), name="second")

    def start(ctx: EventContext[Any], event: Named) -> None:
        assert ctx.timer is None
        ctx.schedule_at(ctx.now + timedelta(seconds=5), Ring("first"), name="first")

    source = bench.make(start)
    source.register_event_type(Ring, handler)
    bench.run()
    await bench.handled("k")
    bench.seconds += 7
    await bench.until(lambda: len(seen) == 1, "the first")
    bench.seconds += 1
    await bench.until(lambda: len(seen) == 2, "the one that it has set")
    at = datetime.fromtimestamp(1_000_000, UTC)
    assert seen == [
        ("first", "first", at + timedelta(seconds=5), b"k", at + timedelta(seconds=7)),
        ("second", "second", at + timedelta(seconds=8), b"k", at + timedelta(seconds=8)),
    ]


async def test_names_of_their_own(bench: Clocked) -> None:
    names: list[str] = []

    def set_two(ctx: EventContext[Any], *_: Any) -> None:
        names.extend(ctx.schedule_in(5, Ring("a")) for _ in range(2))

    source = bench.make(set_two)
    source.register_event_type(Ring, ring)
    bench.run()
    await bench.handled("x", "y")
    await source.interject(0, set_two)
    await source.interject(0, set_two)
    assert len(set(names)) == 8
    assert bench.timers() == sorted(names)
    bench.seconds += 5
    await bench.rang(*["a"] * 8)


@pytest.mark.parametrize(
    "kind", ["async", "blocking", "concurrent", "scheduler", "batcher", "failing batcher", "default"]
)
async def test_every_kind_of_handler(bench: Clocked, kind: str) -> None:
    """What could run ahead runs in the timer's turn."""
    source = alarmed(bench, None)

    async def later(ctx: EventContext[Any], event: Ring) -> None:
        await anyio.lowlevel.checkpoint()
        await ctx.turn()
        ring(ctx, event)

    async def job(event: Ring) -> str:
        return event.name

    if kind == "async":
        source.register_event_type(Ring, later)
    elif kind == "blocking":
        source.register_event_type(Ring, ring, blocking=True)
    elif kind == "concurrent":
        source.register_event_type(Ring, later, concurrency=4)
    elif kind == "default":
        source.register_default_handler(lambda ctx, value: ring(ctx, msgspec.json.decode(value, type=Ring)))
    elif kind.endswith("batcher"):

        async def write(batch: list[BatchItem[Ring]]) -> None:
            if kind.startswith("failing"):
                raise ValueError("no")

        def told(ctx: EventContext[Any], items: list[BatchItem[Ring]]) -> None:
            ring(ctx, items[0].value)

        late = told if kind.startswith("failing") else None
        batcher: AsyncBatcher[Any, Ring] = AsyncBatcher(source, write, told, on_failure=late)
        batcher.register_event_type(
            Ring, lambda record, event: None if event.name == "b" else [("k", event), ("k", event)]
        )
    else:
        scheduler: AsyncJobScheduler[Any, Ring, str] = AsyncJobScheduler(
            source, job, lambda ctx, item, result: ring(ctx, Ring(result)), config=SchedulerConfig(concurrency=2)
        )
        plan: Callable[..., Any] = lambda record, event: (event.name, event) if event.name != "b" else None  # noqa: E731
        scheduler.register_event_type(Ring, plan)
    bench.run()
    await bench.handled("a+1", "b+2", "c+3")
    bench.seconds += 10
    await bench.rang(*("a", "c") if kind.endswith(("scheduler", "batcher")) else ("a", "b", "c"))
    await bench.until(lambda: bench.timers() == [], "all are done")


async def test_set_by_an_interjection_a_finalizer_and_a_concurrent_handler(bench: Clocked) -> None:
    source = bench.make(None)
    source.register_event_type(Ring, ring)

    @source.register_event_type(Named, concurrency=2)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        with pytest.raises(StoreError, match="ahead of the event's turn"):
            ctx.cancel_timer("b")
        ctx.schedule_at(ctx.now, Ring("ahead"), name="b")
        await ctx.turn()
        assert ctx.cancel_timer("b")
        ctx.schedule_in(1, Ring("c"), name="c")

    bench.run()
    await bench.handled("x")
    await source.interject(0, lambda ctx: ctx.schedule_in(2, Ring("i"), name="i"))
    assert bench.timers() == ["c", "i"]
    bench.seconds += 2
    await bench.rang("c", "i")


@STORES
@pytest.mark.parametrize("then", [ErrorResponse.CONTINUE, ErrorResponse.DEAD_LETTER, ErrorResponse.FAIL_CONSUMER])
async def test_one_that_fails_goes_to_its_policy(bench: Clocked, store: Any, then: ErrorResponse) -> None:
    attempts: list[int] = []
    failed: list[EventFailed] = []

    def bad(ctx: EventContext[Any], event: Ring) -> None:
        attempts.append(ctx.attempt)
        ring(ctx, event)
        ctx.schedule_in(5, Ring("trace"), name="trace")
        raise ValueError("not today")

    config = {"metrics_handler": lambda found: failed.append(found) if isinstance(found, EventFailed) else None}
    policy = ErrorPolicy(retries=2, backoff_seconds=0.001, then=then)
    alarmed(bench, bad, store=store, on_error=policy, config=config)
    task = bench.run()
    await bench.handled("a+5")
    bench.seconds += 10
    if then is ErrorResponse.FAIL_CONSUMER:
        with pytest.raises(EventFailure, match=r"timer 'a' of in\[0\] .*not today"):
            await asyncio.wait_for(task, PATIENCE)
        assert bench.timers() == ["a"], "it fires again at the next start"
    else:
        await bench.until(lambda: bench.timers() == [], "it is dropped")
    assert attempts == [1, 2, 3]
    assert bench.broker.outputs() == []
    assert [(found.offset, found.response) for found in failed] == [(-1, then.value)]
    letters = bench.broker.logs["g.in.dead-letters", 0]
    assert len(letters) == (then is ErrorResponse.DEAD_LETTER)
    for letter in letters:
        assert (letter.key, letter.value, letter.record_type) == (b"a+5", msgspec.json.encode(Ring("a")), "Ring")
        facts = dict(letter.headers or ())
        assert facts["__kes_dlq_timer"] == b"a"
        assert facts["__kes_dlq_offset"] == b"-1"
        assert facts["__kes_dlq_due_ms"] == b"1000005000"
        assert facts["__kes_dlq_message"] == b"not today"
        assert facts["__kes_dlq_attempts"] == b"3"


@STORES
async def test_one_that_is_retried_completes(bench: Clocked, store: Any) -> None:
    def flaky(ctx: EventContext[Any], event: Ring) -> None:
        ring(ctx, event)
        if ctx.attempt < 3:
            raise ValueError("not yet")

    alarmed(bench, flaky, store=store, on_error=ErrorPolicy(retries=5, backoff_seconds=0.001))
    bench.run()
    await bench.handled("a+5", "b+5")
    bench.seconds += 10
    await bench.rang("a", "b")


@STORES
async def test_what_it_sends_is_refused(bench: Clocked, store: Any) -> None:
    """By the broker, after the handler: undone, and known not to be tried again."""

    def refused(ctx: EventContext[Any], event: Ring) -> None:
        ring(ctx, event)
        if event.name == "a":
            ctx.forward(MISSING, Named("x"))

    alarmed(bench, refused, store=store, on_error=DEAD_LETTER)
    bench.run()
    await bench.handled("a+5", "b+6", "c")
    bench.seconds += 10
    await bench.rang("b")
    await bench.until(lambda: bench.timers() == [], "both are done")
    assert len(bench.broker.logs["g.in.dead-letters", 0]) == 1


async def test_what_failed_once_is_tried_when_it_is_set_anew(bench: Clocked) -> None:
    """For the same time, after a failure that was known over a restart."""
    attempts: list[int] = []

    def bad(ctx: EventContext[Any], event: Ring) -> None:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            raise ValueError("not today")
        ring(ctx, event)

    def at_the_same_time(ctx: EventContext[Any], event: Named) -> None:
        if event.name == "fail":
            raise ValueError("the store cannot undo this")
        ctx.schedule_at(1_000_005, Ring("a"), name="a")

    source = bench.make(at_the_same_time, store=Unforgiving, on_error=SKIP)
    source.register_event_type(Ring, bad, on_error=SKIP)
    bench.run()
    await bench.handled("set")
    bench.seconds += 10
    await bench.until(lambda: bench.timers() == [], "it is dropped")
    await bench.handled("fail", "set")
    await bench.rang("a")
    assert attempts == [1, 1]


async def test_nobody_handles_it_any_more(bench: Clocked) -> None:
    """The program was changed: the decode policy decides."""
    alarmed(bench)
    bench.run()
    await bench.handled("a+5")
    await bench.stop()
    bench.seconds += 10
    alarmed(bench, None, config={"decode_policy": STOP})
    with pytest.raises(EventFailure, match=r"timer 'a' of in\[0\].*nobody handles the event type 'Ring'"):
        await asyncio.wait_for(bench.run(), PATIENCE)
    alarmed(bench, None, config={"decode_policy": DEAD_LETTER})
    bench.run()
    await bench.until(lambda: bench.timers() == [], "it is a dead letter")


async def test_a_clock_that_jumps(bench: Clocked) -> None:
    """Back: nothing fires twice, and events go on. Forward: what is due fires soon."""
    alarmed(bench)
    bench.run()
    await bench.handled("a+5", "b+20")
    bench.seconds += 10
    await bench.rang("a")
    bench.seconds -= 1000
    await bench.handled("c", "d")
    await bench.wait_for_nothing()
    await bench.again()
    await bench.wait_for_nothing()
    await bench.rang("a")
    bench.seconds += 5000
    await bench.until(lambda: bench.broker.outputs() == ["a", "b"], "nothing but the clock tells that it is due")


async def test_statistics(bench: Clocked) -> None:
    source = alarmed(bench)
    bench.run()
    await bench.handled("b+20", "a+5")
    found = source.statistics().partitions[0]
    assert (found.timers, found.next_timer_ms) == (2, 1_000_005_000)
    await bench.handled("a-", "b-")
    found = source.statistics().partitions[0]
    assert (found.timers, found.next_timer_ms) == (0, None)


async def test_lost_and_back(bench: Clocked) -> None:
    """The membership is lost, everything is restored: timers too."""
    source = alarmed(bench)
    bench.run()
    await bench.handled("a+5", "b+6", "a-")
    bench.connections.membership.lose_and_rejoin()
    await bench.until(lambda: source._engine is not None and source._engine.incarnation == 1, "heard")
    await bench.until_active()
    assert source.statistics().partitions[0].timers == 1
    bench.seconds += 10
    await bench.rang("b")


async def test_never_early_in_any_time_zone(bench: Clocked) -> None:
    source = alarmed(bench)
    bench.run()
    await bench.until_active()
    east = timezone(timedelta(hours=9))
    at = datetime.fromtimestamp(1_000_005.0004, UTC)
    await source.interject(0, lambda ctx: ctx.schedule_at(at, Ring("a"), name="a"))
    await source.interject(0, lambda ctx: ctx.schedule_at(at.astimezone(east), Ring("b"), name="b"))
    await source.interject(0, lambda ctx: ctx.schedule_at(1_000_005.0004, Ring("c"), name="c"))
    assert source.statistics().partitions[0].next_timer_ms == 1_000_005_001
    bench.seconds += 5.0005
    await bench.wait_for_nothing()
    await bench.rang()
    bench.seconds += 0.0006
    await bench.rang("a", "b", "c")


async def test_a_chain_of_timers_that_are_due_leaves_time_for_all_others(bench: Clocked) -> None:
    """Each sets the next one, due at once: events, interjections and the loop go on."""
    rings = 0

    def on_ring(ctx: EventContext[Any], event: Ring) -> None:
        nonlocal rings
        rings += 1
        ctx.schedule_in(0, Ring("a"), name="a")

    source = alarmed(bench, on_ring)
    bench.run()
    await bench.handled("a+0")
    await bench.until(lambda: rings > 200, "it rings on")
    for _ in range(3):
        before = rings
        await bench.handled("x", "y")
        await source.interject(0, lambda ctx: None)
        await bench.until(lambda before=before: rings > before, "it rings on")  # type: ignore[misc]
    await source.interject(0, lambda ctx: ctx.cancel_timer("a"))
