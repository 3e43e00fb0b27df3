"""A whole engine between fakes: ends in disorder, beginnings at the end of the log, handlers that hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio.lowlevel
import pytest

from streams import SKIP, EventContext
from streams.errors import TransactionFailed
from streams.group import Lost, Snapshot
from tests.unit.runtime_kit import MISSING, OUT, TABLE, Bench, Group, Named, Producer, Unforgiving, count
from tests.unit.waiting import PATIENCE


def forward(ctx: EventContext[Any], event: Named) -> None:
    ctx.forward(OUT, event, key=event.name)


# ------------------------------------------------------------------------------------- ends, in whatever order


@pytest.mark.parametrize("when", ["at work", "while a handler hangs", "while it drains", "while it takes over"])
async def test_who_is_cancelled_leaves_the_group_and_ends_its_threads(bench: Bench, when: str) -> None:
    hangs = asyncio.Event()

    async def handler(ctx: EventContext[Any], event: Named) -> None:
        forward(ctx, event)
        if event.name == "hang":
            hangs.set()
            await asyncio.Event().wait()

    bench.make(handler)
    bench.begin("a", "b")
    group = bench.connections.membership
    if when == "while it takes over":
        group.answer.clear()
        await bench.until(group.asked.is_set, "the take-over asks")
    else:
        await bench.until(lambda: bench.broker.outputs() == ["a", "b"], "it works")
    if when in ("while a handler hangs", "while it drains"):
        bench.broker.send("hang")
        await bench.until(hangs.is_set, "the handler hangs")
    if when == "while it drains":
        bench.source._ask_to_stop(drain=True)
        await bench.until(lambda: bench.source.statistics().partitions[0].state == "draining", "it drains")
    await bench.cancel()
    assert group.closed.is_set(), "the next owner does not wait for a session to expire"
    assert bench.connections.consumer.closed.wait(PATIENCE)
    group.answer.set()
    await bench.until_all_threads_ended()
    handled = bench.broker.outputs()
    bench.run()  # the same one again
    await bench.until_active()
    await bench.cancel()
    assert bench.broker.outputs()[: len(handled)] == handled
    assert "hang" not in bench.broker.outputs()


@pytest.mark.parametrize("drain", [True, False], ids=["stop", "stop_now"])
async def test_leaving_does_not_wait_behind_a_question(bench: Bench, drain: bool) -> None:
    """The broker does not answer a question of the take-over; the group must hear all the same that we go."""
    bench.make(forward)
    bench.run()
    group = bench.connections.membership
    group.answer.clear()
    await bench.until(group.asked.is_set, "the take-over asks")
    bench.source._ask_to_stop(drain=drain)
    await asyncio.wait_for(bench.source.wait_stopped(), PATIENCE)
    assert group.closed.is_set()
    group.answer.set()
    await bench.until_all_threads_ended()


async def test_stopping_what_never_started_returns(bench: Bench) -> None:
    source = bench.make(forward)
    await asyncio.wait_for(source.stop(), PATIENCE)
    await asyncio.wait_for(source.wait_stopped(), PATIENCE)
    source.stop_now()
    bench.begin("a")
    await bench.until(lambda: bench.broker.outputs() == ["a"], "it starts later, unimpressed")


# ------------------------------------------------------------------------------------------ where it begins


async def test_latest_means_the_latest_of_the_first_start(bench: Bench) -> None:
    """Nothing was handled when it went away; what comes until the next start must not be passed over."""
    bench.make(forward, auto_offset_reset="latest")
    bench.begin("before", "before")
    await bench.until(lambda: bench.broker.reached() == 2, "the start is committed, without any event")
    await bench.cancel()
    bench.begin("a", "b")
    await bench.until(lambda: bench.broker.reached() == 4, "it goes on")
    assert bench.broker.outputs() == ["a", "b"]


@pytest.mark.parametrize("first", ["refused", "failed"])
async def test_a_first_event_that_restarts_its_partition_skips_nothing(
    bench: Bench, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``latest`` has moved on when the partition is restarted, and nothing of it is committed yet."""
    met: list[str] = []

    def handler(ctx: EventContext[Any], event: Named) -> None:
        if not met:
            bench.broker.send("b", "c")  # these come while it is being handled
        met.append(event.name)
        if event.name == "a":
            if first == "failed":
                raise RuntimeError("not undone by this store")
            ctx.forward(MISSING, event)
        forward(ctx, event)

    store = TABLE if first == "refused" else Unforgiving
    bench.make(handler, store=store, on_error=SKIP, auto_offset_reset="latest")
    bench.broker.send("before", "before")
    monkeypatch.setattr(Producer, "commit", committed := HeldCommit(Producer.commit))
    await bench.start()
    bench.broker.send("a")
    await bench.until(lambda: met, "the first event is met")
    committed.go.set()
    await bench.until(lambda: bench.broker.reached() == 5, "all is handled")
    assert bench.broker.outputs() == ["b", "c"]
    assert met.count("b") >= 1
    await bench.stop()


