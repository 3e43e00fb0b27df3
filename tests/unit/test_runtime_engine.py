"""A whole engine between fakes, on real threads: its ends, what lives as long as it runs, handlers that hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from streams import EventContext, EventSource
from streams.errors import StreamsError
from streams.model.group import GroupMetadata, Lost
from tests.unit.runtime_kit import OUT, Bench, Group, Slot
from tests.unit.waiting import PATIENCE
from tests.vocabulary import Named


def forward(ctx: EventContext[Any], event: Named) -> None:
    ctx.forward(OUT, event, key=event.name)


# -- ends, in whatever order -------------------------------------------------------------------------------------------


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
        bench.source._run.ask_to_stop(drain=True)
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


async def test_stopping_what_never_started_returns(bench: Bench) -> None:
    source = bench.make(forward)
    await asyncio.wait_for(source.stop(), PATIENCE)
    await asyncio.wait_for(source.wait_stopped(), PATIENCE)
    source.stop_now()
    bench.begin("a")
    await bench.until(lambda: bench.broker.outputs() == ["a"], "it starts later, unimpressed")


@pytest.mark.parametrize(
    ("how", "happened"),
    [
        ("it is stopped", ["in after 0", "out after 2"]),
        ("it is cancelled", ["in after 0", "out after 2"]),
        ("entering fails", ["out after 0"]),
        ("it is stopped while it enters", ["out after 0"]),
    ],
)
async def test_a_lifespan_is_entered_before_the_first_event_and_left_after_the_last(
    bench: Bench, how: str, happened: list[str]
) -> None:
    seen: list[str] = []
    entering = asyncio.Event()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        entering.set()
        try:
            if how == "entering fails":
                raise OSError("no database")
            if how == "it is stopped while it enters":
                await asyncio.Event().wait()
            seen.append(f"in after {len(bench.broker.outputs())}")
            yield
        finally:
            seen.append(f"out after {len(bench.broker.outputs())}")

    config = bench.make(None).config
    bench.source = EventSource(config, lifespan=lifespan)
    bench.source.register_event_type(Named, forward)
    running = bench.begin("a", "b")
    if how == "entering fails":
        with pytest.raises(StreamsError, match=r"group g does not start.*no database"):
            await running
    else:
        await asyncio.wait_for(entering.wait(), PATIENCE)
        if len(happened) == 2:
            await bench.until(lambda: bench.broker.outputs() == ["a", "b"], "it works")
        await (bench.cancel() if how == "it is cancelled" else bench.stop())
    assert seen == happened
    assert hasattr(bench.connections.membership, "_deliver") == (len(happened) == 2), "else nobody joins the group"


# -- what must not be disturbed ----------------------------------------------------------------------------------------


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
    built: list[Slot] = []
    opened: list[Slot] = []

    async def reopen(slot: Slot, topics: Any, *, may_open: Any) -> None:
        built.append(slot)
        await may_open()
        opened.append(slot)

    monkeypatch.setattr(Slot, "reopen", reopen)
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
    group.group_metadata = GroupMetadata(1, 2, "n")
    group._deliver(Lost(1, "test"))
    await bench.until(lambda: not engine.workers, "it is lost")
    slot = engine.slots.take()
    assert slot is not None
    engine.slots.replace(slot)
    await bench.until(lambda: len(built) == 4, "another one is built")
    assert len(opened) == 3
    group._assign()
    await bench.until(lambda: len(opened) == 4, "it is opened, now that the name is ours")
