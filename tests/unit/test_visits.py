"""Visits: each key of a source's store is visited once in a run, over kills and moves, in small steps."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from streams import EventSource, Table
from streams.disk import SQLite
from streams.errors import ConfigError, RegistrationError, TopicError
from streams.records import Record
from streams.runtime.partition import visiting
from streams.runtime.partition.visiting import AT_ONCE, Visiting
from streams.settings.config import PoolConfig, StateConfig
from streams.testing.fault_points import Point
from streams.testing.simulation.clients import SimTopics
from streams.testing.simulation.virtual_time import elapse
from tests.unit.visits_kit import PARTITIONS, SEEN, Ctx, Shop, build, config, driven, fill, look, once, seen
from tests.vocabulary import Put


def test_each_key_is_visited_once_per_run() -> None:
    with driven(build()) as driver:
        fill(driver, 150)
        assert driver.start_visit("look") == "run"
        assert seen(driver) == once(150)
        driver.start_visit("look")
        assert seen(driver) == once(150), "a partition takes a run once"
        driver.start_visit("look", run_id="next")
        assert seen(driver, "next") == once(150)
        assert set(dict(driver.store(0).items()).values()) == {2}
        (visit,) = driver.visits(0)
        assert (visit.run, visit.ended, visit.cancelled) == ("", {"run": 150, "next": 150}, {})
        assert driver.visits(1)[0].ended == {"run": 0, "next": 0}, "no key is there"
        statistics = driver.statistics().partitions[0]
        assert (statistics.visits, statistics.timers, statistics.next_timer_ms) == ((visit,), 0, None)
        driver.check()


def test_two_runs_at_a_time_are_one_after_the_other() -> None:
    with driven(build()) as driver:
        fill(driver, 20)
        for run in ("run", "next", "run", "next"):
            driver.start_visit("look", run_id=run, wait=False)
        driver.settle()
        runs = [one.value for one in driver.outputs(SEEN)]
        assert runs == [b"run"] * 20 + [b"next"] * 20


KILLS: list[tuple[Point, int]] = [
    *itertools.product(("handler.before", "handler.after"), (0, 1, 63, 64, 99, 100)),
    *itertools.product(("flush.before", "flush.after", "commit.before", "commit.after"), (0, 1, 4)),
]
"""A point of a run over 100 keys, 16 in a transaction at most, and how often it is passed before."""


@pytest.mark.parametrize(("point", "skip"), KILLS)
def test_a_kill_at_each_point(point: Point, skip: int) -> None:
    with driven(build(pool=PoolConfig(target_batch_size=8, max_batch_size=16))) as driver:
        fill(driver, 100)
        trap = driver.at(point, driver.crash, skip=skip)
        driver.start_visit("look")
        assert trap.sprung
        driver.restart()
        driver.settle()
        assert seen(driver) == once(100)
        assert set(dict(driver.store(0).items()).values()) == {1}
        driver.check()


def test_partitions_move_during_a_run() -> None:
    """A member joins, and takes a partition, while each key takes its time; then the other one leaves."""

    async def slowly(ctx: Ctx, key: str, value: int) -> None:
        await elapse(0.05)
        look(ctx, key, value)

    with driven(build(slowly, num_standbys=1)) as driver:
        for partition in range(PARTITIONS):
            for number in range(40):
                driver.send(Put(f"k{number:03}{partition}", 0), partition=partition, wait=False)
        driver.settle()
        driver.start_visit("look", wait=False)
        driver.advance(0.3)
        first = driver.owner(0), driver.owner(1)
        before = sum(seen(driver).values())
        driver._world.start(1)
        driver.advance(1.5)
        assert {driver.owner(0), driver.owner(1)} == {0, 1} != set(first)
        moved = sum(seen(driver).values())
        assert 0 < before < moved < 80
        assert any(one.run for number in range(PARTITIONS) for one in driver.visits(number)), "it goes on"
        driver.leave(0)
        driver.settle()
        assert set(seen(driver).values()) == {1}
        assert len(seen(driver)) == 80
        driver.check()


def test_a_request_reaches_a_partition_that_nobody_works_on() -> None:
    with driven(build()) as driver:
        fill(driver, 3)
        driver.crash()
        driver.start_visit("look")
        assert not seen(driver)
        driver.restart()
        driver.settle()
        assert seen(driver) == once(3)


def test_keys_that_come_and_go_during_a_run() -> None:
    """Put behind the place of the run: not visited; before it: visited. Deleted before its turn: not visited."""

    def changes(ctx: Ctx, key: str, value: int) -> None:
        look(ctx, key, value)
        if key == "k010":
            ctx.store.put("k0055", 0)
            ctx.store.put("k9", 0)
            ctx.store.delete("k011")
            ctx.store.delete("k005")
            ctx.store.put("k005", 7)

    with driven(build(changes)) as driver:
        fill(driver, 20)
        driver.start_visit("look")
        assert seen(driver) == once(20) - Counter(["k011"]) + Counter(["k9"])
        assert driver.store(0).get("k005") == 7, "a key that was visited, deleted, and put again is not visited again"
        assert driver.visits(0)[0].ended == {"run": 20}


def test_events_have_their_turns_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are bounded in number and in time, and one is between two events at most."""
    steps: list[int] = []
    taken = Visiting.step

    async def step(self: Visiting, inputs: Any) -> bool:
        before = handled[0]
        answer = await taken(self, inputs)
        steps.append(handled[0] - before)
        return answer

    handled = [0]

    async def counted(ctx: Ctx, key: str, value: int) -> None:
        handled[0] += 1
        await elapse(0.002 if key >= "k150" else 0)

    monkeypatch.setattr(Visiting, "step", step)
    with driven(build(counted)) as driver:
        fill(driver, 200)
        steps.clear()
        driver.start_visit("look", wait=False)
        driver.advance(0.05)
        driver.send(Put("late", 0), partition=0, wait=False)
        driver.advance(0.03)
        assert 0 < handled[0] < 200
        assert driver.store(0).get("late") == 0, "handled before the run is over"
        driver.settle()
        assert handled[0] == 201
        assert max(steps) == AT_ONCE
        assert max(steps[-10:]) <= 1 + visiting.LONGEST_SECONDS / 0.002


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_handlers_that_wait(kind: str) -> None:
    async def waits(ctx: Ctx, key: str, value: int) -> None:
        await elapse(0.001)
        look(ctx, key, value)

    source = build(look, blocking=True) if kind == "blocking" else build(waits)
    with driven(source) as driver:
        fill(driver, 10)
        driver.start_visit("look")
        assert seen(driver) == once(10)


