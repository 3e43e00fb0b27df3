"""Interjections: they always resolve, wherever they are asked for, and nobody starves."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from streams import EventContext, EventSource, MissedRuns
from streams.errors import MembershipLost, NotOwned, RegistrationError, Stopped, WouldDeadlock
from streams.kafka.questions.takeover import WireTakeOver
from streams.outcomes import SKIP
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse
from tests.unit.handlers_kit import OUT, config, driven, send
from tests.unit.runtime_kit import Bench
from tests.unit.waiting import PATIENCE
from tests.vocabulary import MISDEEDS, TOTALS, Added, Totals, Words, count, touch

GONE = (NotOwned, MembershipLost, Stopped)


def look(ctx: EventContext[Any]) -> str:
    return "seen"


def add(ctx: EventContext[Totals]) -> int:
    touch(ctx, "i")
    return ctx.store.get("i", 0)


async def slowly(ctx: EventContext[Any]) -> str:
    await elapse(5.0)
    return "done"


def ask(driver: TestDriver[Any], *handlers: Callable[..., Any], partition: int = 0) -> list[asyncio.Task[Any]]:
    """Begin to ask for these interjections, in this order."""
    source = driver._world.members[0].source

    async def begin() -> list[asyncio.Task[Any]]:
        tasks = [asyncio.create_task(source.interject(partition, handler)) for handler in handlers]
        await asyncio.wait(tasks, timeout=0.1)
        return tasks

    return driver._run(begin())


def beats(heard: list[str], known: bool) -> Callable[..., bool]:
    """The answer of a group to heartbeats."""

    def is_member(client: WireTakeOver, member: str, *_: Any) -> bool:
        heard.append(member)
        return known

    return is_member


def resolved(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    return [task.exception() or task.result() if not task.cancelled() else "cancelled" for task in tasks]


@pytest.mark.parametrize("refused", ["over the client's limit", "invalid topic name"], ids=["at once", "later"])
@pytest.mark.parametrize("store", [TOTALS, Words], ids=["undoes", "does not"])
def test_what_is_queued_outlives_a_restart(store: Any, refused: str) -> None:
    """An event's records are refused (or it cannot be undone), so that the partition starts again: by the client, or by
    the broker, when the interjections have run already, and run again."""
    runs: list[str] = []

    async def work(ctx: EventContext[Any], event: Added) -> None:
        await elapse(5.0 if event.deed else 0.0)
        touch(ctx, event.name)
        MISDEEDS[event.deed](ctx, OUT)

    def interjection(ctx: EventContext[Any], name: str) -> str:
        touch(ctx, "i")
        runs.append(name)
        return name

    with driven(work, on_error=SKIP, store=store) as driver:
        send(driver, "bad", deed=refused, wait=False)
        driver.advance(1)
        asked = ask(driver, *(functools.partial(interjection, name=name) for name in "abc"))
        send(driver, "good", wait=False)
        driver.settle()
        assert resolved(asked) == [*"abc"]
        assert runs == [*"abc"] or refused == "invalid topic name", "in their order"
        found = driver.store(0).words if store is Words else dict(driver.store(0).items())
        assert found == ({b"i": b"xxx", b"good": b"x"} if store is Words else {"i": 3, "good": 1}), "each once"
        driver.check()


def test_one_that_runs_when_its_partition_restarts_begins_anew() -> None:
    begun: list[float] = []

    async def interjection(ctx: EventContext[Any]) -> str:
        begun.append(driver.now)
        return await slowly(ctx)

    with driven(count, on_error=SKIP) as driver:
        first = ask(driver, interjection)
        engine = driver._world.members[0].engine
        assert engine is not None
        worker = engine.workers[0]
        send(driver, "a", wait=False)
        driver.advance(1.0)
        restart = functools.partial(engine.partitions._begin_restart, worker, worker.failures, settle=False)
        driver._world.loop.call_soon(restart)  # as for any event that is refused
        late = ask(driver, look)
        driver.settle()
        assert resolved(first + late) == ["done", "seen"], "also what was asked for during the restart"
        assert len(begun) == 2
        assert dict(driver.store(0).items()) == {"a": 1}


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_look_is_answered_with_a_proof(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's answer to a heartbeat, one for all that wait; else an empty transaction, which the group fences."""
    heartbeats: list[str] = []
    monkeypatch.setattr(WireTakeOver, "is_member", beats(heartbeats, known))
    with driven(count, partitions=2) as driver:
        before = driver._world.broker.log(driver._world.config.changelog, 0).end
        assert resolved(ask(driver, *[look] * 50)) == ["seen"] * 50
        driver.settle()
        assert 1 <= len(heartbeats) <= 10
        assert (driver._world.broker.log(driver._world.config.changelog, 0).end == before) == known


