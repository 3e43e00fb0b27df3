"""Interjections over a broker in memory: they always resolve, wherever they are asked for, and nobody starves."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from streams import EventContext, EventSource, MissedRuns
from streams.errors import MembershipLost, NotOwned, RegistrationError, Stopped, WouldDeadlock
from streams.outcomes import SKIP
from tests.unit.runtime_kit import MISSING, OUT, TABLE, Bench, Named, Producer, Unforgiving, count
from tests.unit.waiting import PATIENCE


class Gated:
    """A handler of events and interjections that waits until it may go on."""

    def __init__(self) -> None:
        self.begun = 0
        self.gate = asyncio.Event()

    async def __call__(self, ctx: EventContext[Any], event: Named | None = None) -> int:
        self.begun += 1
        await self.gate.wait()
        return self.begun


def look(ctx: EventContext[Any]) -> str:
    return "seen"


@pytest.mark.parametrize("store", [TABLE, Unforgiving])
async def test_what_is_queued_outlives_a_restart(bench: Bench, store: Any) -> None:
    """An event's records are refused (or it cannot be undone), so that the partition starts again."""
    gated = Gated()

    async def handler(ctx: EventContext[Any], event: Named) -> None:
        if event.name == "bad":
            await gated(ctx)
            count(ctx, "trace")
            ctx.forward(MISSING, event)
        else:
            ctx.forward(OUT, event)

    source = bench.make(handler, store=store, on_error=SKIP)
    bench.begin("bad")
    await bench.until(lambda: gated.begun == 1, "the event runs")
    asked = [asyncio.create_task(source.interject(0, lambda ctx, n=n: count(ctx, "i") + 10 * n)) for n in range(3)]
    await bench.until(lambda: len(bench.engine.workers[0].inbox._interjections) == 3, "asked")
    gated.gate.set()
    assert await asyncio.wait_for(asyncio.gather(*asked), PATIENCE) == [1, 12, 23], "each once, in their order"
    bench.broker.send("good")
    await bench.until(lambda: bench.broker.outputs() == ["good"], "it goes on")


async def test_one_that_runs_when_its_partition_restarts_begins_anew(bench: Bench) -> None:
    gated = Gated()

    def handler(ctx: EventContext[Any], event: Named) -> None:
        ctx.forward(MISSING, event)

    source = bench.make(handler, on_error=SKIP)
    await bench.start()
    running = asyncio.create_task(source.interject(0, gated))
    await bench.until(lambda: gated.begun == 1, "it runs")
    bench.broker.send("refused")
    worker = bench.engine.workers[0]
    await bench.until(lambda: worker.inbox, "the event waits behind it")
    bench.engine.partitions._begin_restart(worker, worker.failures, settle=False)  # as for any event that is refused
    late = asyncio.create_task(source.interject(0, look))
    await bench.until(lambda: gated.begun == 2, "it runs again")
    gated.gate.set()
    assert await asyncio.wait_for(running, PATIENCE) >= 2, "and once more if a restart came before its proof"
    assert await asyncio.wait_for(late, PATIENCE) == "seen", "asked for during the restart"


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
async def test_a_look_is_answered_with_a_proof(bench: Bench, known: bool) -> None:
    """The group's answer to a heartbeat, one for all that wait; else an empty transaction, which the group fences."""
    source = bench.make(lambda ctx, event: None, partitions=2)
    await bench.start()
    group = bench.connections.membership
    group.knows_us = known
    assert await asyncio.gather(*(source.interject(0, look) for _ in range(50))) == ["seen"] * 50
    assert 1 <= group.heartbeats <= 10
    assert bench.broker.offsets == ({} if known else {0: 0})
    assert (bench.broker.reached(0), bench.broker.reached(1)) == (None if known else 0, None)


