"""The loop of a source: what handlers send to it is handled once, in its order, and kept until then."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, EventContext, EventSource, EventSourceConfig, Retry, Table, errors
from streams.cli.rights import of_source
from streams.cli.topics import wanted_topics
from streams.errors import ConfigError, EncodeError, EventFailure, LoopTooLong, OffsetError, RegistrationError
from streams.kafka.questions.takeover import WireTakeOver
from streams.records import Record
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, further_positions
from streams.runtime.ownership.loop_purge import PURGE_SECONDS
from streams.runtime.ownership.takeover import TakeOvers
from streams.runtime.partition.batch_handlers import BatchContext
from streams.runtime.partition.looping import HOPS_HEADER
from streams.runtime.replay import PartitionReplay
from streams.sak.murmur2 import partition_of
from streams.source.jobs import AsyncJobScheduler
from streams.testing import TestDriver
from streams.testing.simulation.broker import Txn
from tests.unit.waiting import said_by
from tests.vocabulary import Added, Named, Ordered, Paid, Reserved, Ring, config_of

LOOP = "shop.orders.loop"
PARTITIONS = 2
NEAR, FAR = (next(key for key in "abcdefgh" if partition_of(key.encode(), PARTITIONS) == number) for number in (0, 1))
"""Keys of the partitions 0 and 1."""


def config(**settings: Any) -> EventSourceConfig:
    settings = {"loop": True} | settings
    return config_of(group_id="shop", topic="orders", num_partitions=PARTITIONS, **settings)


def note(ctx: EventContext[Any], text: str) -> None:
    count = ctx.store.get("count", 0) + 1
    ctx.store.put("count", count)
    ctx.forward(Record("seen", f"{count} {text}".encode(), b"k", partition=ctx.topic_partition.partition))


def build(*inputs: str, **settings: Any) -> EventSource[Any]:
    """Orders that reserve in the partition of their customer, as many hops as they say."""
    source = EventSource(config(**settings), Table.factory(key=str, value=int))
    for topic in inputs:
        source.input(topic)

    def on_order(ctx: EventContext[Any], event: Ordered) -> None:
        note(ctx, f"{ctx.topic_partition.topic}@{ctx.offset}")
        if source.config.loop:
            ctx.loop(Reserved(event.customer, event.hops - 1), key=event.customer)

    def on_reserved(ctx: EventContext[Any], event: Reserved) -> None:
        note(ctx, f"loop@{ctx.offset} {event.customer}")
        if event.hops:
            ctx.loop(Reserved(event.customer, event.hops - 1), key=event.customer)

    source.register_event_type(Ordered, on_order)
    source.register_event_type(Reserved, on_reserved)
    return source


def seen(driver: TestDriver[Any], partition: int | None = None) -> list[str]:
    records = driver.outputs("seen")
    return [(one.value or b"").decode() for one in records if partition in (None, one.partition)]


def hops(driver: TestDriver[Any]) -> list[bytes | None]:
    return [record.header(HOPS_HEADER) for record in driver.outputs(LOOP)]


# -- declared ----------------------------------------------------------------------------------------------------------


def test_a_loop_is_a_topic_of_the_source() -> None:
    source = build("payments")
    spec = next(spec for spec in source.specs() if spec.name == LOOP)
    assert spec.partitions == PARTITIONS
    assert spec.configs == {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
    assert source.inputs == [LOOP, "payments"]
    assert [topic.name for topic in source.input_topics()] == ["payments"], "no topic of others"
    assert ("loop", LOOP) in [(wanted.purpose, wanted.spec.name) for wanted in wanted_topics(source, [])]
    drawing = source.topology.mermaid()
    number = next(n for n, topic in enumerate(source.topology.topics) if topic.purpose == "loop")
    assert f"source --> topic{number}\n" in drawing
    assert f'topic{number} -- "' in drawing
    rights = {right.operation for right in of_source(source.config) if right.name == LOOP}
    assert rights == {"Write", "DescribeConfigs", "Delete"}
    assert LOOP not in [spec.name for spec in build(loop=False).specs()]


def test_what_a_loop_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="loop is set beside source_bootstrap_servers"):
        config(source_bootstrap_servers="other:9092")
    for settings in ({"max_loop_hops": -1}, {"loop": "yes"}):
        with pytest.raises(ConfigError, match=r"loop"):
            config(**settings)
    source = build()
    join, lookup = (partial(declare, key=str, value=str) for declare in (source.join, source.lookup))
    for declare in (source.input, source.output, join, lookup):
        with pytest.raises(RegistrationError, match="the event source's own"):
            declare(LOOP)


async def test_a_replay_refuses_a_loop() -> None:
    with pytest.raises(ConfigError, match=r"further inputs \(shop\.orders\.loop\)"):
        PartitionReplay(build().program(), 0, wall_ms=0)


@pytest.mark.parametrize(
    ("loop", "key", "error"), [(False, "a", ConfigError), (True, None, EncodeError), (True, 7, EncodeError)]
)
def test_what_cannot_be_sent_is_the_events_error(loop: bool, key: Any, error: type[Exception]) -> None:
    source = EventSource(config(loop=loop))
    source.register_event_type(Ordered, lambda ctx, event: ctx.loop(event, key=key))
    with TestDriver(source) as driver, pytest.raises(EventFailure) as failure:
        driver.send(Ordered(NEAR))
    assert isinstance(failure.value.__cause__, error)


# -- handled once, in order --------------------------------------------------------------------------------------------


def test_what_is_sent_is_handled_where_its_key_belongs() -> None:
    with TestDriver(build()) as driver:
        driver.send(Ordered(FAR), partition=0)
        driver.send(Ordered(NEAR, hops=3), partition=1)
        assert seen(driver, 0) == ["1 orders@0", f"2 loop@0 {NEAR}", f"3 loop@2 {NEAR}", f"4 loop@4 {NEAR}"]
        assert seen(driver, 1) == [f"1 loop@0 {FAR}", "2 orders@0"]
        assert driver.committed_offsets(LOOP) == {0: 5, 1: 1}
        assert hops(driver) == [b"1", b"1", b"2", b"3"]
        driver.check()


def test_the_loop_comes_before_further_input() -> None:
    with TestDriver(build(), start=False) as driver:
        for number in range(3):
            driver.send(Ordered(NEAR), partition=0, wait=False)
            value = msgspec.json.encode(Reserved(NEAR, 0))
            driver.send_record(Record(LOOP, value, b"k", [("__grt__", b"Reserved")], 0, 9_000 + number), wait=False)
        driver.start()
        driver.settle()
        texts = [text.partition(" ")[2] for text in seen(driver, 0)]
        assert texts[:4] == [f"loop@0 {NEAR}", f"loop@1 {NEAR}", f"loop@2 {NEAR}", "orders@0"]


def test_the_loop_is_waited_for_at_the_start_only() -> None:
    """A hop costs no wait: what a handler has sent comes with its commit, and is not older than what waits."""
    with TestDriver(build(alignment_seconds=5.0)) as driver:
        before = driver.now
        for _ in range(20):
            driver.send(Ordered(NEAR, hops=2), partition=0)
        assert driver.now - before < 4.0


def test_events_that_fail_leave_nothing_in_the_loop() -> None:
    source = build(error_policy=Retry(attempts=2, backoff_seconds=0.01, then=DEAD_LETTER.then))

    def fail(ctx: EventContext[Any], event: Ordered) -> None:
        ctx.loop(Reserved(event.customer), key=event.customer)
        if event.hops or ctx.attempt == 1:
            raise RuntimeError("not now")

    source._declared.router.routes[b"Ordered"].handler = fail
    with TestDriver(source) as driver:
        driver.send(Ordered(NEAR, hops=1), partition=0)  # for good
        driver.send(Ordered(NEAR, hops=0), partition=0)  # once
        assert seen(driver) == [f"1 loop@0 {NEAR}"]
        assert len(driver.dead_letters()) == 1
        driver.abort()
        driver.send(Ordered(NEAR, hops=0), partition=0)
        assert len(seen(driver)) == 2
        driver.check()


# -- from everywhere ---------------------------------------------------------------------------------------------------


def test_timers_batches_jobs_and_interjections_send_to_it_too() -> None:
    source = build()

    def set_timer(ctx: EventContext[Any], event: Ring) -> None:
        if ctx.timer is None:
            ctx.schedule_in(1.0, event)
        else:
            ctx.loop(Reserved(event.name), key=event.name)

    def in_batch(ctx: BatchContext[Any], events: list[Added]) -> None:
        for event in events:
            ctx.loop(Reserved(event.name), key=event.name)

    async def ahead(ctx: EventContext[Any], event: Named) -> None:
        ctx.loop(Reserved(event.name), key=event.name)
        await ctx.turn()
        ctx.loop(Reserved(event.name), key=event.name)

    async def job(item: str) -> str:
        return item

    def finish(ctx: EventContext[Any], item: str, result: str) -> None:
        ctx.loop(Reserved(result), key=result)

    source.register_event_type(Ring, set_timer)
    source.register_event_type(Added, in_batch, batch=True)
    source.register_event_type(Named, ahead, concurrency=2)
    jobs = AsyncJobScheduler(source, job, finish)
    jobs.register_event_type(Paid, lambda _, event: (event.name, event.name))
    with TestDriver(source) as driver:
        for event in (Ring(NEAR), Added(NEAR), Named(NEAR), Paid(NEAR)):
            driver.send(event, partition=0, wait=False)
        driver.settle()
        driver.advance(5.0)
        driver.interject(0, lambda ctx: ctx.loop(Reserved(FAR), key=FAR))
        driver.settle()
        assert [text.partition(" ")[2] for text in seen(driver, 0)] == [f"loop@{at} {NEAR}" for at in (0, 1, 2, 3, 5)]
        assert len(seen(driver, 1)) == 1
        assert set(hops(driver)) == {b"1"}
        driver.check()


def test_a_batch_of_the_loop_is_as_far_as_its_furthest_event() -> None:
    source = build(max_loop_hops=3)

    def on_reserved(ctx: BatchContext[Any], events: list[Reserved]) -> None:
        for event in events:
            if event.hops:
                ctx.loop(Reserved(event.customer, event.hops - 1), key=event.customer)

    del source._declared.router.routes[b"Reserved"]
    source.register_event_type(Reserved, on_reserved, batch=True, on_error=DEAD_LETTER)
    with TestDriver(source) as driver:
        driver.send(Ordered(NEAR, hops=5), partition=0)
        assert hops(driver) == [b"1", b"2", b"3"]
        assert len(driver.dead_letters()) == 1


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "count"), [(4, 4), (0, 12)])
def test_a_runaway_ends_with_a_name(bound: int, count: int) -> None:
    source = build(max_loop_hops=bound, error_policy=Retry(attempts=5, then=DEAD_LETTER.then))
    with TestDriver(source) as driver:
        driver.send(Ordered(NEAR, hops=12), partition=0)
        assert hops(driver) == [b"%d" % number for number in range(1, count + 1)]
        letters = driver.dead_letters()
        assert len(letters) == (1 if bound else 0), "and it is not tried again"
        for letter in letters:
            assert letter.header("__kes_dlq_error") == b"LoopTooLong"
            assert letter.header("__kes_dlq_topic") == LOOP.encode()
        driver.check()


def test_a_runaway_stops_a_source_by_its_policy() -> None:
    with TestDriver(build(max_loop_hops=1)) as driver, pytest.raises(EventFailure) as failure:
        driver.send(Ordered(NEAR, hops=2), partition=0)
    assert isinstance(failure.value.__cause__, LoopTooLong)
    assert issubclass(LoopTooLong, errors.RecordError)


def test_hops_of_others_do_not_count() -> None:
    """A header that a user sent along, or one of a record that somebody else put into the loop."""
    source = build(max_loop_hops=2)
    with TestDriver(source) as driver:
        driver.send(Ordered(NEAR), partition=0, headers=[(HOPS_HEADER, b"99")])
        record = Record(LOOP, b'{"customer":"%s","hops":1}' % NEAR.encode(), b"k", [("__grt__", b"Reserved")], 0)
        for value in (None, b"many"):
            driver.send_record(msgspec.structs.replace(record, headers=[*(record.headers or ()), (HOPS_HEADER, value)]))
        assert [one for one in hops(driver) if one not in (None, b"many")] == [b"1", b"1", b"1"]


# -- rolling restarts --------------------------------------------------------------------------------------------------


def test_a_loop_is_added_member_by_member() -> None:
    """The one that knows it sends to a partition whose member does not: it is kept until that one knows it, wherever
    ``auto_offset_reset`` has others begin."""
    made = itertools.chain((True, False, True), itertools.repeat(True))
    with TestDriver(lambda: build(loop=next(made), auto_offset_reset="latest", num_standbys=1), members=2) as driver:
        owner = driver.owner(0)
        knows = next(n for n in driver.members if driver._world.members[n].source.config.loop)
        here = next(number for number in range(PARTITIONS) if driver.owner(number) == knows)
        there = 1 - here
        assert owner is not None
        driver.send(Ordered((NEAR, FAR)[there]), partition=here, wait=False)
        driver.advance(5.0)
        assert seen(driver, there) == []
        driver.leave(1 - knows)
        driver.settle()
        assert seen(driver, there) == [f"1 loop@0 {(NEAR, FAR)[there]}"]
        driver.restart(1 - knows)
        driver.check()


# -- kept until it is handled ------------------------------------------------------------------------------------------


def starts(driver: TestDriver[Any]) -> list[int]:
    return [driver._world.broker.log(LOOP, number).start for number in range(PARTITIONS)]


def test_what_is_handled_is_deleted() -> None:
    with TestDriver(build()) as driver:
        driver.send(Ordered(NEAR, hops=3), partition=0)
        assert starts(driver) == [0, 0]
        driver.advance(PURGE_SECONDS + 1)
        assert starts(driver) == [driver.committed_offsets(LOOP)[0], 0]
        purged = starts(driver)
        driver.crash()
        driver.restart()
        driver.send(Ordered(NEAR), partition=0)
        assert len(seen(driver, 0)) == 6
        driver.advance(PURGE_SECONDS + 1)
        assert starts(driver)[0] > purged[0]
        driver.check()


def test_it_is_deleted_also_while_a_further_position_is_pending() -> None:
    """As under load, where there is always one."""
    with TestDriver(build()) as driver:
        driver.send(Ordered(NEAR, hops=3), partition=0)
        driver._world.broker.pending[Txn("under way")] = {(LOOP, 0): (0, 99)}
        driver.advance(PURGE_SECONDS + 15)
        assert starts(driver) == [driver.committed_offsets(LOOP)[0], 0]


def test_killed_between_the_commit_and_the_purge() -> None:
    with TestDriver(build()) as driver:
        for point in ("purge.before", "purge.after"):
            trap = driver.at(point, driver.crash)  # type: ignore[arg-type]
            driver.send(Ordered(NEAR, hops=3), partition=0)
            driver.advance(PURGE_SECONDS + 1)
            assert trap.sprung
            driver.restart()
        assert [text.split()[0] for text in seen(driver, 0)] == [str(number + 1) for number in range(8)]
        driver.advance(PURGE_SECONDS + 1)
        driver.check()


def test_a_purge_that_fails_is_logged_once_and_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("no right to")

    with TestDriver(build()) as driver:
        driver.send(Ordered(NEAR), partition=0)
        with monkeypatch.context() as patch:
            patch.setattr(WireTakeOver, "delete_records", refuse)
            driver.advance(2 * PURGE_SECONDS + 1)
        assert starts(driver) == [0, 0]
        assert [line for line in said_by(caplog, "streams.runtime") if "stays in" in line] == [
            f"what is handled stays in {LOOP} for now: no right to"
        ]
        driver.advance(PURGE_SECONDS)
        assert starts(driver)[0] > 0


def test_a_position_whose_records_are_gone_is_refused() -> None:
    """Deleted by somebody else, say by a retention that was set by hand."""
    with TestDriver(build()) as driver:
        driver.send(Ordered(NEAR), partition=0)
        driver.leave()
        driver._world.broker.log(LOOP, 0).start = 5
        with pytest.raises(OffsetError, match=r"shop\.orders\.loop\[0\].*are gone"):
            driver.restart()


def test_what_another_member_has_handled_and_deleted_during_a_take_over_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This one stood still between its requests: the end of the changelog is from before that, the start of the loop
    from after."""
    with TestDriver(build()) as driver:
        driver.send(Ordered(NEAR, hops=3), partition=0)
        driver.leave()
        broker, asked = driver._world.broker, TakeOvers._source_range
        log = broker.log("shop.orders.changelog", 0)
        known = msgspec.json.decode(
            next(entry.value or b"" for entry in reversed(log.entries) if entry.key == OFFSET_KEY), type=OffsetRecord
        )
        moved: list[int] = []

        async def stand_still(self: TakeOvers, numbers: list[int], topic: str) -> Any:
            ranges, topic_id = await asked(self, numbers, topic)
            if topic == LOOP and not moved:
                moved.append(broker.append(LOOP, 0, b"k", b'{"customer":"other"}', [("__grt__", b"Reserved")]) + 1)
                broker.log(LOOP, 0).start = moved[0]
                inputs = further_positions(known, 0, {LOOP: (moved[0], topic_id)})
                record = msgspec.structs.replace(known, writer="another", inputs=inputs)
                broker.append("shop.orders.changelog", 0, OFFSET_KEY, msgspec.json.encode(record), None)
                ranges = {number: broker.range(LOOP, number) for number in numbers}
            return ranges, topic_id

        monkeypatch.setattr(TakeOvers, "_source_range", stand_still)
        driver.restart()
        driver.send(Ordered(NEAR), partition=0)
        assert seen(driver, 0)[-1] == f"6 loop@{moved[0]} {NEAR}"
