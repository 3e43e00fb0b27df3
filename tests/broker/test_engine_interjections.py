"""Interjections against a real broker: scheduled and asked for, committed when they return, and how they end badly."""

from __future__ import annotations

import asyncio
import itertools
import time
from datetime import timedelta

import pytest

from streams import EventContext, PoolConfig, SourceState
from streams.errors import MembershipLost, NotOwned, RegistrationError, Stopped
from streams.testing.faults import KafkaProxy
from tests.broker.engine_kit import PATIENCE, Lab, Running, raised_by, source_of, until
from tests.vocabulary import Total, Totals

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]

PARTITIONS = 2


def tell(lab: Lab, name: str = "told", amount: int = 1) -> object:
    """An interjection with one output and one change."""

    def interjection(ctx: EventContext[Totals]) -> None:
        assert ctx.is_interjection
        assert (ctx.input, ctx.offset) == (None, -1)
        ctx.store.put(name, amount)
        ctx.forward(lab.output, Total(name, amount), key=name)

    return interjection


async def test_awaiting_means_committed(lab: Lab) -> None:
    """On a partition that was never read: visible to ``read_committed`` at once, and fenced by an offset (rule R1)."""
    await lab.create()
    source = source_of(lab)
    async with Running(source):
        await source.interject(1, tell(lab))
        assert await lab.totals() == [("told", 1)]
        assert await lab.counts(1) == {"told": 1}
        assert await lab.committed() == {1: 0}, "a transaction of interjections alone sends an offset too"
        assert await lab.changelog_offset(1) == 0
        await source.interject(1, tell(lab, "again", 2))
        assert await lab.totals() == [("again", 2), ("told", 1)] or len(await lab.records()) == 2
    await lab.check_settled()
    again = source_of(lab)
    async with Running(again) as run:
        seen: list[dict[str, int]] = []
        await again.interject(1, lambda ctx: seen.append(dict(ctx.store.items())))
        assert seen == [{"told": 1, "again": 2}]
        await lab.add("a", partition=1)
        await run.until_handled(0, 1)


async def test_many_at_once(lab: Lab) -> None:
    """All are committed, each once, in the order in which they were asked for."""
    await lab.create()
    source = source_of(lab, pool=PoolConfig(target_batch_size=5, max_batch_size=10))

    def count(ctx: EventContext[Totals]) -> None:
        number = ctx.store.get("n", 0) + 1
        ctx.store.put("n", number)
        ctx.forward(lab.output, Total("n", number), key="n")

    async with Running(source):
        await asyncio.gather(*(source.interject(0, count) for _ in range(100)))
        assert await lab.totals() == [("n", number) for number in range(1, 101)]


@pytest.mark.parametrize("membership", ["streams", "librdkafka"])
async def test_a_look_at_an_evicted_member_is_never_answered_from_old_state(lab: Lab, membership: str) -> None:
    """Cut off for longer than its session while another one takes over: it knows of nothing, and its loop goes on."""
    await lab.create()
    quick = {"session_timeout_seconds": 2.0, "transaction_timeout_seconds": 1.6}
    quick |= {"membership": membership, "strategy": "incremental" if membership == "streams" else "range"}
    with KafkaProxy(lab.bootstrap) as proxy:
        first, second = source_of(lab, bootstrap_servers=proxy.bootstrap_servers, **quick), source_of(lab, **quick)
        async with Running(first):
            await first.interject(0, lambda ctx: ctx.store.put("balance", 1))
            assert await first.interject(0, lambda ctx: ctx.store.get("balance")) == 1
            proxy.cut_off()
            async with Running(second):
                await second.interject(0, lambda ctx: ctx.store.put("balance", 100))
                asked = asyncio.create_task(first.interject(0, lambda ctx: ctx.store.get("balance")))
                await asyncio.wait([asked], timeout=0.5)
                proxy.clear()
                (answer,) = await asyncio.wait_for(asyncio.gather(asked, return_exceptions=True), PATIENCE)
                assert isinstance(answer, NotOwned | MembershipLost) or answer == 100, answer


