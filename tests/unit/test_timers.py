"""Durable timers over a broker in memory: set, fired, removed, and what is left of them after everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import anyio.lowlevel
import msgspec
import pytest

from streams import AsyncBatcher, BatchItem, EventContext
from streams.async_jobs import AsyncJobScheduler
from streams.errors import EventFailure, StoreError
from streams.job_settings import SchedulerConfig
from streams.metrics import EventFailed
from streams.outcomes import DEAD_LETTER, SKIP, STOP, ErrorPolicy, ErrorResponse
from tests.unit.runtime_kit import CHANGELOG, MISSING, TABLE, Named, Unforgiving
from tests.unit.timer_kit import Clocked, Ring, alarmed, ring
from tests.unit.waiting import PATIENCE

STORES = pytest.mark.parametrize("store", [TABLE, Unforgiving], ids=["journalled", "plain"])


@STORES
async def test_a_timer_fires_once_when_it_is_due(clocked: Clocked, store: Any) -> None:
    alarmed(clocked, store=store)
    await clocked.over("a+10", "b+5")
    assert clocked.timers() == ["a", "b"]
    clocked.seconds += 9.9
    await clocked.rang("b")
    await clocked.wait_for_nothing()
    assert clocked.timers() == ["a"], "never early"
    clocked.seconds += 0.1
    await clocked.rang("b", "a")
    assert clocked.timers() == []
    clocked.seconds += 100
    await clocked.again()
    await clocked.wait_for_nothing()
    await clocked.rang("b", "a")


@STORES
async def test_late_ones_fire_after_the_start_in_due_order(clocked: Clocked, store: Any) -> None:
    alarmed(clocked, store=store)
    await clocked.over("c+30", "a+10", "b+20", "d+10000")
    await clocked.stop()
    clocked.seconds += 1000
    clocked.run()
    await clocked.rang("a", "b", "c")
    assert clocked.timers() == ["d"]


async def test_its_removal_is_in_the_transaction_of_its_effects(clocked: Clocked) -> None:
    alarmed(clocked)
    await clocked.over("a+1")
    before = len(clocked.broker.logs[CHANGELOG, 0])
    clocked.seconds += 1
    await clocked.rang("a")
    kinds = [record.key[:7] for record in clocked.broker.logs[CHANGELOG, 0][before:] if record.key]
    assert len(kinds) == 3, "the store's change, the tombstone of the timer, and the offset, once"
    assert [record.value for record in clocked.broker.logs[CHANGELOG, 0][before:]].count(None) == 1


async def test_setting_the_same_name_again_replaces_and_a_cancelled_one_does_not_fire(clocked: Clocked) -> None:
    alarmed(clocked)
    await clocked.over("a+5", "a+50", "b+50", "b+5", "c+7", "c-")
    assert clocked.timers() == ["a", "b"]
    clocked.seconds += 10
    await clocked.rang("b")
    await clocked.wait_for_nothing()
    clocked.seconds += 40
    await clocked.rang("b", "a")


async def test_cancel_tells_whether_there_was_one(clocked: Clocked) -> None:
    told: list[bool] = []

    def handler(ctx: EventContext[Any], event: Named) -> None:
        told.append(ctx.cancel_timer("a"))
        ctx.schedule_in(5, Ring("a"), name="a")
        told.append(ctx.cancel_timer("a"))
        told.append(ctx.cancel_timer("a"))
        if event.name == "last":
            ctx.schedule_in(5, Ring("a"), name="a")

    source = clocked.make(handler)
    source.register_event_type(Ring, ring)
    await clocked.over("first", "last", "again")
    assert told == [False, True, False, False, True, False, True, True, False]
    assert clocked.timers() == []


@STORES
async def test_a_failed_event_sets_and_cancels_nothing(clocked: Clocked, store: Any) -> None:
    alarmed(clocked, store=store, named=SKIP)
    await clocked.over("a+5", "!b+5", "!a-")
    assert clocked.timers() == ["a"]
    clocked.seconds += 10
    await clocked.rang("a")
    await clocked.again()
    await clocked.rang("a")


async def test_what_a_handler_knows(clocked: Clocked) -> None:
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

    source = clocked.make(start)
    source.register_event_type(Ring, handler)
    await clocked.over("k")
    clocked.seconds += 7
    await clocked.until(lambda: len(seen) == 1, "the first")
    clocked.seconds += 1
    await clocked.until(lambda: len(seen) == 2, "the one that it has set")
    at = datetime.fromtimestamp(1_000_000, UTC)
    assert seen == [
        ("first", "first", at + timedelta(seconds=5), b"k", at + timedelta(seconds=7)),
        ("second", "second", at + timedelta(seconds=8), b"k", at + timedelta(seconds=8)),
    ]


async def test_names_of_their_own(clocked: Clocked) -> None:
    names: list[str] = []

    def set_two(ctx: EventContext[Any], *_: Any) -> None:
        names.extend(ctx.schedule_in(5, Ring("a")) for _ in range(2))

    source = clocked.make(set_two)
    source.register_event_type(Ring, ring)
    await clocked.over("x", "y")
    await source.interject(0, set_two)
    await source.interject(0, set_two)
    assert len(set(names)) == 8
    assert clocked.timers() == sorted(names)
    clocked.seconds += 5
    await clocked.rang(*["a"] * 8)


@pytest.mark.parametrize(
    "kind", ["async", "blocking", "concurrent", "scheduler", "batcher", "failing batcher", "default"]
)
async def test_every_kind_of_handler(clocked: Clocked, kind: str) -> None:
    """What could run ahead runs in the timer's turn."""
    source = alarmed(clocked, None)

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
    await clocked.over("a+1", "b+2", "c+3")
    clocked.seconds += 10
    await clocked.rang(*("a", "c") if kind.endswith(("scheduler", "batcher")) else ("a", "b", "c"))
    await clocked.until(lambda: clocked.timers() == [], "all are done")