class HeldCommit:
    """A commit that fails, in time, until it is let go: so nothing is committed before the first event is met."""

    def __init__(self, commit: Callable[[Producer, float], None]) -> None:
        self._commit = commit
        self.go = threading.Event()

    def __get__(self, producer: Producer | None, _: type) -> Any:
        def commit(timeout_seconds: float) -> None:
            if not self.go.is_set():
                self.go.wait(0.05)
                raise TransactionFailed("commit_transaction", "INJECTED", "abortable")
            assert producer is not None
            self._commit(producer, timeout_seconds)

        return commit


# ------------------------------------------------------------------------------------------- odd handlers


async def test_many_refused_events_of_one_transaction_are_skipped_one_by_one(bench: Bench) -> None:
    """Each is an attempt of the same transaction, and more than so many attempts stop the source: these do not
    count, since each leaves less of it."""
    partitions = 12

    def handler(ctx: EventContext[Any], event: Named) -> None:
        if event.name == "bad":
            ctx.forward(MISSING, event, key="any")
        forward(ctx, event)

    bench.make(handler, partitions=partitions, on_error=SKIP)
    for partition in range(partitions):
        bench.broker.send(f"before-{partition}", "bad", f"after-{partition}", partition=partition)
    bench.run()
    await bench.until(
        lambda: [bench.broker.reached(partition) for partition in range(partitions)] == [3] * partitions,
        "all partitions go on",
    )
    assert sorted(bench.broker.outputs()) == sorted(
        f"{when}-{partition}" for when in ("before", "after") for partition in range(partitions)
    )


@pytest.mark.parametrize("store", [TABLE, Unforgiving], ids=["undoes", "does not"])
async def test_a_plain_function_may_return_a_coroutine(bench: Bench, store: Any) -> None:
    """What its plain part did before nobody could know that counts once; and it is known from then on."""
    calls = 0

    async def later(ctx: EventContext[Any], event: Named, total: int) -> None:
        await anyio.lowlevel.checkpoint()
        ctx.forward(OUT, Named(f"{event.name}{total}"), key=event.name)

    def handler(ctx: EventContext[Any], event: Named) -> Awaitable[None]:
        nonlocal calls
        calls += 1
        return later(ctx, event, count(ctx, event.name))

    bench.make(handler, store=store)
    bench.begin(*"n" * 40)
    await bench.until(lambda: bench.broker.reached() == 40, "all are handled")
    assert bench.broker.outputs() == [f"n{number}" for number in range(1, 41)]
    assert calls <= 41


async def test_nobody_waits_behind_a_blocking_handler_that_hangs(bench: Bench) -> None:
    """It was given up with its partition; the partition comes back, and its events are handled on another thread."""
    hangs, go = threading.Event(), threading.Event()

    def handler(ctx: EventContext[Any], event: Named) -> None:
        if event.name == "hang" and not hangs.is_set():
            hangs.set()
            go.wait(PATIENCE)
            return
        forward(ctx, event)

    bench.make(handler, blocking=True)
    bench.begin("hang", "a", "b")
    await bench.until(hangs.is_set, "the handler hangs")
    bench.connections.membership.lose_and_rejoin()
    await bench.until(lambda: bench.broker.reached() == 3, "its partition goes on")
    assert not go.is_set()
    assert bench.broker.outputs() == ["hang", "a", "b"]
    go.set()
    await bench.stop()
    await bench.until_all_threads_ended()
    assert bench.broker.outputs() == ["hang", "a", "b"], "what the one that hung did in the end does not count"


async def test_no_producer_is_opened_while_the_name_may_be_anothers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the group has let this process in, at the start and after a loss: it would fence another's of its name."""
    built: list[Producer] = []
    opened: list[Producer] = []
    monkeypatch.setattr(Producer, "warm_up", lambda producer, *_: built.append(producer))
    monkeypatch.setattr(Producer, "init", lambda producer, *_: opened.append(producer))
    monkeypatch.setattr(Group, "start", lambda group, deliver: setattr(group, "_deliver", deliver))
    bench.make(forward)
    bench.run()
    await bench.until(lambda: len(built) == 3, "all slots are built")
    group = bench.connections.membership
    assert not opened
    group._assign()
    await bench.until_active()
    assert len(opened) == 3
    engine = bench.engine
    group.snapshot = Snapshot(1, 2, "n", b"metadata")
    group._deliver(Lost(1, "test"))
    await bench.until(lambda: not engine.workers, "it is lost")
    slot = engine.slots.take()
    assert slot is not None
    engine.slots.replace(slot)
    await bench.until(lambda: len(built) == 4, "another one is built")
    assert len(opened) == 3
    group._assign()
    await bench.until(lambda: len(opened) == 4, "it is opened, now that the name is ours")
