"""How long a partition's worker holds the loop, and the threads of its blocking handlers."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import EventContext, EventSourceConfig, ExecutionState, Table, event_type
from streams.core.router import Route, Router
from streams.events import event_type_of
from streams.outcomes import STOP
from streams.records import IncomingRecord, TopicPartition
from streams.runtime.bridge import Worker
from streams.runtime.ownership.replicas import Replica
from streams.runtime.partition.handler_threads import HandlerThreads
from streams.runtime.partition.hot_path import LONGEST_SLICE_SECONDS, SLICE
from streams.runtime.partition.worker import PartitionWorker
from tests.unit.waiting import PATIENCE


@event_type("Tick")
class Tick(msgspec.Struct, frozen=True):
    """Tells its handler how many seconds of the loop to take."""

    takes: float = 0.0


class Bench:
    """A partition's worker whose engine only counts: the clock goes on in handlers alone."""

    def __init__(self) -> None:
        self.now = 100.0
        self.handled: list[int] = []
        self.slices: list[int] = []
        self.is_full = False
        config = EventSourceConfig(group_id="g", topic="t", num_partitions=1)
        router = Router()
        router.add(Route("Tick", event_type_of(Tick), self._handle, blocking=False, policy=STOP))
        engine: Any = SimpleNamespace(
            config=config,
            router=router,
            schedules=(),
            rng=random.Random(1),
            input=SimpleNamespace(handled=lambda *_: None, pause=lambda _: None, resume=lambda _: None),
            message_limit=1_000,
            now=lambda: self.now,
            pool=self,
        )
        self.worker = PartitionWorker(engine, 0, 1)
        self.worker.adopt(Replica(0, 1, Table.factory(key=str, value=int)(TopicPartition("t", 0)), 0.0))

    def _handle(self, ctx: EventContext[Any], event: Tick) -> ExecutionState:
        self.now += event.takes
        self.handled.append(ctx.offset)
        return ExecutionState.COMPLETE

    def admit(self, *_: Any, events: int = 1) -> None: ...

    def pump(self) -> None:
        """Called once per slice."""
        self.slices.append(len(self.handled) - sum(self.slices))

    async def handle(self, *seconds: float) -> list[int]:
        """The sizes of the slices in which events that take so long are handled."""
        self.slices, before = [], len(self.handled)
        described = event_type_of(Tick)
        records = [
            IncomingRecord("t", 0, before + number, None, described.encode(Tick(takes)), described.headers)
            for number, takes in enumerate(seconds)
        ]
        self.handled, handled = [], self.handled
        self.worker.inbox.add(records, 0)
        await self.worker.handle(self.worker.inbox.take())
        assert self.handled == [record.offset for record in records]
        self.handled = handled + self.handled
        return self.slices


async def test_slices_of_quick_handlers_grow() -> None:
    slices = await Bench().handle(*[0.0] * 1_000)
    assert slices[0] < SLICE, "nobody knows yet what the handlers take"
    assert SLICE in slices
    assert slices == sorted(slices[:-1]) + slices[-1:]
    assert len(slices) < 15


@pytest.mark.parametrize("takes", [0.02, 0.05, 1.0])
async def test_slices_of_slow_handlers_shrink_to_one_event(takes: float) -> None:
    """Commits and other partitions wait for one of them, not for a hundred."""
    bench = Bench()
    await bench.handle(*[0.0] * 1_000)
    slices = await bench.handle(*[takes] * 400)
    assert max(slices) == SLICE, "the first one comes unexpected"
    assert slices[8:] == [1] * len(slices[8:])
    assert await bench.handle(*[takes] * 5) == [1] * 5, "it is remembered from batch to batch"


async def test_slices_take_about_so_long() -> None:
    """Handlers of a fifth of the longest slice: neither one by one nor by the hundred."""
    bench = Bench()
    slices = await bench.handle(*[LONGEST_SLICE_SECONDS / 5] * 600)
    settled = slices[5:-1]
    assert min(settled) >= 2
    assert max(settled) <= 10, "not more than twice as long"
    assert max(await bench.handle(*[0.0] * 1_000)) == SLICE, "and they grow again"


@pytest.fixture
def threads() -> Iterator[HandlerThreads]:
    made = HandlerThreads(Worker)
    yield made
    made.close()


async def test_one_thread_for_each_partition(threads: HandlerThreads) -> None:
    first = await threads.call(0, threading.get_ident)
    assert await threads.call(0, threading.get_ident) == first
    assert await threads.call(1, threading.get_ident) not in (first, threading.get_ident())


async def test_a_call_that_fails_keeps_its_thread(threads: HandlerThreads) -> None:
    first = await threads.call(0, threading.get_ident)
    with pytest.raises(ZeroDivisionError):
        await threads.call(0, lambda: 1 // 0)
    assert await threads.call(0, threading.get_ident) == first


async def test_nobody_waits_behind_a_call_that_was_given_up(threads: HandlerThreads) -> None:
    """Its thread ends when the call comes back, if ever."""
    begun, go = threading.Event(), threading.Event()
    ran_on: list[threading.Thread] = []

    def hangs() -> None:
        ran_on.append(threading.current_thread())
        begun.set()
        go.wait(PATIENCE)

    call = asyncio.create_task(threads.call(0, hangs))
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    call.cancel()
    await asyncio.wait([call])
    later = asyncio.wait_for(threads.call(0, threading.current_thread), PATIENCE / 2)
    assert await later is not ran_on[0]
    assert not go.is_set()
    go.set()
    await asyncio.to_thread(ran_on[0].join, PATIENCE)
    assert not ran_on[0].is_alive()
    assert await threads.call(0, lambda: 1) == 1, "the new one stays"


async def test_a_cancelled_call_leaves_the_threads_of_others_alone(threads: HandlerThreads) -> None:
    begun, go = threading.Event(), threading.Event()
    other = await threads.call(1, threading.get_ident)
    call = asyncio.create_task(threads.call(0, lambda: (begun.set(), go.wait(PATIENCE))))
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    call.cancel()
    await asyncio.wait([call])
    assert await threads.call(1, threading.get_ident) == other
    go.set()