async def test_set_by_an_interjection_a_finalizer_and_a_concurrent_handler(clocked: Clocked) -> None:
    source = clocked.make(None)
    source.register_event_type(Ring, ring)

    @source.register_event_type(Named, concurrency=2)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        with pytest.raises(StoreError, match="ahead of the event's turn"):
            ctx.cancel_timer("b")
        ctx.schedule_at(ctx.now, Ring("ahead"), name="b")
        await ctx.turn()
        assert ctx.cancel_timer("b")
        ctx.schedule_in(1, Ring("c"), name="c")

    await clocked.over("x")
    await source.interject(0, lambda ctx: ctx.schedule_in(2, Ring("i"), name="i"))
    assert clocked.timers() == ["c", "i"]
    clocked.seconds += 2
    await clocked.rang("c", "i")


@STORES
@pytest.mark.parametrize("then", [ErrorResponse.CONTINUE, ErrorResponse.DEAD_LETTER, ErrorResponse.FAIL_CONSUMER])
async def test_one_that_fails_goes_to_its_policy(clocked: Clocked, store: Any, then: ErrorResponse) -> None:
    attempts: list[int] = []
    failed: list[EventFailed] = []

    def bad(ctx: EventContext[Any], event: Ring) -> None:
        attempts.append(ctx.attempt)
        ring(ctx, event)
        ctx.schedule_in(5, Ring("trace"), name="trace")
        raise ValueError("not today")

    config = {"metrics_handler": lambda found: failed.append(found) if isinstance(found, EventFailed) else None}
    policy = ErrorPolicy(retries=2, backoff_seconds=0.001, then=then)
    alarmed(clocked, bad, store=store, on_error=policy, config=config)
    task = clocked.run()
    await clocked.handled("a+5")
    clocked.seconds += 10
    if then is ErrorResponse.FAIL_CONSUMER:
        with pytest.raises(EventFailure, match=r"timer 'a' of in\[0\] .*not today"):
            await asyncio.wait_for(task, PATIENCE)
        assert clocked.timers() == ["a"], "it fires again at the next start"
    else:
        await clocked.until(lambda: clocked.timers() == [], "it is dropped")
    assert attempts == [1, 2, 3]
    assert clocked.broker.outputs() == []
    assert [(found.offset, found.response) for found in failed] == [(-1, then.value)]
    letters = clocked.broker.logs["g.in.dead-letters", 0]
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
async def test_one_that_is_retried_completes(clocked: Clocked, store: Any) -> None:
    def flaky(ctx: EventContext[Any], event: Ring) -> None:
        ring(ctx, event)
        if ctx.attempt < 3:
            raise ValueError("not yet")

    alarmed(clocked, flaky, store=store, on_error=ErrorPolicy(retries=5, backoff_seconds=0.001))
    await clocked.over("a+5", "b+5")
    clocked.seconds += 10
    await clocked.rang("a", "b")


@STORES
async def test_what_it_sends_is_refused(clocked: Clocked, store: Any) -> None:
    """By the broker, after the handler: undone, and known not to be tried again."""

    def refused(ctx: EventContext[Any], event: Ring) -> None:
        ring(ctx, event)
        if event.name == "a":
            ctx.forward(MISSING, Named("x"))

    alarmed(clocked, refused, store=store, on_error=DEAD_LETTER)
    await clocked.over("a+5", "b+6", "c")
    clocked.seconds += 10
    await clocked.rang("b")
    await clocked.until(lambda: clocked.timers() == [], "both are done")
    assert len(clocked.broker.logs["g.in.dead-letters", 0]) == 1


