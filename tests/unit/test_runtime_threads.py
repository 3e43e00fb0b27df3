"""The doors between threads and the loop, calls that come back too late, and flags that tasks wait for."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from streams.errors import Stopped, StreamsError
from streams.metrics import CallAbandoned, Measurement
from streams.runtime.bridge import Inlet, Worker
from streams.runtime.signal import Broadcast, Signal
from streams.runtime.transactions import hung_calls
from streams.runtime.transactions.hung_calls import HungCalls
from tests.unit.waiting import PATIENCE


@pytest.fixture
def worker() -> Any:
    made = Worker("test")
    yield made
    made.abandon()


async def test_calls_run_on_one_thread_in_order(worker: Worker) -> None:
    ran: list[tuple[int, int]] = []

    def note(number: int) -> int:
        ran.append((number, threading.get_ident()))
        return number * 2

    worker.post(note, 0)
    assert await asyncio.gather(*(worker.call(note, number) for number in range(1, 5))) == [2, 4, 6, 8]
    assert [number for number, _ in ran] == [0, 1, 2, 3, 4]
    assert {thread for _, thread in ran} != {threading.get_ident()}
    assert len({thread for _, thread in ran}) == 1


async def test_what_a_call_raises_is_raised(worker: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda: 1 // 0)
    worker.post(lambda: 1 // 0)  # only logged
    assert await worker.call(lambda: 1) == 1


async def test_a_call_after_the_end_is_refused_and_one_before_it_is_answered(worker: Worker) -> None:
    before = asyncio.create_task(worker.call(lambda: 5))
    await anyio.lowlevel.checkpoint()
    worker.abandon()
    with pytest.raises(Stopped, match="test is closed: the call was not made"):
        await asyncio.wait_for(worker.call(lambda: 6), PATIENCE / 3)
    assert await before == 5


async def test_cancelling_ends_the_waiting_and_not_the_call(worker: Worker) -> None:
    go, done = threading.Event(), threading.Event()

    def hangs() -> None:
        go.wait(PATIENCE)
        done.set()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.call(hangs), 0.01)
    assert not done.is_set()
    go.set()
    assert await worker.call(done.is_set), "the next call waits for it"


async def test_an_inlet_keeps_the_order() -> None:
    got: list[int] = []
    all_there = asyncio.Event()

    def receive(number: int) -> None:
        got.append(number)
        if number == 99:
            all_there.set()

    inlet = Inlet(receive)
    threading.Thread(target=lambda: [inlet.put(number) for number in range(100)]).start()
    await asyncio.wait_for(all_there.wait(), PATIENCE)
    assert got == list(range(100))


def test_an_inlet_of_a_closed_loop_drops_what_comes() -> None:
    async def make() -> Inlet[int]:
        return Inlet(lambda number: pytest.fail("nobody is left to hear it"))

    asyncio.run(make()).put(1)


async def test_too_many_calls_that_hang_stop_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hung_calls, "MOST", 3)
    failures: list[StreamsError] = []
    measured: list[Measurement] = []
    hung, go = HungCalls(measured.append, failures.append), threading.Event()
    for number in range(4):
        worker = Worker("kes-hangs")
        worker.post(go.wait)
        assert not failures, f"{number} are not too many"
        hung.abandon(worker, "flush" if number else "commit_transaction")
        assert measured[-1] == CallAbandoned("flush" if number else "commit_transaction", len(hung))
    assert re.match(r"4 calls to the broker hang .*\(3 of flush, 1 of commit_transaction\)", str(failures[0]))
    go.set()
    deadline = time.monotonic() + PATIENCE
    while len(hung):
        assert time.monotonic() < deadline, "they came back"
        await asyncio.sleep(0.001)


async def waiting(*tasks: asyncio.Task[object]) -> None:
    """Let them come to where they wait, or to their ends."""
    for _ in range(3 + len(tasks)):
        await anyio.lowlevel.checkpoint()


async def test_what_is_said_is_heard_once_by_everybody_who_waits() -> None:
    """Said before, between the waking and the look, or by one of those who are woken."""
    signal = Signal()

    async def first() -> None:
        await signal.wait()
        signal.notify()  # before the others run

    signal.notify()
    signal.notify()
    assert [await signal.wait(0), await signal.wait(0)] == [True, False]
    tasks = [asyncio.create_task(signal.wait()) for _ in range(3)]
    await waiting(*tasks)
    signal.notify()
    signal.notify()
    assert await asyncio.gather(*tasks) == [True, True, True]
    assert await signal.wait(0) is False, "nobody is told twice"
    pair = [asyncio.create_task(first()), asyncio.create_task(signal.wait())]
    await waiting(*pair)
    signal.notify()
    await asyncio.gather(*pair)
    assert await signal.wait(0) is True, "a late riser does not swallow it"


async def test_waiting_ends_with_the_time() -> None:
    signal, loop = Signal(), asyncio.get_running_loop()
    began = loop.time()
    assert await signal.wait(0.02) is False
    assert loop.time() - began >= 0.015
    assert await signal.wait(-1) is False
    task = asyncio.create_task(signal.wait(60))
    await waiting(task)
    signal.notify()
    assert await task is True


@pytest.mark.parametrize("kind", [Signal, Broadcast])
async def test_who_is_cancelled_takes_nobody_along(kind: type[Signal | Broadcast]) -> None:
    flag = kind()
    one, other = asyncio.create_task(flag.wait()), asyncio.create_task(flag.wait(60))
    await waiting(one, other)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    assert not other.done()
    flag.notify()
    await other
    with anyio.move_on_after(0.01) as scope:
        await flag.wait()
    assert scope.cancelled_caught
    flag.notify()


@pytest.mark.parametrize("kind", [Signal, Broadcast])
async def test_who_is_cancelled_in_the_moment_of_the_waking_is_cancelled(kind: type[Signal | Broadcast]) -> None:
    flag = kind()
    one, other = asyncio.create_task(flag.wait()), asyncio.create_task(flag.wait())
    await waiting(one, other)
    one.cancel()
    flag.notify()
    with pytest.raises(asyncio.CancelledError):
        await one
    await other


async def test_a_broadcast_is_for_those_who_wait_at_that_moment() -> None:
    flag = Broadcast()
    flag.notify()
    tasks = [asyncio.create_task(flag.wait()), asyncio.create_task(flag.wait(60))]
    await waiting(*tasks)
    assert not any(task.done() for task in tasks), "what was said before is not for them"
    flag.notify()
    await asyncio.gather(*tasks)
    late = asyncio.create_task(flag.wait(0.01))
    await late
