"""Jobs, concurrent handlers, batches and records beside the transactions: what begins when, and in which order it has
its effects; limits, failures, the end. Traces as ``async_kit`` has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from streams import (
    AsyncJobScheduler,
    EventContext,
    ExecutionState,
    Record,
    SchedulerConfig,
)
from streams.records import TYPE_HEADER
from streams.statistics import StageStatistics
from streams.testing import TestDriver
from tests.unit.async_kit import STAGES, World, driven, items_of, names, reasons, row, send, watch
from tests.unit.runtime_kit import OUT
from tests.vocabulary import Named, Ring

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize(
    "line",
    [
        # All at once, the effects in order; one after the other within a key; as many as there are permits.
        "jobs | a:3, b:2, c:1 | 0 a b c; 3 A B C @3",
        "jobs | a1:2, a2:1, b1:1 | 0 a1 b1; 2 A1 a2 @1; 3 A2 B1 @3",
        "jobs concurrency=2 | a:1, b:1, c:1 | 0 a b; 1 c A B @2; 2 C @3",
        "jobs | a:3, None, b:1 | 0 a b; 3 A B @3",
        "concurrent | a:3, b:2, c:1 | 0 a b c; 3 A B C @3",
        "concurrent | a1:2, a2:1, b1:1 | 0 a1 b1; 2 a2 A1 @1; 3 A2 B1 @3",
        # Waiting for the turn takes no permit, or the last of many would never get one.
        "concurrent concurrency=2 | a:5, b:1, c:1, d:1 | 0 a b; 1 c; 2 d; 5 A B C D @4",
        "concurrent concurrency=1 | a:1, b:1, c:1 | 0 a; 1 b A @1; 2 c B @2; 3 C @3",
        # Items of many events are one call; a key is in one call at a time, in order within it.
        "batches | b1 c1 | 0 b1+c1 B1+C1 @1",
        "batches max_batch_size=4 max_concurrent_batches=2 | a1:3 b1, c1, d1, e1:1, f1 g1 "
        "| 0 a1+b1+c1+d1 e1+f1+g1; 3 A1+B1 C1 D1 E1 F1+G1 @5",
        "batches max_batch_size=3 max_concurrent_batches=4 | a1:1, a2, b1, a3, a4, a5, c1:1 "
        "| 0 a1+a2+b1 c1; 1 A1 A2 B1 a3+a4+a5 A3 A4 A5 C1 @7",
        # A call that is not full waits for company; more items than there is room for go in when nothing else is there.
        "batches max_batch_size=3 max_delay_seconds=5 | a1, b1 | 5 a1+b1 A1 B1 @2",
        "batches max_batch_size=3 max_delay_seconds=5 | a1, b1, c1 | 0 a1+b1+c1 A1 B1 C1 @3",
        "batches max_batch_size=2 max_queued_items=3 max_concurrent_batches=1 "
        "| c1:1, a2:1 b1:1 c2:1 d1:1 e1:1 f1:1 g1:1, h1 "
        "| 0 c1; 1 C1 a2+b1 @1; 2 c2+d1; 3 e1+f1; 4 g1; 5 A2+B1+C2+D1+E1+F1+G1 h1 H1 @3",
        # None has no finalizer, an empty list has.
        "batches | a1:1, None, , b1:1 | 0 a1+b1; 1 A1 () B1 @4",
    ],
)
def test_what_begins_when_and_has_its_effects_in_order(line: str) -> None:
    kind, stage, events, trace = row(line)
    world = World(kind, stage)
    with driven(world) as driver:
        send(driver, *events)
        assert watch(driver, world, 7) == trace
        assert names(driver) == [name.strip("()") for name in trace.split() if name.isupper() or name == "()"]


@pytest.mark.parametrize("late", [True, False], ids=["on_failure", "dead letter"])
@pytest.mark.parametrize(
    "line",
    [
        "jobs | a:3, b!:1, b2:1, c:1 | 0 a b! c; 3 A (b! is bad) b2 @2; 4 B2 C @4",
        "concurrent | a:3, b!:1, b2:1, c:1 | 0 a b! c; 3 A (b! is bad) b2 @2; 4 B2 C @4",
        "batches max_batch_size=1 | a1:3, b1!:1, b2:1, c1 | 0 a1 b1! c1; 3 A1 (b1! is bad) b2 @2; 4 B2 C1 @4",
        "batches | c1 b1, c2 b2!, c3 b3 | 0 c1+b1+c2+b2!+c3+b3 C1+B1 (b2! is bad) C3+B3 @3",
        # Its own items have a key that failed:
        "batches max_batch_size=1 max_concurrent_batches=1 | a1! a2 b1, a3 "
        "| 0 a1! b1 (a1! is bad, a1! is bad) a3 A3 @2",
    ],
)
def test_a_failure_is_its_events_and_its_key_waits_for_the_turn(line: str, late: bool) -> None:
    """No other event fails, and the order of the key holds: what is behind the failure begins after its turn."""
    kind, stage, events, trace = row(line)
    world = World(kind, stage, late=late)
    late = late and kind != "concurrent"
    said = trace[trace.index("(") + 1 : trace.index(")")]
    with driven(world) as driver:
        send(driver, *events)
        assert watch(driver, world, 7) == (trace if late else trace.replace(f" ({said})", ""))
        assert reasons(driver) == ([] if late else [said.split(",")[0]])


def test_a_long_line_pauses_its_partition_and_nobody_else() -> None:
    world = World("jobs", num_partitions=2, max_queued_records=100)
    with driven(world) as driver:
        send(driver, *[f"m{number}" for number in range(600)], partition=1)
        send(driver, "slow:50", *[f"n{number}" for number in range(600)])
        driver.advance(40)
        assert driver.committed_offsets() == {1: 600}
        first = driver.statistics().partitions[0]
        assert first.paused
        assert 0 < first.events_ahead <= first.queued_records < 600
        driver.settle()
        assert driver.statistics().partitions[0].queued_records == 0
        assert driver.committed_offsets() == {0: 601, 1: 600}


@pytest.mark.parametrize(
    ("kind", "stage", "begun"),
    [
        ("jobs", {"max_concurrent_keys": 2}, "a b"),
        ("batches", {"max_batch_size": 1, "max_queued_items": 2, "max_concurrent_batches": 8}, "a b"),
        ("batches", {"max_batch_size": 5, "max_queued_items": 2, "max_concurrent_batches": 8}, "a+b"),
    ],
)
def test_a_bound_holds_up_its_own_partition_only(kind: str, stage: dict[str, Any], begun: str) -> None:
    world = World(kind, stage, num_partitions=2)
    with driven(world) as driver:
        send(driver, "a:9", "b:9", "c:9")
        driver.advance(2)
        send(driver, "z:1", partition=1)
        assert watch(driver, world, 20) == f"0 {begun}; 2 z; 3 Z; 9 A B c @2; 18 C @3"


@pytest.mark.parametrize("kind", STAGES)
def test_interjections_pass_work_that_is_slow(kind: str) -> None:
    world = World(kind)

    def answer(ctx: EventContext[Any]) -> int:
        ctx.forward(OUT, Named("tick"))
        return 42

    with driven(world) as driver:
        send(driver, "a:30")
        driver.advance(1)
        commits: list[float] = []
        driver.at("commit.after", lambda _: commits.append(driver.now - world.start))
        assert driver.interject(0, answer) == 42
        assert commits[0] < 2
        assert world.trace == "0 a; 30 A"
        assert names(driver) == ["tick", "A"], "the work is not lost"


STATISTICS: list[Any] = [
    ("jobs", {"concurrency": 1, "max_concurrent_keys": 2}, "aabc", (1, 2, 2), (0, 0, 0)),
    ("batches", {"max_delay_seconds": 3600.0, "max_batch_size": 3}, "ab", (0, 2, 2), (0, 2, 2)),
    ("batches", {"max_batch_size": 2, "max_concurrent_batches": 1}, "aba", (2, 1, 2, 1, 2.0), (0, 0, 0, 2, 1.5)),
    ("concurrent", {"concurrency": 1}, "aab", (1, 2, 2), (0, 0, 0)),
]


@pytest.mark.parametrize(("kind", "stage", "events", "before", "after"), STATISTICS)
def test_statistics_tell_what_runs_and_what_waits(
    kind: str, stage: dict[str, Any], events: str, before: tuple[Any, ...], after: tuple[Any, ...]
) -> None:
    world = World(kind, stage)
    with driven(world) as driver:
        send(driver, *[f"{name}:2" for name in events])
        for expected in (before, after):
            driver.advance(1)
            [found] = driver.statistics().stages
            assert found == StageStatistics(world.stage.name if world.stage else "Named", *expected)
            driver.advance(30)


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "stage", "calls"),
    [
        ("jobs", {"concurrency": 2}, ["a", "b"]),
        ("concurrent", {"concurrency": 2}, ["a", "b"]),
        ("batches", {"max_batch_size": 2, "max_concurrent_batches": 1}, ["a+b"]),
    ],
)
@pytest.mark.parametrize(
    ("end", "seconds", "trace", "committed"),
    [
        pytest.param("leave", 3, "0 {calls}; 3 A B", {0: 2}, id="a stop waits for what runs"),
        pytest.param("leave", 500, "0 {calls}; 9 {cancelled}", {}, id="for so long"),
        pytest.param("evict", 50, "0 {calls}; 1 {cancelled} {calls}", {}, id="without a membership it is cancelled"),
    ],
)
def test_at_the_end_what_has_not_begun_is_dropped_and_all_that_is_not_committed_is_done_again(
    kind: str, stage: dict[str, Any], calls: list[str], end: str, seconds: int, trace: str, committed: dict[int, int]
) -> None:
    world = World(kind, stage)
    with driven(world) as driver:
        send(driver, f"a:{seconds}", f"b:{seconds}", "c:3")
        driver.advance(1)
        getattr(driver, end)()
        driver.advance(1 if end == "evict" else 0)
        assert world.trace == trace.format(calls=" ".join(calls), cancelled=" ".join(f"no-{call}" for call in calls))
        assert {partition: offset for partition, offset in driver.committed_offsets().items() if offset} == committed
        if end == "leave":
            driver.restart()
        driver.settle()
        assert names(driver) == ["A", "B", "C"]
        driver.check()


def test_a_stop_leaves_what_has_not_begun_to_the_next_owner() -> None:
    """Also handlers behind the last job that runs; those between two jobs are needed for the second."""
    world = World("jobs")
    seen: list[bytes | None] = []
    world.source.register_default_handler(lambda ctx, value: seen.append(value))
    with driven(world) as driver:
        for name in ("a", "b"):
            send(driver, f"{name}:3")
            driver.send_record(
                Record("in", b"behind " + name.encode(), None, [(TYPE_HEADER, b"Unknown")], 0), wait=False
            )
        driver.advance(1)
        assert seen == []
        driver.leave()
        assert (names(driver), seen, driver.committed_offsets()) == (["A", "B"], [b"behind a"], {0: 3})


# -- work of a handler that has its turn; chains -----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "blocking"), [("jobs", False), ("jobs", True), ("batches", False)])
def test_work_in_a_handler_that_has_its_turn(kind: str, blocking: bool) -> None:
    world = World(kind, ahead=False)

    def schedule(ctx: EventContext[Any], event: Named) -> Any:
        if event.name == "none":
            return ExecutionState.COMPLETE
        with pytest.warns(DeprecationWarning, match="start a durable job"):
            return world.stage.schedule(ctx, event)

    async def submit(ctx: EventContext[Any], event: Named) -> None:
        items = await world.stage.submit(ctx, items_of(event))
        world.done(ctx, *(item.result for item in items))

    world.source.register_event_type(Named, schedule if kind == "jobs" else submit, blocking=blocking)
    with driven(world) as driver:
        send(driver, "a", "none" if kind == "jobs" else "", "b!", "c")
        assert watch(driver, world, 2) == f"0 a A {'() ' if kind == 'batches' else ''}b! c C @4"
        assert reasons(driver) == ["b! is bad"]


def chain(world: World, last: str, seconds: float, key: Callable[[Named], str]) -> None:
    """Jobs of so many seconds before the stage of this world."""

    async def job(event: Named) -> Any:
        await asyncio.sleep(seconds)
        return event if last == "jobs" else event.name

    first = AsyncJobScheduler(world.source, job, config=SchedulerConfig(concurrency=4), then=world.stage)
    first.register_event_type(Named, key=key)


@pytest.mark.parametrize(
    ("last", "bounds"),
    [("jobs", {"concurrency": 1, "max_concurrent_keys": 3}), ("batches", {"max_batch_size": 2, "max_queued_items": 3})],
)
def test_the_bounds_of_a_later_stage_hold_back_the_first(last: str, bounds: dict[str, Any]) -> None:
    world = World(last, bounds, ahead=False)
    chain(world, last, 0, lambda event: event.name)
    with TestDriver(world.source, patience=10_000) as driver:
        world.now = lambda: driver.now
        send(driver, *(f"{number}:5" for number in range(200)))
        for _ in range(20):
            driver.advance(1)
            there = sum(stage.running + stage.waiting for stage in driver.statistics().stages)
            assert 3 <= there < 200, "what is there, and what was on the way: never all"
        driver.settle()
        assert names(driver) == [str(number) for number in range(200)]


@pytest.mark.parametrize(
    ("seconds", "trace"),
    [
        (1, "0 d!; 3 a; 6 A b! @1; 9 c @2; 12 C e @4; 15 E @5"),
        (5, "0 d!; 5 a; 8 A @1; 10 b!; 13 @2; 15 c; 18 C e @4; 21 E @5"),
    ],
    ids=["before", "after"],
)
@pytest.mark.parametrize("last", ["jobs", "batches"])
def test_a_failure_holds_up_nothing_that_comes_before_it(last: str, seconds: int, trace: str) -> None:
    """The last stage takes events from two ways, so the later event of a key may be the first one there. It fails, and
    holds the key until its turn, for which it needs the earlier ones: they may be there by then, or not. One at a time,
    and a failure holds back what is behind it."""
    world = World(last, {} if last == "jobs" else {"max_batch_size": 1}, ahead=False)
    chain(world, last, seconds, lambda event: "k")
    world.stage.register_event_type(Ring, lambda record, event: ("k", event if last == "jobs" else event.name))
    with driven(world) as driver:
        for event in (Named("a:3"), Named("b!:3"), Named("c:3"), Ring("d!:3"), Ring("e:3")):
            driver.send(event, wait=False)
        assert watch(driver, world, 24) == trace
        assert reasons(driver) == ["b! is bad", "d! is bad"]


def test_a_handler_that_has_its_turn_does_not_wait_for_a_later_event() -> None:
    """Whose key has failed, and is held until its turn is over: that never comes while this one waits."""
    world = World("batches", ahead=False)
    world.stage.register_event_type(Ring, lambda record, event: ("a", event.name))

    @world.source.register_event_type(Named, concurrency=1)
    async def submit(ctx: EventContext[Any], event: Named) -> None:
        await ctx.turn()
        await asyncio.sleep(3)
        await world.stage.submit(ctx, items_of(event))

    with driven(world) as driver:
        send(driver, "a")
        driver.send(Ring("a!"), partition=0, wait=False)
        assert watch(driver, world, 6) == "0 a!; 3 a @2"
        assert reasons(driver) == ["a! is bad"]


@pytest.mark.parametrize(
    ("size", "first", "trace"),
    [
        pytest.param(5, 0, "0 a+b; 9 a; 30 B; 39 A", id="the other partition needs the call"),
        pytest.param(1, 0, "0 a; 9 no-a b a; 29 B; 39 A", id="nobody needs the call"),
        pytest.param(1, 1, "0 b; 1 a; 20 B; 31 A", id="the call has not begun"),
    ],
)
def test_a_partition_that_moves_takes_its_items_with_it(size: int, first: int, trace: str) -> None:
    world = World("batches", {"max_batch_size": size, "max_concurrent_batches": 1}, num_partitions=2)
    with driven(world) as driver:
        for partition in (first, 1 - first):
            send(driver, "b:20" if partition else "a:30", partition=partition)
            driver.advance(0.0 if size > 1 else 0.1)
        driver.join()
        driver.settle()
        assert world.trace == trace