async def test_what_failed_once_is_tried_when_it_is_set_anew(clocked: Clocked) -> None:
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

    source = clocked.make(at_the_same_time, store=Unforgiving, on_error=SKIP)
    source.register_event_type(Ring, bad, on_error=SKIP)
    await clocked.over("set")
    clocked.seconds += 10
    await clocked.until(lambda: clocked.timers() == [], "it is dropped")
    await clocked.handled("fail", "set")
    await clocked.rang("a")
    assert attempts == [1, 1]


async def test_nobody_handles_it_any_more(clocked: Clocked) -> None:
    """The program was changed: the decode policy decides."""
    alarmed(clocked)
    await clocked.over("a+5")
    await clocked.stop()
    clocked.seconds += 10
    alarmed(clocked, None, config={"decode_policy": STOP})
    with pytest.raises(EventFailure, match=r"timer 'a' of in\[0\].*nobody handles the event type 'Ring'"):
        await asyncio.wait_for(clocked.run(), PATIENCE)
    alarmed(clocked, None, config={"decode_policy": DEAD_LETTER})
    clocked.run()
    await clocked.until(lambda: clocked.timers() == [], "it is a dead letter")


async def test_a_clock_that_jumps(clocked: Clocked) -> None:
    """Back: nothing fires twice, and events go on. Forward: what is due fires soon."""
    alarmed(clocked)
    await clocked.over("a+5", "b+20")
    clocked.seconds += 10
    await clocked.rang("a")
    clocked.seconds -= 1000
    await clocked.handled("c", "d")
    await clocked.wait_for_nothing()
    await clocked.again()
    await clocked.wait_for_nothing()
    await clocked.rang("a")
    clocked.seconds += 5000
    await clocked.until(lambda: clocked.broker.outputs() == ["a", "b"], "nothing but the clock tells that it is due")


async def test_statistics(clocked: Clocked) -> None:
    source = alarmed(clocked)
    await clocked.over("b+20", "a+5")
    found = source.statistics().partitions[0]
    assert (found.timers, found.next_timer_ms) == (2, 1_000_005_000)
    await clocked.handled("a-", "b-")
    found = source.statistics().partitions[0]
    assert (found.timers, found.next_timer_ms) == (0, None)


async def test_lost_and_back(clocked: Clocked) -> None:
    """The membership is lost, everything is restored: timers too."""
    source = alarmed(clocked)
    await clocked.over("a+5", "b+6", "a-")
    clocked.connections.membership.lose_and_rejoin()
    await clocked.until(lambda: clocked.engine.incarnation == 1, "heard")
    await clocked.until_active()
    assert source.statistics().partitions[0].timers == 1
    clocked.seconds += 10
    await clocked.rang("b")


async def test_never_early_in_any_time_zone(clocked: Clocked) -> None:
    source = alarmed(clocked)
    await clocked.start()
    east = timezone(timedelta(hours=9))
    at = datetime.fromtimestamp(1_000_005.0004, UTC)
    await source.interject(0, lambda ctx: ctx.schedule_at(at, Ring("a"), name="a"))
    await source.interject(0, lambda ctx: ctx.schedule_at(at.astimezone(east), Ring("b"), name="b"))
    await source.interject(0, lambda ctx: ctx.schedule_at(1_000_005.0004, Ring("c"), name="c"))
    assert source.statistics().partitions[0].next_timer_ms == 1_000_005_001
    clocked.seconds += 5.0005
    await clocked.wait_for_nothing()
    await clocked.rang()
    clocked.seconds += 0.0006
    await clocked.rang("a", "b", "c")


async def test_a_chain_of_timers_that_are_due_leaves_time_for_all_others(clocked: Clocked) -> None:
    """Each sets the next one, due at once: events, interjections and the loop go on."""
    rings = 0

    def on_ring(ctx: EventContext[Any], event: Ring) -> None:
        nonlocal rings
        rings += 1
        ctx.schedule_in(0, Ring("a"), name="a")

    source = alarmed(clocked, on_ring)
    await clocked.over("a+0")
    await clocked.until(lambda: rings > 200, "it rings on")
    for _ in range(3):
        before = rings
        await clocked.handled("x", "y")
        await source.interject(0, lambda ctx: None)
        await clocked.until(lambda before=before: rings > before, "it rings on")  # type: ignore[misc]
    await source.interject(0, lambda ctx: ctx.cancel_timer("a"))
