"""Handlers that get lists of events: what is in a list, what a context is, timers, replays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, SKIP, BatchContext, EventContext, EventSource
from streams.errors import RegistrationError, StoreError
from streams.events import event_type, event_type_of
from streams.metrics import TransactionSettled
from streams.records import TYPE_HEADER, Change, IncomingRecord
from streams.runtime.partition.hot_path import SLICE
from streams.runtime.replay import PartitionReplay
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse
from tests.unit.batch_kit import Added, Bench, Total, raises, send, unless
from tests.unit.handlers_kit import OUT, config
from tests.vocabulary import Totals


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
        for trace in ((), [("trace", b"1")], [("trace", b"2"), (TYPE_HEADER, b"batched.Other")]):
            driver.send(Added("a"), headers=trace, partition=0, wait=False)
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

    def handle(ctx: BatchContext[Totals], events: list[Added]) -> None:
        if ctx.is_interjection:
            assert ctx.timer is not None
            (record,) = ctx.records
            in_time = record.timestamp_ms == ctx.timer.due_ms
            seen.append((events[0].key, ctx.timer.key, record.key, record.offset, in_time))
        else:
            for event, record in zip(events, ctx.records, strict=True):
                ctx.schedule_in(10, Added(f"later-{event.key}"), key=record.key)
            ctx.schedule_in(20, Added("cancelled"), name="c")
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

    @event_type("batched.Slow")
    class Slow(msgspec.Struct, frozen=True):
        key: str

    @bench.source.register_event_type(Slow, concurrency=4)
    async def slow(ctx: EventContext[Totals], event: Slow) -> None:
        await elapse(1.0)
        await ctx.turn()
        bench.calls.append(f"slow {event.key}")

    with TestDriver(bench.source, topics={OUT: 1}) as driver:
        driver.send(Slow("s"), partition=0, wait=False)
        send(driver, "a b")
        driver.check()
    assert bench.calls == ["slow s", "a b"]


def test_the_context_of_a_list() -> None:
    """It has no input of its own, and is refused after its handler."""
    seen: list[Any] = []
    kept: list[BatchContext[Totals]] = []

    def handle(ctx: BatchContext[Totals], events: list[Added]) -> None:
        kept.append(ctx)
        seen.append((ctx.input, ctx.timer, ctx.is_interjection, [record.offset for record in ctx.records]))
        with pytest.raises(AttributeError, match=r"ctx\.records"):
            print(ctx.offset)

    Bench(SKIP, handle).run("a b | a")
    assert seen == [(None, None, False, [0, 1]), (None, None, False, [2])]
    with pytest.raises(StoreError, match=r"in\[0\]@0 to 1 had ended"):
        kept[0].forward(OUT, Total("x", 1, 1))
    with pytest.raises(StoreError, match=r"in\[0\]@2 had ended"):
        kept[1].record_change(Change(b"k", b"v"))


def test_what_cannot_be_registered() -> None:
    source = EventSource(config())

    async def later(ctx: Any, events: list[Added]) -> None: ...

    def now(ctx: Any, events: list[Added]) -> None: ...

    register: Any = source.register_event_type
    with pytest.raises(RegistrationError, match=r"batched\.Added has batch=True, which is for plain functions"):
        register(Added, later, batch=True)
    for other in ({"blocking": True}, {"concurrency": 4}):
        with pytest.raises(RegistrationError, match="AsyncBatcher"):
            register(Added, now, batch=True, **other)
    register(Added, now, batch=True)


async def test_a_replay_hands_them_in_one_by_one() -> None:
    """So that results are the same however the data is cut, and each output has its own event's offset."""
    bench = Bench(DEAD_LETTER, unless("bad", do=raises))
    described = event_type_of(Added)
    records = [
        IncomingRecord("in", 0, 5 + number, key.encode(), described.encode(Added(key)), described.headers, 7)
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
    one, other = Bench().source, EventSource(config())
    other.register_event_type(Added, one._router.routes[b"batched.Added"].handler)
    assert ("batch" in one.program().fingerprint[1], "batch" in other.program().fingerprint[1]) == (True, False)
