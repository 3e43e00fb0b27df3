"""Handlers that get lists of events: what is in a list, what a context is, timers, replays; what becomes of a list that
fails. That lists are as good as events, whatever fails or dies: ``tests/property/test_batch_handlers_driven.py``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from streams import DEAD_LETTER, SKIP, BatchContext, EventContext, EventSource, ExecutionState, Record, Retry
from streams.errors import EventFailure, RegistrationError, StoreError
from streams.events import event_type_of
from streams.metrics import BatchFailed, EventFailed, TransactionSettled
from streams.records import TYPE_HEADER, Change, IncomingRecord
from streams.runtime.partition.hot_path import SLICE
from streams.runtime.replay import PartitionReplay
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse
from tests.unit.batch_kit import RETRIED, Addition, Bench, came, raises, send, unless
from tests.unit.handlers_kit import OUT, config
from tests.vocabulary import TOTALS, Added, Ring, TotalAt, Totals, Words, write


def test_events_that_follow_each_other_come_as_a_list() -> None:
    """In a tuple of records that nobody can change, or a handler that sorts them would move the offset."""
    seen: list[type] = []
    bench = Bench(then=lambda ctx, events: seen.append(type(ctx.records)))
    assert bench.run("a b a") == "a1 b1 a2"
    assert (bench.calls, seen) == (["a b a"], [tuple])
    (settled,) = bench.of(TransactionSettled)
    assert (settled.events, settled.outputs, settled.changes) == (3, 3, 2)
    assert bench.state == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("keys", "came", "calls", "letters"),
    [
        ("a <x> b a <x> <x>", "a1 x1 b1 a2 x2 x3", "a, <x>, b a, <x>, <x>", ""),  # another type ends the list
        ("a b ?x a ?y", "a1 b1 a2", "a b, a", "?x ?y"),  # what cannot be read ends it and goes to its policy
        ("a 1x a b", "a1 old100 a2 b1", "a, old, a b", ""),  # an older version comes alone
    ],
)
def test_what_ends_a_list(keys: str, came: str, calls: str, letters: str) -> None:
    bench = Bench()
    assert bench.run(keys) == came
    assert bench.calls == calls.split(", ")
    assert [letter.key for letter in bench.letters] == letters.encode().split()


def test_other_headers_do_not_end_it() -> None:
    bench = Bench()
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        for trace in ((), [("trace", b"1")], [("trace", b"2"), (TYPE_HEADER, b"Named")]):
            driver.send(Addition("a"), headers=trace, partition=0, wait=False)
        driver.settle()
    assert bench.calls == ["a a a"], "the first type header counts"


def test_lists_are_as_long_as_slices() -> None:
    bench = Bench()
    bench.run("a " * 500)
    sizes = [len(call.split()) for call in bench.calls]
    assert (sum(sizes), max(sizes)) == (500, SLICE)


def test_timers_of_batched_events() -> None:
    """Set by a list, they fire one by one."""
    seen: list[Any] = []

    def handle(ctx: BatchContext[Totals], events: list[Addition]) -> None:
        if ctx.is_interjection:
            assert ctx.timer is not None
            (record,) = ctx.records
            in_time = record.timestamp_ms == ctx.timer.due_ms
            seen.append((events[0].key, ctx.timer.key, record.key, record.offset, in_time))
        else:
            for event, record in zip(events, ctx.records, strict=True):
                ctx.schedule_in(10, Addition(f"later-{event.key}"), key=record.key)
            ctx.schedule_in(20, Addition("cancelled"), name="c")
            assert ctx.cancel_timer("c")

    bench = Bench(SKIP, handle)
    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        send(driver, "a b c")
        driver.crash()
        driver.restart()
        driver.advance(30)
        driver.check()
    assert bench.calls == ["a b c", "later-a", "later-b", "later-c"]
    assert seen == [(f"later-{key}", key.encode(), key.encode(), -1, True) for key in "abc"]


def test_behind_work_that_runs_ahead() -> None:
    """Batched events wait in the line for a slow one, and are handed in together then."""
    bench = Bench()

    @bench.source.register_event_type(Ring, concurrency=4)
    async def slow(ctx: EventContext[Totals], event: Ring) -> None:
        await elapse(1.0)
        await ctx.turn()
        bench.calls.append(f"slow {event.name}")

    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        driver.send(Ring("s"), partition=0, wait=False)
        send(driver, "a b")
        driver.check()
    assert bench.calls == ["slow s", "a b"]


def test_the_context_of_a_list() -> None:
    """It has no input of its own, and is refused after its handler."""
    seen: list[Any] = []
    kept: list[BatchContext[Totals]] = []

    def handle(ctx: BatchContext[Totals], events: list[Addition]) -> None:
        kept.append(ctx)
        seen.append((ctx.input, ctx.timer, ctx.is_interjection, [record.offset for record in ctx.records]))
        with pytest.raises(AttributeError, match=r"ctx\.records"):
            print(ctx.offset)

    Bench(SKIP, handle).run("a b | a")
    assert seen == [(None, None, False, [0, 1]), (None, None, False, [2])]
    with pytest.raises(StoreError, match=r"in\[0\]@0 to 1 had ended"):
        kept[0].forward(OUT, TotalAt("x", 1, 1))
    with pytest.raises(StoreError, match=r"in\[0\]@2 had ended"):
        kept[1].record_change(Change(b"k", b"v"))


def test_what_cannot_be_registered() -> None:
    source = EventSource(config())

    async def later(ctx: Any, events: list[Addition]) -> None: ...

    def now(ctx: Any, events: list[Addition]) -> None: ...

    register: Any = source.register_event_type
    with pytest.raises(RegistrationError, match=r"batched\.Added at .* has batch=True, which is for plain functions"):
        register(Addition, later, batch=True)
    for other in ({"blocking": True}, {"concurrency": 4}):
        with pytest.raises(RegistrationError, match="AsyncBatcher"):
            register(Addition, now, batch=True, **other)
    register(Addition, now, batch=True)


async def test_a_replay_hands_them_in_one_by_one() -> None:
    """So that results are the same however the data is cut, and each output has its own event's offset."""
    bench = Bench(DEAD_LETTER, unless("bad", do=raises))
    described = event_type_of(Addition)
    records = [
        IncomingRecord("in", 0, 5 + number, key.encode(), described.encode(Addition(key)), described.headers, 7)
        for number, key in enumerate(["a", "b", "bad", "a"])
    ]
    replay = PartitionReplay(bench.source.program(), 0, wall_ms=1)
    completed = await replay.handle(records)
    assert [(output.origin, output.topic) for output in completed.outputs] == [
        (5, OUT), (6, OUT), (7, "g.in.dead-letters"), (8, OUT)
    ]  # fmt: skip
    assert bench.calls == ["a", "b", "bad", "a"]
    replay.close()