def test_a_table_among_several(tmp_path: Path) -> None:
    def orders(ctx: Ctx, key: str, value: int) -> None:
        look_at = ctx.timer
        assert look_at is not None
        ctx.store.orders.put(key, value + 1)
        ctx.forward(Record(SEEN, b"run", key.encode(), partition=0))

    source = EventSource(config(), Shop.factory())

    @source.on
    def put(ctx: Ctx, event: Put) -> None:
        ctx.store.orders.put(event.key, 0)
        ctx.store.others.put(event.key, 0)

    source.register_visit("look", orders, table="orders")
    with driven(source) as driver:
        fill(driver, 30)
        driver.start_visit("look")
        assert seen(driver) == once(30)
        assert set(driver.store(0).orders.values()) == {1}


def test_a_table_on_disk(tmp_path: Path) -> None:
    store = Table.factory(key=str, value=int, engine=SQLite())
    with driven(build(store=store, state=StateConfig(folder=str(tmp_path)))) as driver:
        fill(driver, 100)
        driver.at("commit.after", driver.crash)
        driver.start_visit("look")
        driver.restart()
        driver.settle()
        assert seen(driver) == once(100)


def test_a_run_that_has_begun_ends_before_one_of_another_visit_begins() -> None:
    """Also when a compacted changelog has its state behind that of the other."""

    async def slowly(ctx: Ctx, key: str, value: int) -> None:
        await elapse(0.05)
        look(ctx, key, value)

    def both() -> EventSource[Any]:
        source = build(slowly)
        source.register_visit("other", slowly)
        return source

    with driven(both) as driver:
        fill(driver, 30)
        driver.start_visit("look", run_id="first", wait=False)
        driver.start_visit("other", run_id="second", wait=False)
        driver.advance(0.5)
        driver.compact()
        driver.crash()
        driver.restart()
        driver.settle()
        assert [one.value for one in driver.outputs(SEEN)] == [b"first"] * 30 + [b"second"] * 30


