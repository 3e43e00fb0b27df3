"""Handlers that get lists of events: what becomes of a list that fails, and of the events in it. That lists are as good
as events, whatever fails, is refused or dies: ``tests/property/test_batch_handlers_driven.py``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from streams import DEAD_LETTER, SKIP, BatchContext, ErrorPolicy, EventSource, ExecutionState, Record
from streams.errors import EventFailure
from streams.metrics import BatchFailed, EventFailed
from streams.records import Change
from streams.testing import TestDriver
from tests.unit.batch_kit import RETRIED, Added, Bench, Total, came, raises, send, unless
from tests.unit.handlers_kit import OUT, config
from tests.vocabulary import Added as Letter
from tests.vocabulary import Totals, Words, write


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
    BAD(ctx, events)


def company(ctx: BatchContext[Totals], events: list[Added]) -> None:
    if len(events) > 2:
        raises(ctx)


def sums_up(ctx: BatchContext[Totals], events: list[Added]) -> None:
    ctx.forward(Record(OUT, b"x" * 100 * len(events)))


BAD = unless("bad", do=raises)


@pytest.mark.parametrize(
    ("policy", "then", "keys", "came", "calls", "failed"),
    [
        (DEAD_LETTER, BAD, "a bad a b | c d", "a1 a2 b1 c1 d1", "a bad a b, a, bad, a, b, c d", [1]),
        (RETRIED, BAD, "a bad b", "a1 b1", "a bad b, a, bad, bad, bad, b", [1]),  # attempts are those of one event
        (DEAD_LETTER, company, "a b a", "a1 b1 a2", "a b a, a, b, a", []),  # what only fails in company does not
        (DEAD_LETTER, long_ones, "a long a b | c d", "a1 a2 b1 c1 d1", None, [1]),
        (DEAD_LETTER, long_states, "a long a b", "a1 a2 b1", None, [1]),
        (DEAD_LETTER, sums_up, "a b c", "a1 b1 c1", None, []),  # all of them made it together, and none makes it alone
        (DEAD_LETTER, long_ones, "a long a " * 20, "".join(f"a{n} " for n in range(1, 41)), None, [*range(1, 60, 3)]),
        # The second list fails at once, the first one when its record is refused: neither is tried again.
        (SKIP, long_or_bad, "a long <x> bad b", "a1 x1 b1", None, [1, 3]),
    ],
    ids=["an event", "retried", "company", "refused", "a refused change", "refused company", "many", "two lists"],
)
def test_a_failure_is_that_of_one_event(
    policy: ErrorPolicy, then: Any, keys: str, came: str, calls: str | None, failed: list[int]
) -> None:
    """Not that of the last one of the list, nor of the first; and no innocent one is dead-lettered for it. Lists come
    again behind it."""
    bench, sent = Bench(policy, then), keys.replace("|", "").split()
    found = bench.run(keys, meddle=refusing)
    assert found == came.strip()
    assert calls is None or bench.calls == calls.split(", ")
    letters = [] if policy is SKIP else [sent[offset].encode() for offset in failed]
    assert [letter.key for letter in bench.letters] == letters
    assert sorted({one.offset for one in bench.of(EventFailed)}) == failed
    assert bench.state == {total[0]: int(total[1:]) for total in found.split()}
    assert bench.of(BatchFailed), "it is told: it costs time"
    if then is sums_up:
        assert [len(record.value or b"") for record in bench.outputs if record.key is None] == [100] * 3
    if policy is RETRIED:
        assert bench.attempts == [1, 1, 1, 2, 3, 1], "the call for all of them is none of them"
    if "|" in keys:
        assert bench.calls[-1] == "c d"
        assert [one.offset for one in bench.of(BatchFailed)] == [3]
    if then is BAD:
        assert {one.error for one in bench.of(BatchFailed) + bench.of(EventFailed)} == {"ValueError: no"}
    if then is long_or_bad:
        assert [one.offset for one in bench.of(BatchFailed)] == [4, 1]


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
    def handle(ctx: BatchContext[Totals]) -> Any:
        answer = do(ctx)
        return next(answer) if inspect.isgenerator(answer) else answer

    bench = Bench(DEAD_LETTER, unless("bad", do=handle))
    assert bench.run("a bad a") == "a1 a2"
    assert [letter.key for letter in bench.letters] == [b"bad"]
    assert bench.calls == ["a bad a", "a", "bad", "a"], "without a restart"


async def never() -> None: ...


@pytest.mark.parametrize(
    ("do", "said", "left"),
    [
        (lambda ctx: ExecutionState.FATAL, r"in\[0\]@2 .*batched\.Added", "a1 a2"),
        (lambda ctx: never(), r"in\[0\]@0 .*batch=True, and is asynchronous", ""),
    ],
    ids=["fatal", "asynchronous"],
)
def test_what_stops_the_source_names_one_event(do: Any, said: str, left: str) -> None:
    """What is before it is committed."""
    bench = Bench(SKIP, unless("bad", do=do) if left else lambda ctx, events: do(ctx))
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        with pytest.raises(EventFailure, match=said):
            send(driver, "a a bad b")
        assert (came(driver), driver.committed_offsets().get(0, 0)) == (left, len(left.split()))


@pytest.mark.parametrize("policy", [SKIP, DEAD_LETTER, RETRIED], ids=["skip", "dead letter", "retried"])
def test_a_store_that_cannot_undo_is_restored(policy: ErrorPolicy) -> None:
    made: list[Words] = []
    calls: list[str] = []

    def store(partition: Any) -> Words:
        made.append(Words(partition))
        return made[-1]

    source: EventSource[Words] = EventSource(config(error_policy=policy), store)

    @source.register_event_type(Added, batch=True)
    def added(ctx: BatchContext[Words], events: list[Added]) -> None:
        calls.append(" ".join(event.key for event in events))
        for event in events:
            write(ctx, Letter(event.key, deed="x"))
        BAD(ctx, events)  # type: ignore[arg-type]

    with TestDriver(source) as driver:
        send(driver, "a bad a b")
        restarts = len(made) - 2
        driver.check()
        assert driver.store(0).words == driver.changelog(0) == {b"a": b"xx", b"b": b"x"}
        assert len(driver.dead_letters()) == (policy is not SKIP)
    tries = ["bad"] * (1 + policy.retries)
    assert calls == ["a bad a b", "a", *tries, "a", "b"]
    assert restarts == len(tries)


def test_a_list_that_fails_sets_no_timers() -> None:
    def handle(ctx: BatchContext[Totals], events: list[Added]) -> None:
        if not ctx.is_interjection:
            ctx.schedule_in(10, Added("later"))
            BAD(ctx, events)

    bench = Bench(SKIP, handle)
    bench.run("a bad b")
    assert bench.calls.count("later") == 2


@pytest.mark.parametrize("then", [lambda ctx: raises(ctx), lambda ctx: long_ones(ctx, [Added("long")])])
def test_a_timer_that_fails_or_is_refused_meets_the_policy(then: Any) -> None:
    def handle(ctx: BatchContext[Totals], events: list[Added]) -> None:
        if ctx.is_interjection:
            then(ctx)
        else:
            ctx.schedule_in(10, Added("later"), name="t")

    bench = Bench(RETRIED, handle)
    assert bench.run("a", meddle=refusing) == "a1"
    (letter,) = bench.letters
    assert (letter.header("__kes_dlq_timer"), letter.header("__kes_dlq_offset")) == (b"t", b"-1")
    assert bench.attempts[:4] == ([1, 1, 2, 3] if letter.header("__kes_dlq_attempts") == b"3" else [1, 1])
