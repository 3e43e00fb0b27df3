"""Flags that tasks wait for: nobody misses a change, and nobody is woken for another one's end."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest

from streams.runtime.signal import Broadcast, Signal


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