# -- cancelled ---------------------------------------------------------------------------------------------------------


def test_a_run_is_cancelled() -> None:
    async def slowly(ctx: Ctx, key: str, value: int) -> None:
        await elapse(0.05)
        look(ctx, key, value)

    with driven(build(slowly)) as driver:
        fill(driver, 100)
        driver.start_visit("look", wait=False)
        driver.start_visit("look", run_id="next", wait=False)
        driver.advance(1.0)
        driver.cancel_visit("look")
        visited = len(seen(driver))
        assert 0 < visited < 30
        assert driver.visits(0)[0].cancelled == {"next": 0, "run": visited}
        driver.start_visit("look")
        assert len(seen(driver)) == visited, "it does not begin again"
        driver.check()


# -- rolling restarts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", ["no visits", "another name"])
def test_what_a_member_does_not_know_is_carried(old: str) -> None:
    """A run is under way; a release that knows no visits has the partitions, then the first one again."""

    async def slowly(ctx: Ctx, key: str, value: int) -> None:
        await elapse(0.05)
        look(ctx, key, value)

    def other() -> EventSource[Any]:
        return build(visits=False) if old == "no visits" else build(None)

    made = iter((lambda: build(slowly), lambda: build(slowly), other, lambda: build(slowly)))
    with driven(lambda: next(made)(), members=1) as driver:
        fill(driver, 50)
        driver.start_visit("look", wait=False)
        driver.advance(0.5)
        driver.join()
        driver.leave(0)
        driver.advance(1.0)
        between = len(seen(driver))
        assert 0 < between < 50
        driver.send(Put("k900", 0), partition=0, wait=False)
        driver.advance(3.0)
        assert len(seen(driver)) == between
        driver.restart(0)
        driver.leave(1)
        driver.settle()
        assert seen(driver) == once(50) + Counter(["k900"])
        driver.check()


# -- requests ----------------------------------------------------------------------------------------------------------


def test_requests_of_a_running_source() -> None:
    with driven(build()) as driver:
        fill(driver, 5)
        source = driver._world.members[0].source
        run = driver._run(source.start_visit("look"))
        driver.settle()
        assert seen(driver, run) == once(5)
        assert driver._run(source.start_visit("look", run_id="mine")) == "mine"
        driver.settle()
        driver._run(source.cancel_visit("look", run_id="mine"))
        driver.settle()
        assert driver.visits(0)[0].ended == {run: 5, "mine": 5}
        with pytest.raises(RegistrationError, match="this source has no visit 'nothing'; it has look"):
            driver._run(source.start_visit("nothing"))
        for request in (source.start_visit("look", run_id=""), source.cancel_visit("look", run_id="")):
            with pytest.raises(ConfigError, match="run_id is"):
                driver._run(request)
        with pytest.raises(ConfigError, match="no visit 'nothing'; it has look"):
            driver.start_visit("nothing")


def test_a_topic_that_is_not_as_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is requested then; the settings of the topic are not looked at, which would take one more right."""
    with driven(build()) as driver:
        source = driver._world.members[0].source
        monkeypatch.setattr(SimTopics, "differences", None)
        for found, text in ((None, "does not exist: the first member"), (("id", 3), "has 3 partitions, and num_part")):
            monkeypatch.setattr(SimTopics, "identity", lambda self, name, seconds, found=found: found)
            with pytest.raises(TopicError, match=rf"shop\.orders\.visits {text}"):
                driver._run(source.start_visit("look"))
        driver.settle()
        assert driver.visits(0) == ()
