"""Batches ahead of the turn, over a broker in memory: what is called when, with what, and what comes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streams import (
    AsyncBatcher,
    AsyncJobScheduler,
    BatcherConfig,
    BatchItem,
    EventContext,
    IncomingRecord,
    JobRetry,
    SchedulerConfig,
)
from streams.errors import ConfigError, RegistrationError
from streams.outcomes import DEAD_LETTER
from streams.statistics import StageStatistics
from tests.unit.runtime_kit import OUT, Bench, Named, count
from tests.unit.waiting import PATIENCE

Items = list[BatchItem[Any]]


class World:
    """What calls talk to: each ends when it is told to, by the names in it."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.calls: list[list[str]] = []
        self.running: list[list[str]] = []
        self.cancelled: list[list[str]] = []
        self.errors: dict[str, Exception] = {}
        self._gate = asyncio.Event()
        if is_open:
            self._gate.set()
        self._told: dict[int, asyncio.Event] = {}

    async def call(self, items: Items) -> list[Any]:
        names = [item.value.name for item in items]
        number = len(self.calls)
        self.calls.append(names)
        self.running.append(names)
        try:
            if not self._gate.is_set():
                await self._told.setdefault(number, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(names)
            raise
        finally:
            self.running.remove(names)
        return [self.errors.get(name, name.upper()) for name in names]

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self._told.setdefault(number, asyncio.Event()).set()

    def open(self) -> None:
        self._gate.set()
        self.end(*range(len(self.calls)))


def finalize(ctx: EventContext[Any], items: Items) -> None:
    count(ctx, "seen")
    ctx.forward(OUT, Named("+".join(item.result for item in items)), key="k")


def words(_: IncomingRecord | None, event: Named) -> list[tuple[str, Named]]:
    """An item per letter: the key is the letter before its number."""
    return [(word[0], Named(word)) for word in event.name.split()]


def batched(bench: Bench, execute: Any, *, partitions: int = 1, **settings: Any) -> AsyncBatcher[Any, Named]:
    source = bench.make(None, partitions=partitions, **settings.pop("source", {}))
    on_error = settings.pop("on_error", None)
    config = BatcherConfig(**{"max_delay_seconds": 0.0, **settings.pop("config", {})})
    batcher: AsyncBatcher[Any, Named] = AsyncBatcher(
        source, execute, settings.pop("finalizer", finalize), config=config, **settings
    )
    batcher.register_event_type(Named, words, on_error=on_error)
    return batcher


async def test_items_of_many_events_are_one_call_and_events_complete_in_order(bench: Bench) -> None:
    world = World()
    batched(bench, world.call, config={"max_batch_size": 4, "max_concurrent_batches": 2})
    bench.begin("a1 b1", "c1", "d1", "e1", "f1 g1")
    await bench.until(lambda: len(world.calls) == 2, "two calls run")
    assert world.calls == [["a1", "b1", "c1", "d1"], ["e1", "f1", "g1"]]
    world.end(1)
    await bench.until(lambda: len(world.running) == 1, "the second one is back")
    assert bench.broker.outputs() == []
    world.end(0)
    await bench.until(lambda: bench.broker.outputs() == ["A1+B1", "C1", "D1", "E1", "F1+G1"], "in order")
    assert bench.broker.offsets == {0: 5}


async def test_a_key_is_in_one_call_at_a_time_and_in_order_within_it(bench: Bench) -> None:
    world = World()
    batched(bench, world.call, config={"max_batch_size": 3, "max_concurrent_batches": 4})
    bench.begin("a1", "a2", "b1", "a3", "a4", "a5", "c1")
    await bench.until(lambda: len(world.calls) == 2, "the second call has what is not held by the first")
    assert world.calls == [["a1", "a2", "b1"], ["c1"]]
    world.open()
    await bench.committed()
    assert world.calls[2] == ["a3", "a4", "a5"]


async def test_a_bound_holds_up_its_own_partition_only(bench: Bench) -> None:
    world = World()
    batched(
        bench,
        world.call,
        partitions=2,
        config={"max_batch_size": 1, "max_queued_items": 2, "max_concurrent_batches": 8},
    )
    await bench.start()
    bench.broker.send("a1", "b1", "c1")
    await bench.until(lambda: world.calls == [["a1"], ["b1"]], "two are let in")
    bench.broker.send("z1", partition=1)
    await bench.until(lambda: ["z1"] in world.calls, "the other one goes on")
    world.end(world.calls.index(["z1"]))
    await bench.until(lambda: bench.broker.outputs() == ["Z1"], "and completes")
    assert ["c1"] not in world.calls
    world.open()
    await bench.until(lambda: bench.broker.outputs() == ["Z1", "A1", "B1", "C1"], "all done")


async def test_an_item_waits_for_company_for_so_long(bench: Bench) -> None:
    world = World(is_open=True)
    batched(bench, world.call, config={"max_delay_seconds": 3600.0, "max_batch_size": 3})
    source = bench.source
    bench.begin("a1", "b1")
    await bench.until(lambda: source.statistics().stages and source.statistics().stages[0].waiting == 2, "they wait")
    assert world.calls == []
    bench.broker.send("c1")
    await bench.committed()
    assert world.calls == [["a1", "b1", "c1"]]
    assert source.statistics().stages[0] == StageStatistics("World.call", 0, 0, 0, 1, 3.0)


async def test_events_without_items_keep_the_order(bench: Bench) -> None:
    world = World()
    source = bench.make(None)
    seen: list[int] = []

    def final(ctx: EventContext[Any], items: Items) -> None:
        seen.append(len(items))
        ctx.forward(OUT, Named(f"{ctx.offset}"), key="k")

    batcher: AsyncBatcher[Any, Named] = AsyncBatcher(source, world.call, final)

    @batcher.register_event_type(Named)
    def plan(_: IncomingRecord, event: Named) -> Any:
        return {"none": None, "empty": []}.get(event.name, (event.name, event))

    bench.begin("a", "none", "empty", "b")
    await bench.until(lambda: world.calls == [["a", "b"]], "the call runs")
    assert bench.broker.outputs() == []
    world.open()
    await bench.committed()
    assert bench.broker.outputs() == ["0", "2", "3"], "None has no finalizer, an empty list has"
    assert seen == [1, 0, 1]


BAD = {"b2": RuntimeError("b2 is bad"), "a1": RuntimeError("a1 is bad")}
ONE_BY_ONE = {"max_batch_size": 1, "max_concurrent_batches": 1}


@pytest.mark.parametrize(
    ("names", "config", "calls", "outputs", "errors"),
    [
        pytest.param(["b1 c1"], {}, [["b1", "c1"]], ["B1+C1"], [], id="at once"),
        pytest.param(
            ["b1", "c1"],
            {"max_delay_seconds": 0.05, "max_batch_size": 100},
            [["b1", "c1"]],
            ["B1", "C1"],
            [],
            id="not full after its delay",
        ),
        pytest.param(
            ["c1", "a2 b1 c2 d1 e1 f1 g1", "h1"],
            {"max_batch_size": 2, "max_queued_items": 3, "max_concurrent_batches": 1},
            [["c1"], ["a2", "b1"], ["c2", "d1"], ["e1", "f1"], ["g1"], ["h1"]],
            ["C1", "A2+B1+C2+D1+E1+F1+G1", "H1"],
            [],
            id="more items than a batch or than there is room for",  # it went in when nothing else was there
        ),
        pytest.param(
            ["c1 b1", "c2 b2", "c3 b3"],
            {},
            [["c1", "b1", "c2", "b2", "c3", "b3"]],
            ["C1+B1", "C3+B3"],
            ["c2: C2", "b2: b2 is bad"],
            id="an item that failed fails its event and no other",
        ),
        pytest.param(
            ["a1 a2 b1", "a3"],
            ONE_BY_ONE,
            [["a1"], ["b1"], ["a3"]],
            ["A3"],
            ["a1: a1 is bad", "a2: a1 is bad", "b1: B1"],
            id="its own items have a key that failed",
        ),
    ],
)
@pytest.mark.parametrize("late", [True, False], ids=["on_failure", "dead letter"])
async def test_what_is_called_and_what_comes_of_it(
    bench: Bench,
    names: list[str],
    config: Any,
    calls: list[list[str]],
    outputs: list[str],
    errors: list[str],
    late: bool,
) -> None:
    world, told = World(is_open=True), list[str]()
    world.errors.update(BAD)

    def failed(ctx: EventContext[Any], items: Items) -> None:
        told.extend(f"{item.value.name}: {item.error or item.result}" for item in items)

    policy: Any = {"on_failure": failed} if late else {"on_error": DEAD_LETTER}
    batched(bench, world.call, config=config, **policy)
    await bench.over(*names)
    assert sorted(world.calls) == sorted(calls)
    assert bench.broker.outputs() == outputs
    assert told == (errors if late else [])
    assert len(bench.letters) == (0 if late else len(names) - len(outputs))
    for letter in bench.letters:
        assert any(b" is bad" in (value or b"") for _, value in letter.headers or ())


async def raises(items: Items) -> None:
    raise RuntimeError("no")


async def never_ends(items: Items) -> None:
    await asyncio.Event().wait()


def answers(answer: Any) -> Any:
    async def execute(items: Items) -> Any:
        return answer

    return execute


@pytest.mark.parametrize(
    ("execute", "said"),
    [
        (answers(None), None),
        (answers([1]), "writer answered 1 results for 3 items"),
        (answers([1, 2, 3, 4]), "writer answered 4 results"),
        (answers("abc"), "writer answered 'str'"),
        (raises, "no"),
        (never_ends, "timeout_seconds=0.01"),
    ],
)
async def test_the_outcome_of_a_call_is_that_of_all_of_its_items(bench: Bench, execute: Any, said: str | None) -> None:
    """Once its attempts are over."""
    tries, found = list[int](), list[Any]()

    async def counted(items: Items) -> Any:
        tries.append(len(items))
        return await execute(items)

    def final(ctx: EventContext[Any], items: Items) -> None:
        found.extend((item.result, str(item.error or "")) for item in items)

    retry = JobRetry(attempts=3, wait_initial_seconds=0.001, wait_jitter_seconds=0)
    config = {"retry": retry, "timeout_seconds": 0.01 if execute is never_ends else None}
    batched(bench, counted, finalizer=final, on_failure=final, config=config, name="writer")
    await bench.over("a1 b1", "c1")
    assert [result for result, _ in found] == [None] * 3
    assert all((said or "") in error and bool(error) == bool(said) for _, error in found), found
    assert tries == ([3, 3, 3] if execute in (raises, never_ends) else [3])


@pytest.mark.parametrize("planned", [5, "ab", [1], [("k",)], [([], 1)], (("k", 1) for _ in range(2))])
async def test_what_is_no_list_of_items_fails_the_event_by_name(bench: Bench, planned: Any) -> None:
    world = World(is_open=True)
    source = bench.make(None)
    batcher: AsyncBatcher[Any, Named] = AsyncBatcher(source, world.call, finalize, name="writer")
    batcher.register_event_type(Named, lambda record, event: planned)
    task = bench.begin("a")
    await asyncio.wait([task], timeout=PATIENCE)
    with pytest.raises(Exception, match=r"writer.*Named"):
        task.result()
    assert world.calls == []


async def test_user_data_and_threads(bench: Bench) -> None:
    source = bench.make(None)

    def execute(items: Items) -> list[str]:
        return [item.value + "!" for item in items]

    def final(ctx: EventContext[Any], items: Items) -> None:
        ctx.forward(OUT, Named(f"{items[0].user_data}{items[0].result}"), key="k")

    batcher: AsyncBatcher[Any, str] = AsyncBatcher(source, execute, final)

    @batcher.register_event_type(Named)
    def plan(record: IncomingRecord, event: Named) -> BatchItem[str]:
        return BatchItem(event.name, event.name, user_data=record.offset)

    bench.begin("abc", "de")
    await bench.until(lambda: bench.broker.outputs() == ["0abc!", "1de!"], "done")


async def test_a_stop_waits_for_calls_that_run_and_drops_the_rest(bench: Bench) -> None:
    world = World()
    batched(bench, world.call, config={"max_batch_size": 2, "max_concurrent_batches": 1})
    bench.begin("a1", "b1", "c1")
    await bench.until(lambda: world.calls == [["a1", "b1"]], "it runs")
    stopping = await bench.drain()
    world.open()
    await stopping
    assert bench.broker.outputs() == ["A1", "B1"]
    assert world.calls == [["a1", "b1"]]
    assert bench.broker.offsets == {0: 2}


async def test_when_the_membership_is_lost_calls_are_cancelled_and_made_again(bench: Bench) -> None:
    world = World()
    batched(bench, world.call, config={"max_batch_size": 2, "max_concurrent_batches": 1})
    bench.begin("a1", "b1", "c1")
    await bench.until(lambda: world.calls == [["a1", "b1"]], "it runs")
    bench.connections.membership.lose_and_rejoin()
    await bench.until(lambda: len(world.calls) == 2, "again")
    assert world.cancelled == [["a1", "b1"]]
    assert world.calls[1] == ["a1", "b1"]
    world.open()
    await bench.until(lambda: bench.broker.outputs() == ["A1", "B1", "C1"], "done")


async def test_submit_in_a_handler_that_has_its_turn(bench: Bench) -> None:
    world = World(is_open=True)
    world.errors["c1"] = RuntimeError("c1 is bad")
    source = bench.make(None)
    batcher: AsyncBatcher[Any, Named] = AsyncBatcher(source, world.call)

    @source.register_event_type(Named, on_error=DEAD_LETTER)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        items = await batcher.submit(ctx, words(None, event))
        ctx.forward(OUT, Named("+".join(item.result for item in items)), key="k")

    await bench.over("a1 b1", "", "c1", "d1")
    assert bench.broker.outputs() == ["A1+B1", "", "D1"]
    assert len(bench.letters) == 1


async def test_settings_that_cannot_be(bench: Bench) -> None:
    source = bench.make(None)
    for settings in (
        {"max_batch_size": 0},
        {"max_concurrent_batches": 0},
        {"max_queued_items": True},
        {"max_delay_seconds": -1},
        {"timeout_seconds": 0},
    ):
        with pytest.raises(ConfigError, match=f"BatcherConfig.{next(iter(settings))}"):
            BatcherConfig(**settings)
    with pytest.raises(RegistrationError, match="cannot be of the kind 'thread'"):
        AsyncBatcher(source, World().call, kind="thread")
    with pytest.raises(RegistrationError, match="use one of"):
        AsyncBatcher(source, World().call, kind="fiber")
    with pytest.raises(RegistrationError, match="not both"):
        AsyncBatcher(source, World().call).register_event_type(Named, words, key=lambda event: event.name)


async def test_a_scheduler_goes_on_with_a_batcher(bench: Bench) -> None:
    world = World()
    source = bench.make(None)
    batcher: AsyncBatcher[Any, Named] = AsyncBatcher(source, world.call, finalize)

    async def job(event: Named) -> Named:
        return Named(event.name + "j")

    scheduler: AsyncJobScheduler[Any, Named, Named] = AsyncJobScheduler(
        source, job, config=SchedulerConfig(concurrency=8), then=batcher
    )
    scheduler.register_event_type(Named, key=lambda event: event.name[0])
    bench.begin("a1", "b1", "a2")
    await bench.until(lambda: world.calls != [], "a call runs")
    world.open()
    await bench.until(lambda: bench.broker.outputs() == ["A1J", "B1J", "A2J"], "in order")


async def test_a_key_that_failed_waits_for_the_turn_of_its_event(bench: Bench) -> None:
    world = World()
    world.errors["b1"] = RuntimeError("no")

    def failed(ctx: EventContext[Any], items: Items) -> None:
        world.calls.append([f"{items[0].value.name} failed"])

    batched(bench, world.call, on_failure=failed, config={"max_batch_size": 1, "max_concurrent_batches": 8})
    bench.begin("a1", "b1", "b2", "c1")
    await bench.until(lambda: sorted(world.running) == [["a1"], ["b1"], ["c1"]], "they run")
    world.end(world.calls.index(["b1"]), world.calls.index(["c1"]))
    await bench.until(lambda: world.running == [["a1"]], "the first one is slow")
    assert ["b2"] not in world.calls
    world.open()
    await bench.committed()
    assert world.calls.index(["b1 failed"]) < world.calls.index(["b2"])