def test_the_fingerprint_of_a_program_tells() -> None:
    one, other = Bench().source, EventSource(config(), TOTALS)
    other.register_event_type(Addition, one._declared.router.routes[b"batched.Added"].handler)
    assert ("batch" in one.program().fingerprint[1], "batch" in other.program().fingerprint[1]) == (True, False)


# -- failures ----------------------------------------------------------------------------------------------------------


def refusing(driver: TestDriver[Any]) -> None:
    """No output of more than 200 bytes, no change of more than 250."""
    broker, config = driver._world.broker, driver._world.config
    broker.limits |= {OUT: 200, config.changelog: 250}


def long_ones(ctx: BatchContext[Totals], events: list[Addition]) -> None:
    for event in events:
        if event.key == "long":
            ctx.forward(OUT, TotalAt("x" * 300, 0, 0), key=event.key)


def long_states(ctx: BatchContext[Totals], events: list[Addition]) -> None:
    for event in events:
        if event.key == "long":
            ctx.store.put("x" * 300, 1)


def long_or_bad(ctx: BatchContext[Totals], events: list[Addition]) -> None:
    long_ones(ctx, events)
    BAD(ctx, events)


def company(ctx: BatchContext[Totals], events: list[Addition]) -> None:
    if len(events) > 2:
        raises(ctx)


def sums_up(ctx: BatchContext[Totals], events: list[Addition]) -> None:
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
    policy: Retry, then: Any, keys: str, came: str, calls: str | None, failed: list[int]
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
        lambda ctx: ctx.forward(OUT, TotalAt("x" * 2_000_000, 0, 0)),
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
def test_a_store_that_cannot_undo_is_restored(policy: Retry) -> None:
    made: list[Words] = []
    calls: list[str] = []

    def store(partition: Any) -> Words:
        made.append(Words(partition))
        return made[-1]

    source: EventSource[Words] = EventSource(config(error_policy=policy), store)

    @source.register_event_type(Addition, batch=True)
    def added(ctx: BatchContext[Words], events: list[Addition]) -> None:
        calls.append(" ".join(event.key for event in events))
        for event in events:
            write(ctx, Added(event.key, deed="x"))
        BAD(ctx, events)  # type: ignore[arg-type]

    with TestDriver(source) as driver:
        send(driver, "a bad a b")
        restarts = len(made) - 2
        driver.check()
        assert driver.store(0).words == driver.changelog(0) == {b"a": b"xx", b"b": b"x"}
        assert len(driver.dead_letters()) == (policy is not SKIP)
    tries = ["bad"] * policy.attempts
    assert calls == ["a bad a b", "a", *tries, "a", "b"]
    assert restarts == len(tries)


def test_a_list_that_fails_sets_no_timers() -> None:
    def handle(ctx: BatchContext[Totals], events: list[Addition]) -> None:
        if not ctx.is_interjection:
            ctx.schedule_in(10, Addition("later"))
            BAD(ctx, events)

    bench = Bench(SKIP, handle)
    bench.run("a bad b")
    assert bench.calls.count("later") == 2


@pytest.mark.parametrize("then", [lambda ctx: raises(ctx), lambda ctx: long_ones(ctx, [Addition("long")])])
def test_a_timer_that_fails_or_is_refused_meets_the_policy(then: Any) -> None:
    def handle(ctx: BatchContext[Totals], events: list[Addition]) -> None:
        if ctx.is_interjection:
            then(ctx)
        else:
            ctx.schedule_in(10, Addition("later"), name="t")

    bench = Bench(RETRIED, handle)
    assert bench.run("a", meddle=refusing) == "a1"
    (letter,) = bench.letters
    assert (letter.header("__kes_dlq_timer"), letter.header("__kes_dlq_offset")) == (b"t", b"-1")
    assert bench.attempts[:4] == ([1, 1, 2, 3] if letter.header("__kes_dlq_attempts") == b"3" else [1, 1])