def test_a_look_between_offsets_and_commit_is_no_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group has let the transaction pass before the look: that proves nothing about the look."""
    heartbeats: list[str] = []
    monkeypatch.setattr(WireTakeOver, "is_member", beats(heartbeats, True))
    with driven(count) as driver:
        looks: list[asyncio.Task[Any]] = []

        def look_now(member: int) -> None:
            looks.append(driver._world.loop.create_task(driver._world.members[0].source.interject(0, look)))

        driver.at("send_offsets.after", look_now)
        seen_at_commit = driver.at("commit.after", lambda member: states.append(looks[0].done()))
        states: list[bool] = []
        changing = ask(driver, add)
        driver.settle()
        assert (resolved(changing + looks), seen_at_commit.sprung) == ([1, "seen"], 1)
        assert (states, len(heartbeats)) == ([False], 1), "a proof of its own, and not before what it saw is committed"


def test_who_is_cancelled_before_it_began_has_not_asked() -> None:
    with driven(count) as driver:
        first, second, third = ask(driver, slowly, add, add)
        driver._world.loop.call_soon(second.cancel)
        driver.settle()
        driver.advance(10)
        assert resolved([first, second, third]) == ["done", "cancelled", 1]


@pytest.mark.parametrize("place", ["handler", "turn", "interjection", "all"])
def test_waiting_for_oneself_is_refused(place: str) -> None:
    met: list[BaseException] = []
    source: EventSource[Any] = EventSource(config(2), TOTALS)

    async def deadlock(ctx: EventContext[Any], *_: Any) -> None:
        running = driver._world.members[0].source
        assert await running.interject(1, look) == "seen", "another partition may be waited for"
        try:
            await (running.interject_all(look) if place == "all" else running.interject(0, look))
        except WouldDeadlock as error:
            met.append(error)

    async def ahead(ctx: EventContext[Any], event: Added) -> None:
        await driver._world.members[0].source.interject(0, look)  # nobody waits for this one yet
        await ctx.turn()
        await deadlock(ctx)

    if place == "turn":
        source.register_event_type(Added, ahead, concurrency=2)
    else:
        source.register_event_type(Added, deadlock)
    with TestDriver(source) as driver:
        if place == "interjection":
            driver.interject(0, deadlock)
        else:
            driver.send(Added("a"), partition=0)
        assert ["in[0]" in str(error) for error in met] == [True]
        assert driver.interject(0, look) == "seen", "and all goes on"


def test_of_all_partitions_some_may_fail() -> None:
    def handler(ctx: EventContext[Totals]) -> int:
        add(ctx)
        if ctx.topic_partition.partition == 1:
            raise KeyError("not here")
        return ctx.topic_partition.partition

    with driven(count, partitions=3) as driver:
        source = driver._world.members[0].source
        with pytest.raises(ExceptionGroup, match="1 of 3") as raised:
            driver._run(source.interject_all(handler))
        assert raised.value.exceptions[0].__notes__ == ["in the interjection of in[1]"]
        found = driver._run(source.interject_all(handler, return_exceptions=True))
        assert (list(found), found[0], found[2], type(found[1])) == ([0, 1, 2], 0, 2, KeyError)
        assert driver._run(source.interject_all(lambda ctx: ctx.store.get("i", 0))) == {0: 2, 1: 0, 2: 2}


def test_nobody_starves() -> None:
    """A flood of interjections, one of events, and a line that does not move: all of them come forward."""
    runs, answers = [0, 0], [0, 0]
    source: EventSource[Any] = EventSource(config(2), TOTALS)

    @source.register_event_type(Added, concurrency=2)
    async def handler(ctx: EventContext[Any], event: Added) -> None:
        await elapse(0.8 if event.deed == "stuck" else 0.0)
        await ctx.turn()
        count(ctx, event)

    def scheduled(ctx: EventContext[Any]) -> None:
        runs[ctx.topic_partition.partition] += 1

    source.schedule_interjection(scheduled, every=1e-3, missed=MissedRuns.CATCH_UP)
    with TestDriver(source) as driver:

        async def flood(partition: int) -> None:
            while driver.now < 0.4:
                await driver._world.members[0].source.interject(partition, look)
                answers[partition] += 1

        driver.send(Added("s", deed="stuck"), partition=1, wait=False)
        for number in range(200):
            driver.send(Added(f"e{number}"), partition=0, wait=False)

        async def floods() -> None:
            await asyncio.gather(*(flood(partition) for partition in (0, 1) for _ in range(20)))

        driver._run(floods())
        assert driver.committed_offsets() == {0: 200}, "events beside interjections"
        assert min(answers) > 100, "interjections, of the stuck line, too"
        assert min(runs) > 100, "scheduled ones, too"
        driver.advance(1)
        assert driver.committed_offsets() == {0: 200, 1: 1}, "the line moves on"


# -- threads, and ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stop", "halt", "lost", "cancel"])
async def test_they_resolve_when_the_partition_goes(bench: Bench, how: str) -> None:
    """Running ones and queued ones, also those of other threads."""
    begun, gate = asyncio.Event(), asyncio.Event()

    async def gated(ctx: EventContext[Any]) -> int:
        begun.set()
        await gate.wait()
        return 1

    source = bench.make(lambda ctx, event: None)
    await bench.start()
    asked: list[Any] = [asyncio.create_task(source.interject(0, gated)) for _ in range(2)]
    await asyncio.wait_for(begun.wait(), PATIENCE)
    asked += [asyncio.wrap_future(source.interject_threadsafe(0, gated)) for _ in range(2)]
    await bench.until(lambda: len(bench.engine.workers[0].inbox._interjections) == 3, "asked")
    if how == "stop":
        stopping = asyncio.create_task(source.stop())
        await bench.until(lambda: all(one.done() for one in asked[1:]), "those behind it")
        gate.set()
        assert await asyncio.wait_for(asked[0], PATIENCE) == 1
        await stopping
        asked = asked[1:]
    elif how == "halt":
        source.stop_now()
        late = source.interject_threadsafe(0, look)  # the loop has no time for it any more, or just so
        await asyncio.wait(bench.tasks)
        assert isinstance(late.exception(0), GONE)
    elif how == "lost":
        bench.connections.membership.lose_and_rejoin()
    else:
        await bench.cancel()
    done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE)
    assert all(isinstance(error, GONE) for error in done), done


async def test_from_other_threads_and_loops(bench: Bench) -> None:
    source = bench.make(lambda ctx, event: None)
    with pytest.raises(Stopped):
        source.interject_threadsafe(0, look)
    await bench.start()
    answer = await asyncio.to_thread(lambda: source.interject_threadsafe(0, look).result(PATIENCE))
    assert answer == "seen"
    with pytest.raises(NotOwned):
        await asyncio.to_thread(lambda: source.interject_threadsafe(7, look).result(PATIENCE))

    async def elsewhere() -> Any:
        with pytest.raises(RegistrationError, match="interject_threadsafe"):
            await source.interject(0, look)
        return await asyncio.wrap_future(source.interject_threadsafe(0, look))

    assert await asyncio.to_thread(lambda: asyncio.run(elsewhere())) == "seen"


async def test_who_asks_from_a_thread_at_the_very_end(bench: Bench) -> None:
    """The loop does not come to it any more, or is closed."""
    made: list[Any] = []
    source = bench.make(lambda ctx, event: None)

    async def run() -> None:
        running = bench.run()
        await bench.until_active()
        asked = bench.engine.ad_hoc
        close = asked.close

        def ask_and_close() -> None:
            late = asked.interject_threadsafe(0, look, blocking=False)
            close()
            made.extend([asked, late.done()])

        asked.close = ask_and_close  # type: ignore[method-assign]
        source.stop_now()
        await running

    await asyncio.to_thread(lambda: asyncio.run(run()))
    bench.tasks.clear()
    assert made[1], "told at once"
    after = made[0].interject_threadsafe(0, look, blocking=False)
    assert after.done()
    with pytest.raises(Stopped):
        after.result(0)


async def test_on_a_thread_of_the_partition(bench: Bench) -> None:
    source = bench.make(lambda ctx, event: None)
    names: list[str] = []

    def slow(ctx: EventContext[Any]) -> int:
        names.append(threading.current_thread().name)
        return add(ctx)

    source.schedule_interjection(slow, every=0.01, blocking=True)
    await bench.start()
    assert await source.interject(0, slow, blocking=True) >= 1
    await bench.until(lambda: len(names) >= 3, "scheduled ones, too")
    assert threading.current_thread().name not in names
