"""Visits: each key of a source's store is visited once in a run, over kills and moves, in small steps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, SKIP, EventContext, EventSource, EventSourceConfig, Retry, Table, event_type
from streams.cli.rights import of_source
from streams.cli.topics import wanted_topics
from streams.config import PoolConfig, StateConfig
from streams.disk import SQLite
from streams.errors import ConfigError, EventFailure, RegistrationError, TopicError
from streams.records import TYPE_HEADER, Record
from streams.runtime.partition import visiting
from streams.runtime.partition.visiting import AT_ONCE, Visiting
from streams.runtime.replay import PartitionReplay
from streams.stores.named_table import NamedTable
from streams.stores.several import Stores
from streams.testing import TestDriver
from streams.testing.fault_points import Point
from streams.testing.simulation.clients import SimTopics
from streams.testing.simulation.virtual_time import elapse

VISITS = "shop.orders.visits"
SEEN = "seen"
PARTITIONS = 2
Ctx = EventContext[Any]


@event_type("visits.Put")
class Put(msgspec.Struct, frozen=True):
    key: str
    value: int | None


def config(**settings: Any) -> EventSourceConfig:
    settings = {"visits": True} | settings
    return EventSourceConfig(group_id="shop", topic="orders", num_partitions=PARTITIONS, **settings)


def look(ctx: Ctx, key: str, value: int) -> None:
    """Count in the key's row, and say which run it was."""
    run: Any = ctx.timer
    ctx.store.put(key, value + 1)
    ctx.forward(Record(SEEN, run.run.encode(), key.encode(), partition=ctx.topic_partition.partition))


def build(handler: Callable[..., Any] | None = look, store: Any = None, **options: Any) -> EventSource[Any]:
    of_visit = {name: options.pop(name) for name in ("table", "on_error", "blocking") if name in options}
    source = EventSource(config(**options), store or Table.factory(key=str, value=int, ordered=True))

    @source.on
    def put(ctx: Ctx, event: Put) -> None:
        if event.value is None:
            ctx.store.delete(event.key)
        else:
            ctx.store.put(event.key, event.value)

    if handler is not None and source.config.visits:
        source.register_visit("look", handler, **of_visit)
    return source


def fill(driver: TestDriver[Any], count: int, partition: int = 0) -> None:
    for number in range(count):
        driver.send(Put(f"k{number:03}", 0), partition=partition, wait=False)
    driver.settle()


def seen(driver: TestDriver[Any], run: str = "run") -> Counter[str]:
    return Counter((one.key or b"").decode() for one in driver.outputs(SEEN) if one.value == run.encode())


def once(count: int) -> Counter[str]:
    return Counter(f"k{number:03}" for number in range(count))


def driven(source: Any, **options: Any) -> TestDriver[Any]:
    return TestDriver(source, topics={SEEN: PARTITIONS}, **options)


# -- declared ----------------------------------------------------------------------------------------------------------


def test_requests_have_a_topic_of_the_source() -> None:
    source = build()
    spec = next(spec for spec in source.specs() if spec.name == VISITS)
    assert (spec.partitions, spec.configs["retention.ms"]) == (PARTITIONS, "-1")
    assert (source.inputs, source.input_topics()) == ([VISITS], [])
    assert ("visits", VISITS) in [(wanted.purpose, wanted.spec.name) for wanted in wanted_topics(source, [])]
    assert [topic.purpose for topic in source.topology.topics].count("visits") == 1
    assert [handler.event for handler in source.topology.handlers] == ["visits.Put", "visit look"]
    assert '-- "requests" --> source' in source.topology.mermaid()
    assert {one.operation for one in of_source(source.config) if one.name == VISITS} == {"Write", "DescribeConfigs"}
    assert VISITS not in [spec.name for spec in build(visits=False).specs()]


def test_what_a_visit_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="visits is set beside source_bootstrap_servers"):
        config(source_bootstrap_servers="other:9092")
    with pytest.raises(ConfigError, match="visits"):
        config(visits="yes")
    with pytest.raises(ConfigError, match=r"the visit 'look' needs EventSourceConfig\(visits=True\)"):
        EventSource(config(visits=False)).register_visit("look", look)
    source = build()
    for name in ("", "a\n", "ü", "x" * 101, 7):
        with pytest.raises(ConfigError, match="the name of a visit is"):
            source.register_visit(name, look)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="there is a visit 'look' already"):
        source.register_visit("look", look)
    with pytest.raises(RegistrationError, match="the handler of the visit 'other'"):
        source.register_visit("other", lambda ctx: None)  # type: ignore[arg-type, misc]
    with driven(source) as driver:
        running = driver._world.members[0].source
        with pytest.raises(RegistrationError, match="comes too late"):
            running.register_visit("late", look)


class Shop(Stores):
    orders = NamedTable.of(str, int, ordered=True)
    others = NamedTable.of(str, int)


@pytest.mark.parametrize(
    ("store", "table", "error"),
    [
        (Table.factory(key=str, value=int), None, "keeps no order of its keys"),
        (Shop.factory(), None, r"the store \(Shop\) is no Table"),
        (Shop.factory(), "nothing", r"'nothing' of the store"),
        (Shop.factory(), "others", "keeps no order of its keys"),
    ],
)
def test_a_table_that_cannot_be_visited_is_refused_at_the_start(store: Any, table: str | None, error: str) -> None:
    with pytest.raises(RegistrationError, match=error):
        driven(build(store=store, table=table))


async def test_a_replay_refuses_visits() -> None:
    with pytest.raises(ConfigError, match=r"further inputs \(shop\.orders\.visits\)"):
        PartitionReplay(build().program(), 0, wall_ms=0)