async def test_a_look_between_offsets_and_commit_is_no_part_of_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group has let the transaction pass before the look: that proves nothing about the look."""
    source = bench.make(lambda ctx, event: None)
    await bench.start()
    committing, go_on = threading.Event(), threading.Event()

    really = Producer.commit

    def commit(producer: Producer, timeout_seconds: float) -> None:
        committing.set()
        assert go_on.wait(PATIENCE)
        really(producer, timeout_seconds)

    monkeypatch.setattr(Producer, "commit", commit)
    changing = asyncio.create_task(source.interject(0, lambda ctx: count(ctx, "n")))
    await asyncio.to_thread(committing.wait, PATIENCE)
    looking = asyncio.create_task(source.interject(0, look))
    await bench.until(lambda: bench.connections.membership.heartbeats == 1, "a proof of its own")
    assert not looking.done(), "what it saw is not committed yet"
    go_on.set()
    assert (await changing, await asyncio.wait_for(looking, PATIENCE)) == (1, "seen")


@pytest.mark.parametrize("how", ["stop", "halt", "lost", "cancel"])
async def test_they_resolve_when_the_partition_goes(bench: Bench, how: str) -> None:
    """Running ones and queued ones, also those of other threads."""
    gated = Gated()
    source = bench.make(gated)  # type: ignore[arg-type]
    await bench.start()
    asked: list[Any] = [asyncio.create_task(source.interject(0, gated)) for _ in range(2)]
    await bench.until(lambda: gated.begun == 1, "the first runs")
    asked += [asyncio.wrap_future(source.interject_threadsafe(0, gated)) for _ in range(2)]
    await bench.until(lambda: len(bench.engine.workers[0].inbox._interjections) == 3, "asked")
    if how == "stop":
        stopping = asyncio.create_task(source.stop())
        await bench.until(lambda: all(one.done() for one in asked[1:]), "those behind it")
        gated.gate.set()
        assert await asyncio.wait_for(asked[0], PATIENCE) == 1
        await stopping
        asked = asked[1:]
    elif how == "halt":
        source.stop_now()
        late = source.interject_threadsafe(0, look)  # the loop has no time for it any more, or just so
        await asyncio.wait(bench.tasks)
        assert isinstance(late.exception(0), NotOwned | MembershipLost | Stopped)
    elif how == "lost":
        bench.connections.membership.lose_and_rejoin()
    else:
        await bench.cancel()
    done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE)
    assert all(isinstance(error, NotOwned | MembershipLost | Stopped) for error in done), done


async def test_who_is_cancelled_before_it_began_has_not_asked(bench: Bench) -> None:
    gated = Gated()
    source = bench.make(gated)  # type: ignore[arg-type]
    await bench.start()
    first = asyncio.create_task(source.interject(0, gated))
    await bench.until(lambda: gated.begun == 1, "it runs")
    second = asyncio.create_task(source.interject(0, lambda ctx: count(ctx, "i")))
    third = asyncio.create_task(source.interject(0, lambda ctx: count(ctx, "i")))
    await bench.until(lambda: len(bench.engine.workers[0].inbox._interjections) == 2, "asked")
    second.cancel()
    await asyncio.wait([second])
    gated.gate.set()
    assert await asyncio.wait_for(third, PATIENCE) == 1
    assert await first == 1


@pytest.mark.parametrize("place", ["handler", "turn", "interjection", "all"])
async def test_waiting_for_oneself_is_refused(bench: Bench, place: str) -> None:
    met: list[BaseException | None] = []
    source: EventSource[Any] = bench.make(None, partitions=2)

    async def ask(*_: Any) -> None:
        assert await source.interject(1, look) == "seen", "another partition may be waited for"
        try:
            await (source.interject_all(look) if place == "all" else source.interject(0, look))
        except WouldDeadlock as error:
            met.append(error)

    async def ahead(ctx: EventContext[Any], event: Named) -> None:
        await source.interject(0, look)  # nobody waits for this one yet
        await ctx.turn()
        await ask()

    if place == "turn":
        source.register_event_type(Named, ahead, concurrency=2)
    else:
        source.register_event_type(Named, lambda ctx, event: ask())
    await bench.start()
    if place == "interjection":
        await source.interject(0, ask)
    else:
        bench.broker.send("a")
    await bench.until(lambda: len(met) == 1, "it is told")
    assert "in[0]" in str(met[0])
    assert await source.interject(0, look) == "seen", "and all goes on"


async def test_of_all_partitions_some_may_fail(bench: Bench) -> None:
    source = bench.make(lambda ctx, event: None, partitions=3)

    def handler(ctx: EventContext[Any]) -> int:
        count(ctx, "runs")
        if ctx.topic_partition.partition == 1:
            raise KeyError("not here")
        return ctx.topic_partition.partition

    await bench.start()
    with pytest.raises(ExceptionGroup, match="1 of 3") as raised:
        await source.interject_all(handler)
    assert raised.value.exceptions[0].__notes__ == ["in the interjection of in[1]"]
    found = await source.interject_all(handler, return_exceptions=True)
    assert (list(found), found[0], found[2], type(found[1])) == ([0, 1, 2], 0, 2, KeyError)
    assert await source.interject_all(lambda ctx: ctx.store.get("runs", 0)) == {0: 2, 1: 0, 2: 2}


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
        return count(ctx, "n")

    source.schedule_interjection(slow, every=0.01, blocking=True)
    await bench.start()
    assert await source.interject(0, slow, blocking=True) >= 1
    await bench.until(lambda: len(names) >= 3, "scheduled ones, too")
    assert threading.current_thread().name not in names


async def test_nobody_starves(bench: Bench) -> None:
    """A flood of interjections, one of events, and a line that does not move: all of them come forward."""
    stuck = asyncio.Event()
    source: EventSource[Any] = bench.make(None, partitions=2)

    @source.register_event_type(Named, concurrency=2)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        if event.name == "stuck":
            await stuck.wait()
        await ctx.turn()
        ctx.forward(OUT, event)

    runs, answers = [0, 0], 0
    source.schedule_interjection(
        lambda ctx: runs.__setitem__(ctx.topic_partition.partition, runs[ctx.topic_partition.partition] + 1),
        every=1e-5,
        missed=MissedRuns.CATCH_UP,
    )
    await bench.start()

    async def flood(partition: int) -> None:
        nonlocal answers
        while not flooded.is_set():
            await source.interject(partition, look)
            answers += 1

    flooded = asyncio.Event()
    bench.broker.send("stuck", partition=1)
    floods = [asyncio.create_task(flood(partition)) for partition in (0, 1) for _ in range(20)]
    bench.broker.send(*[f"e{number}" for number in range(500)], partition=0)
    await bench.until(lambda: bench.broker.reached(0) == 500, "events beside interjections")
    before, ran = answers, list(runs)
    await bench.until(lambda: answers > before + 100, "interjections, of the stuck line, too")
    await bench.until(lambda: runs[0] > ran[0] and runs[1] > ran[1], "scheduled ones, too")
    flooded.set()
    await asyncio.wait(floods)
    stuck.set()
    await bench.until(lambda: bench.broker.reached(1) == 1, "the line moves on")
