"""Handlers that get lists of events: what becomes of a list that fails, and of the events in it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    BatchContext,
    ErrorPolicy,
    EventSource,
    EventSourceConfig,
    ExecutionState,
    Record,
)
from streams.errors import EventFailure
from streams.metrics import BatchFailed, EventFailed
from streams.records import Change, TopicPartition
from streams.testing import TestDriver
from streams.testing.fault_points import POINTS

from .batch_kit import OUT, RETRIED, RETRIED_ONCE, Added, Bench, Total, Totals, raises, send, unless


def refusing(driver: TestDriver[Any]) -> None:
    """No output of more than 200 bytes, no change of more than 250."""
    broker, config = driver._world.broker, driver._world.config
    broker.limits |= {OUT: 200, config.changelog: 250}


def long_ones(ctx: BatchContext[Totals], events: list[Added]) -> None:
    for event in events:
        if event.key == "long":
            ctx.forward(OUT, Total("x" * 300, 0, 0), key=event.key)


def long_states(ctx: BatchContext[Totals], events: list[Added]) -> None:
    for event in events:
        if event.key == "long":
            ctx.store.put("x" * 300, 1)


def long_or_bad(ctx: BatchContext[Totals], events: list[Added]) -> None:
    long_ones(ctx, events)
    unless("bad", do=raises)(ctx, events)


def company(ctx: BatchContext[Totals], events: list[Added]) -> None:
    if len(events) > 2:
        raises(ctx)


BAD = unless("bad", do=raises)


@pytest.mark.parametrize(
    ("policy", "then", "keys", "came", "calls", "failed"),
    [
        (DEAD_LETTER, BAD, "a bad a b", "a1 a2 b1", "a bad a b, a, bad, a, b", [1]),
        (RETRIED, BAD, "a bad b", "a1 b1", "a bad b, a, bad, bad, bad, b", [1]),  # attempts are those of one event
        (DEAD_LETTER, company, "a b a", "a1 b1 a2", "a b a, a, b, a", []),  # what only fails in company does not
        (DEAD_LETTER, long_ones, "a long a b", "a1 a2 b1", None, [1]),
        (DEAD_LETTER, long_states, "a long a b", "a1 a2 b1", None, [1]),
        (DEAD_LETTER, long_ones, "a long a " * 20, "".join(f"a{n} " for n in range(1, 41)), None, [*range(1, 60, 3)]),
        # The second list fails at once, the first one when its record is refused: neither is tried again.
        (SKIP, long_or_bad, "a long <x> bad b", "a1 x1 b1", None, [1, 3]),
    ],
    ids=["an event", "retried", "company", "a refused record", "a refused change", "many refused", "two lists"],
)
def test_a_failure_is_that_of_one_event(
    policy: ErrorPolicy, then: Any, keys: str, came: str, calls: str | None, failed: list[int]
) -> None:
    """Not that of the last one of the list, nor of the first; and no innocent one is dead-lettered for it."""
    bench, sent = Bench(policy, then), keys.split()
    found = bench.run(*sent, meddle=refusing)
    assert [f"{key}{total}" for key, total in found] == came.split()
    assert calls is None or bench.calls == [call.split() for call in calls.split(", ")]
    assert bench.letters == ([] if policy is SKIP else [sent[offset].encode() for offset in failed])
    assert sorted({one.offset for one in bench.of(EventFailed)}) == failed
    assert bench.state == dict(found)
    assert bench.of(BatchFailed), "it is told: it costs time"
    if policy is RETRIED:
        assert bench.attempts == [1, 1, 1, 2, 3, 1], "the call for all of them is none of them"
    if then is BAD and policy is DEAD_LETTER:
        assert [(one.offset, one.error) for one in bench.of(BatchFailed)] == [(3, "ValueError: no")]
        assert [one.error for one in bench.of(EventFailed)] == ["ValueError: no"]
    if then is long_or_bad:
        assert [one.offset for one in bench.of(BatchFailed)] == [4, 1]


def test_lists_come_again_behind_one_that_failed() -> None:
    bench = Bench(SKIP, unless("bad", do=raises))
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        for keys in (["a", "bad"], ["b", "c"]):
            for key in keys:
                send(driver, key)
            driver.settle()
    assert bench.calls == [["a", "bad"], ["a"], ["bad"], ["b", "c"]]


@pytest.mark.parametrize(
    "do",
    [
        lambda ctx: ExecutionState.FAIL,
        lambda ctx: ctx.fail(ValueError("no")),
        lambda ctx: ctx.forward(OUT, Total("x" * 2_000_000, 0, 0)),
        lambda ctx: ctx.record_change(Change(b"k", b"x" * 2_000_000)),
        lambda ctx: ctx.offset,
        lambda ctx: (_ for _ in ()).throw(asyncio.CancelledError),
    ],
    ids=["fail", "a reason", "an output that is too large", "a change that is too large", "no offset", "cancelled"],
)
def test_all_ways_to_fail(do: Callable[[BatchContext[Totals]], Any]) -> None:
    def handle(ctx: BatchContext[Totals], events: list[Added]) -> Any:
        if any(event.key == "bad" for event in events):
            answer = do(ctx)
            return next(answer) if inspect.isgenerator(answer) else answer
        return None

    bench = Bench(DEAD_LETTER, handle)
    assert bench.run("a", "bad", "a") == [("a", 1), ("a", 2)]
    assert bench.letters == [b"bad"]
    assert bench.calls == [["a", "bad", "a"], ["a"], ["bad"], ["a"]], "without a restart"


def test_fatal_names_one_event_and_what_is_before_it_is_committed() -> None:
    bench = Bench(SKIP, unless("bad", do=lambda ctx: ExecutionState.FATAL))
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        for key in ("a", "a", "bad", "b"):
            send(driver, key)
        with pytest.raises(EventFailure, match=r"in\[0\]@2 .*batched\.Added"):
            driver.settle()
        assert [event.total for event in driver.outputs(OUT, Total)] == [1, 2]
        assert driver.committed_offsets() == {0: 2}


def test_a_plain_function_around_an_asynchronous_one() -> None:
    async def never() -> None: ...

    bench = Bench(SKIP, lambda ctx, events: never())
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        send(driver, "a")
        send(driver, "b")
        with pytest.raises(EventFailure, match=r"in\[0\]@0 .*batch=True, and is asynchronous"):
            driver.settle()
        assert driver.outputs(OUT) == []


# -- outputs that the broker refuses -----------------------------------------------------------------------------------


def test_lists_come_again_behind_one_whose_record_was_refused() -> None:
    bench = Bench(DEAD_LETTER, long_ones)
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        refusing(driver)
        for keys in (["a", "long", "a", "b"], ["c", "d"]):
            for key in keys:
                send(driver, key)
            driver.settle()
        driver.check()
        assert [event.key for event in driver.outputs(OUT, Total)] == ["a", "a", "b", "c", "d"]
        assert [record.key for record in driver.dead_letters()] == [b"long"]
        assert dict(driver.restored_store(0).items()) == {"a": 2, "b": 1, "c": 1, "d": 1}
    assert bench.calls[-1] == ["c", "d"], "lists come again"
    assert [one.offset for one in bench.of(BatchFailed)] == [3]
    assert [one.offset for one in bench.of(EventFailed)] == [1]


def test_a_timer_whose_record_the_broker_refuses() -> None:
    def handle(ctx: BatchContext[Totals], events: list[Added]) -> None:
        if not ctx.is_interjection:
            ctx.schedule_in(1, Added("long"), name="t")
        long_ones(ctx, events)

    bench = Bench(DEAD_LETTER, handle)
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        refusing(driver)
        send(driver, "a")
        driver.advance(5)
        driver.settle()
        driver.check()
        (letter,) = driver.dead_letters()
    assert letter.header("__kes_dlq_timer") == b"t"


def test_one_that_all_of_them_made_together_and_none_makes_alone() -> None:
    def sums_up(ctx: BatchContext[Totals], events: list[Added]) -> None:
        ctx.forward(Record(OUT, b"x" * 100 * len(events)))

    bench = Bench(DEAD_LETTER, sums_up)
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        refusing(driver)
        for key in ("a", "b", "c"):
            send(driver, key)
        driver.settle()
        driver.check()
        assert [len(record.value or b"") for record in driver.outputs(OUT) if record.key is None] == [100] * 3
        assert driver.dead_letters() == []


# -- stores of one's own -----------------------------------------------------------------------------------------------


MADE: list[PlainStore] = []


class PlainStore:
    """Cannot undo."""

    def __init__(self, _: TopicPartition) -> None:
        self.values: dict[bytes, bytes] = {}
        MADE.append(self)

    def receive_change(self, change: Change, /) -> None:
        if change.value is not None:
            self.values[change.key] = change.value

    def revoked(self) -> None: ...

    def get(self, key: str, default: int) -> int:
        return int(self.values.get(key.encode(), default))


@pytest.mark.parametrize("policy", [SKIP, DEAD_LETTER, RETRIED_ONCE])
def test_a_store_that_cannot_undo_is_restored(policy: ErrorPolicy) -> None:
    config = EventSourceConfig(group_id="g", topic="in", num_partitions=1, error_policy=policy)
    MADE.clear()
    source: EventSource[PlainStore] = EventSource(config, PlainStore)
    calls: list[list[str]] = []

    @source.register_event_type(Added, batch=True)
    def added(ctx: BatchContext[PlainStore], events: list[Added]) -> None:
        calls.append([event.key for event in events])
        for event in events:
            change = Change(event.key.encode(), b"%d" % (ctx.store.get(event.key, 0) + 1))
            ctx.store.receive_change(change)
            ctx.record_change(change)
        if any(event.key == "bad" for event in events):
            raise ValueError("no")

    with TestDriver(source) as driver:
        for key in ("a", "bad", "a", "b"):
            send(driver, key)
        driver.settle()
        made = len(MADE)
        driver.check()
        assert driver.store(0).values == driver.changelog(0) == {b"a": b"2", b"b": b"1"}
        assert len(driver.dead_letters()) == (policy is not SKIP)
    tries = [["bad"]] * (1 + policy.retries)
    assert calls == [["a", "bad", "a", "b"], ["a"], *tries, ["a"], ["b"]]
    assert made == 2 + len(tries)


def test_a_list_that_fails_sets_no_timers() -> None:
    def handle(ctx: BatchContext[Totals], events: list[Added]) -> None:
        if not ctx.is_interjection:
            ctx.schedule_in(10, Added("later"))
            if any(event.key == "bad" for event in events):
                raise ValueError("no")

    bench = Bench(SKIP, handle)
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        for key in ("a", "bad", "b"):
            send(driver, key)
        driver.advance(30)
        driver.settle()
    assert bench.calls.count(["later"]) == 2


def test_a_timer_that_fails_meets_the_policy() -> None:
    def handle(ctx: BatchContext[Totals], events: list[Added]) -> None:
        if ctx.is_interjection:
            raise ValueError("no")
        ctx.schedule_in(10, Added("later"), name="t")

    bench = Bench(RETRIED, handle)
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        send(driver, "a")
        driver.advance(30)
        driver.settle()
        driver.check()
        (letter,) = driver.dead_letters()
    assert bench.attempts == [1, 1, 2, 3]
    assert (letter.header("__kes_dlq_timer"), letter.header("__kes_dlq_offset")) == (b"t", b"-1")


@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_dies_leaves_all_of_a_list_or_nothing(point: Any) -> None:
    bench = Bench()
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        driver.at(point, driver.crash)
        for key in ("a", "b", "a"):
            send(driver, key)
        with contextlib.suppress(Exception):
            driver.settle()
        assert len(driver.outputs(OUT)) in (0, 3)
        if not driver.members:
            driver.restart()
        driver.settle()
        driver.check()
        assert [(event.key, event.total) for event in driver.outputs(OUT, Total)] == [("a", 1), ("b", 1), ("a", 2)]