# -- runs --------------------------------------------------------------------------------------------------------------


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

    async def step(self: Visiting) -> bool:
        before = handled[0]
        answer = await taken(self)
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


# -- failures ----------------------------------------------------------------------------------------------------------


def fails(attempts: int = 10**9) -> Callable[..., None]:
    def failing(ctx: Ctx, key: str, value: int) -> None:
        look(ctx, key, value)
        if key == "k001" and ctx.attempt <= attempts:
            raise ValueError("not this one")

    return failing


@pytest.mark.parametrize("policy", [DEAD_LETTER, SKIP])
def test_a_failure_is_that_of_one_key(policy: Retry) -> None:
    with driven(build(fails(), on_error=policy)) as driver:
        fill(driver, 5)
        driver.start_visit("look")
        assert seen(driver) == once(5) - Counter(["k001"])
        assert driver.store(0).get("k001") == 0, "undone"
        assert driver.visits(0)[0].ended == {"run": 5}
        letters = driver.dead_letters()
        assert len(letters) == (policy is DEAD_LETTER)
        for letter in letters:
            facts = {name: content for name, content in letter.headers or () if name.startswith("__kes_dlq_")}
            assert letter.key == b"k001"
            assert (facts["__kes_dlq_visit"], facts["__kes_dlq_run"]) == (b"look", b"run")
            assert (facts["__kes_dlq_error"], facts["__kes_dlq_offset"]) == (b"ValueError", b"-1")


def test_a_retry_and_a_stop() -> None:
    with driven(build(fails(2), on_error=Retry(attempts=3, backoff_seconds=0.01))) as driver:
        fill(driver, 5)
        driver.start_visit("look")
        assert seen(driver) == once(5)


def test_a_stop_is_met_again_by_the_next_start() -> None:
    handlers: Iterator[Callable[..., Any]] = iter((look, fails(), fails(), fails(), look))
    with driven(lambda: build(next(handlers))) as driver:
        fill(driver, 5)
        where = r"the visit 'look' \(run 'run'\) of the key b'k001' of orders\[0\] .* the next start meets it again"
        with pytest.raises(EventFailure, match=where):
            driver.start_visit("look")
        assert seen(driver) == once(1), "what was complete before is committed"
        with pytest.raises(EventFailure, match=where):
            driver.restart()
        driver.cancel_visit("look")
        driver.restart()
        assert driver.visits(0)[0].cancelled == {"run": 1}, "a request comes before the next key"
        driver.start_visit("look", run_id="next", wait=False)
        driver.crash()
        driver.restart()
        driver.settle()
        assert seen(driver, "next") == once(5)


def test_a_letter_that_is_sent_again_visits_its_key() -> None:
    """As ``kes dlq replay`` does, after the handler was repaired; a key that is gone is passed over."""
    for handler, options in ((fails(1), {}), (fails(1), {"blocking": True})):
        with driven(build(handler, on_error=DEAD_LETTER, **options)) as driver:
            fill(driver, 3)
            driver.start_visit("look")
            (letter,) = driver.dead_letters()
            headers = [(name, content) for name, content in letter.headers or () if not name.startswith("__kes_dlq")]
            again = Record("orders", letter.value, letter.key, headers, 0)
            source: Any = driver._world.members[0].source
            route, _ = source._router.visits["look"]

            def repaired(ctx: Ctx, key: str, value: int) -> None:
                ctx.store.put(key, 100)

            route.handler = repaired
            driver.send_record(again)
            assert driver.store(0).get("k001") == 100
            driver.send(Put("k001", None), partition=0)
            driver.send_record(again)
            assert driver.store(0).get("k001") is None
            driver.check()


@pytest.mark.parametrize(
    "value", [b"no JSON", b"{}", b'{"visit":"","run":"r"}', b'{"visit":"look","run":"%s"}' % (b"r" * 101)]
)
def test_what_is_no_request_meets_a_policy(value: bytes) -> None:
    with driven(build(error_policy=DEAD_LETTER, decode_policy=DEAD_LETTER)) as driver:
        fill(driver, 2)
        driver.send_record(Record(VISITS, value, None, [(TYPE_HEADER, b"kes.visit")], 0))
        assert [letter.header("__kes_dlq_error") for letter in driver.dead_letters()] == [b"DecodeError"]
        assert (driver.visits(0), seen(driver)) == ((), Counter())


def test_what_is_sent_again_for_a_visit_that_is_not_there_is_its_events_error() -> None:
    with driven(build(error_policy=DEAD_LETTER)) as driver:
        driver.send_record(
            Record("orders", b'{"visit":"gone","run":"r","action":"again"}', b"k", [(TYPE_HEADER, b"kes.visit")], 0)
        )
        (letter,) = driver.dead_letters()
        assert letter.header("__kes_dlq_message") == b"this source has no visit 'gone'"


def test_a_refused_output_is_that_of_its_key() -> None:
    """The broker refuses it: the partition is restored, and the key meets its policy, as any event."""

    def large(ctx: Ctx, key: str, value: int) -> None:
        look(ctx, key, value)
        if key == "k002":
            ctx.forward(Record(SEEN, bytes(900_000), b"large", partition=0))

    with driven(build(large, on_error=SKIP)) as driver:
        driver._world.broker.limits[SEEN] = 1_000
        fill(driver, 5)
        driver.start_visit("look")
        assert seen(driver) == once(5) - Counter(["k002"])
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
    with driven(build()) as driver:
        monkeypatch.setattr(SimTopics, "differences", lambda self, specs: [f"topic {specs[0].name} does not exist"])
        source = driver._world.members[0].source
        with pytest.raises(TopicError, match=r"shop\.orders\.visits does not exist: the first member"):
            driver._run(source.start_visit("look"))