async def test_not_owned_and_stopped(lab: Lab) -> None:
    await lab.create()
    source = source_of(lab)
    assert isinstance(await raised_by(source.interject(0, tell(lab))), Stopped)
    async with Running(source):
        for partition in (2, -1, 99):
            assert isinstance(await raised_by(source.interject(partition, tell(lab))), NotOwned)
        await source.interject(0, tell(lab))
    assert isinstance(await raised_by(source.interject(0, tell(lab))), Stopped)
    assert isinstance(await raised_by(source.interject_all(tell(lab))), Stopped)
    assert len(await lab.records()) == 1


async def test_at_the_drain(lab: Lab) -> None:
    """What runs when the source stops is committed, what waits behind it is told so; nobody waits for ever."""
    await lab.create()
    source = source_of(lab)
    started, stopping = asyncio.Event(), asyncio.Event()

    async def slow(ctx: EventContext[Totals]) -> None:
        started.set()
        await stopping.wait()
        await asyncio.sleep(0.3)
        ctx.store.put("slow", 1)

    async with Running(source):
        running = asyncio.create_task(source.interject(0, slow))
        await started.wait()
        waiting = asyncio.create_task(source.interject(0, tell(lab)))
        await asyncio.sleep(0)
        stop = asyncio.create_task(source.stop())
        await until(lambda: source.state is SourceState.STOPPING, "it stops")
        stopping.set()
        await stop
        await asyncio.wait_for(running, PATIENCE)
        error = await raised_by(waiting)
        assert isinstance(error, NotOwned | Stopped), repr(error)
    assert await lab.counts() == {"slow": 1}
    assert await lab.records() == []
    await lab.check_settled(lab.topic, lab.output)


async def test_cut_off_by_stop_now(lab: Lab) -> None:
    await lab.create()
    source = source_of(lab)
    started = asyncio.Event()

    async def endless(ctx: EventContext[Totals]) -> None:
        ctx.store.put("trace", 1)
        started.set()
        await asyncio.sleep(3600)

    async with Running(source) as run:
        running = asyncio.create_task(source.interject(0, endless))
        await started.wait()
        source.stop_now()
        error = await raised_by(running)
        assert not isinstance(error, asyncio.TimeoutError), "nobody waits for ever"
        await asyncio.wait_for(run.task, PATIENCE)
    assert await lab.counts() == {}


async def test_scheduled(lab: Lab) -> None:
    """Every partition, at its pace, within its order and transaction; missed runs are not made up for."""
    await lab.create()
    source = source_of(lab)
    ran: dict[int, list[float]] = {0: [], 1: []}

    @source.schedule_interjection(every=timedelta(milliseconds=200), jitter=0.02)
    def report(ctx: EventContext[Totals]) -> None:
        partition = ctx.topic_partition.partition
        ran[partition].append(time.monotonic())
        ctx.store.put("runs", len(ran[partition]))
        if len(ran[0]) == 3 and partition == 0:
            time.sleep(0.5)  # the loop stands still: two beats are missed

    async with Running(source) as run:
        await run.until(lambda: min(map(len, ran.values())) >= 8, "eight runs each")
        with pytest.raises(RegistrationError, match="too late"):
            source.schedule_interjection(report, every=1)
    for partition, times in ran.items():
        assert await lab.counts(partition) == {"runs": len(times)}
        gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
        assert sum(gaps) >= 0.2 * (len(gaps) - 1) - 0.1, "no faster than asked for, though the first may come late"
        # After each time in which the loop stood still the next beat may be near; a second one near it was missed.
        assert not any(max(pair) < 0.1 for pair in itertools.pairwise(gaps)), f"missed runs are made up for: {gaps}"
    assert await lab.committed() == {0: 0, 1: 0}
    await lab.check_settled()
