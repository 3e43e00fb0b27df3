"""A source that reads several topics: what is declared, what comes next, and its positions over upgrades and faults."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, SKIP, EventContext, EventSource, EventSourceConfig, Retry, Table
from streams.errors import ConfigError, OffsetError, RegistrationError, TopicReplaced
from streams.records import TYPE_HEADER, Record
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, decode_offset, further_positions
from streams.runtime.replay import PartitionReplay
from streams.source.postgres_sink import PostgresSink
from streams.testing import TestDriver
from streams.testing.simulation.broker import printed_id
from streams.testing.simulation.virtual_time import elapse
from tests.unit.inputs_kit import silence_inputs
from tests.vocabulary import Ordered, config_of

PAYMENTS, CLICKS = "payments", "clicks"


class Click(msgspec.Struct, frozen=True):
    customer: str


def config(**settings: Any) -> EventSourceConfig:
    return config_of(group_id="shop", topic="orders", num_partitions=2, **settings)


def build(*inputs: str, nulls: Retry | None = None, **settings: Any) -> EventSource[Any]:
    source = EventSource(config(**settings), Table.factory(key=str, value=int))
    for topic in inputs:
        source.input(topic, event=Click if topic == CLICKS else None, nulls=nulls)

    def count(ctx: EventContext[Any], event: Any) -> None:
        number = ctx.store.get("count", 0) + 1
        ctx.store.put("count", number)
        assert ctx.input is not None
        assert ctx.topic_partition == (ctx.input.topic, ctx.input.partition)
        value = f"{number} {ctx.input.topic}@{ctx.offset}".encode()
        ctx.forward(Record("seen", value, b"k", partition=ctx.input.partition))

    source.register_event_type(Ordered, count)
    source.register_event_type(Click, count)
    return source


def seen(driver: TestDriver[Any]) -> list[str]:
    return [(record.value or b"").decode() for record in driver.outputs("seen")]


def send(driver: TestDriver[Any], *topics: str, wait: bool = True) -> None:
    for topic in topics:
        driver.send(Ordered("ann"), partition=0, topic=topic, wait=wait)


def last_record(driver: TestDriver[Any]) -> OffsetRecord:
    log = driver._world.broker.log("shop.orders.changelog", 0)
    return decode_offset([record for record in log.committed(0, log.end) if record.key == OFFSET_KEY][-1])


# -- declared ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_an_input_is_refused() -> None:
    source = build(PAYMENTS)
    for topic, error, text in [
        (PAYMENTS, RegistrationError, "declared twice"),
        ("orders", RegistrationError, "event source's own"),
        ("a b", ConfigError, "the topic of source.input"),
    ]:
        with pytest.raises(error, match=text):
            source.input(topic)
    with pytest.raises(ConfigError, match="must be an error policy: STOP, SKIP"):
        source.input("more", nulls="skip")  # type: ignore[arg-type]
    elsewhere = EventSource(config(source_bootstrap_servers="other:9092"))
    with pytest.raises(ConfigError, match="another cluster"):
        elsewhere.input(PAYMENTS)
    with TestDriver(source):
        pass
    assert source.inputs == [PAYMENTS]


def test_an_input_whose_events_have_no_handler_is_refused_at_the_start() -> None:
    source = EventSource(config())
    source.input(CLICKS, event=Click)
    with pytest.raises(RegistrationError, match="'clicks' are 'Click', which has no handler"):
        TestDriver(source)


def test_the_topology_names_the_inputs() -> None:
    topology = build(PAYMENTS).topology
    assert [(topic.name, topic.purpose) for topic in topology.topics if topic.purpose in ("source", "input")] == [
        ("orders", "source"),
        (PAYMENTS, "input"),
    ]
    assert topology.mermaid().count('" --> source') == 2


# -- one order ---------------------------------------------------------------------------------------------------------


def test_the_oldest_comes_first_and_each_record_once() -> None:
    with TestDriver(build(PAYMENTS), start=False) as driver:
        for number, topic in enumerate(["orders", "orders", PAYMENTS, "orders", PAYMENTS, PAYMENTS, "orders"]):
            record = Record(topic, b'{"customer":"ann"}', b"k", [(TYPE_HEADER, b"Ordered")], 0, 1000 + number)
            driver.send_record(record, wait=False)
        driver.start()
        driver.settle()
        assert seen(driver) == [
            "1 orders@0", "2 orders@1", "3 payments@0", "4 orders@2", "5 payments@1", "6 payments@2", "7 orders@3",
        ]  # fmt: skip
        assert driver.committed_offsets() == {0: 4}
        assert driver.committed_offsets(PAYMENTS) == {0: 3}
        driver.check()


def test_an_input_at_its_end_holds_up_no_other_after_a_restart() -> None:
    """quixstreams #1116: aligned by time, it stood still for good when an input was at its end after a restart."""
    with TestDriver(build(PAYMENTS)) as driver:
        send(driver, PAYMENTS, "orders")
        driver.leave()
        driver.restart()
        before = driver.now
        send(driver, "orders", "orders")
        assert seen(driver)[-1] == "4 orders@2"
        assert driver.now - before < 1.0
        driver.crash()
        driver.restart()
        send(driver, PAYMENTS)
        assert seen(driver)[-1] == "5 payments@1"
        driver.check()


def test_an_input_that_is_silent_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever known of its end: its broker is away, say."""
    silence_inputs(monkeypatch)
    with TestDriver(build(PAYMENTS, alignment_seconds=3.0)) as driver:
        before = driver.now
        send(driver, "orders")
        assert 2.5 < driver.now - before < 4.0
        before = driver.now
        send(driver, "orders", "orders")
        assert driver.now - before < 1.0, "it was waited for, and not heard of since"
        send(driver, PAYMENTS)
        assert seen(driver)[-1] == "4 payments@0"


def test_statistics_have_each_input() -> None:
    with TestDriver(build(PAYMENTS, CLICKS)) as driver:
        send(driver, "orders", PAYMENTS, PAYMENTS)
        [first, *_] = driver.statistics().partitions
        assert [(one.topic, one.next_offset, one.awaited, one.lag) for one in first.inputs] == [
            ("orders", 1, False, None),
            (PAYMENTS, 2, False, None),
            (CLICKS, 0, False, None),
        ]
        member = driver._world.members[0]

        async def look() -> Any:
            return await asyncio.wrap_future(member.source.statistics_threadsafe())

        assert [one.end for one in driver._run(look()).partitions[0].inputs] == [
            driver._world.broker.log(topic, 0).end for topic in ("orders", PAYMENTS, CLICKS)
        ]
    with TestDriver(build()) as driver:
        assert driver.statistics().partitions[0].inputs == ()


# -- records of others -------------------------------------------------------------------------------------------------


def test_records_without_headers_are_of_the_inputs_type() -> None:
    with TestDriver(build(CLICKS)) as driver:
        for headers in (None, [("other", b"1")], [(TYPE_HEADER, b"Unheard"), ("other", b"2")]):
            driver.send_record(Record(CLICKS, b'{"customer":"ann"}', b"k", headers, 0))
        assert seen(driver) == ["1 clicks@0", "2 clicks@1", "3 clicks@2"]


def test_records_without_a_value_have_the_policy_of_their_input() -> None:
    with TestDriver(build(CLICKS, nulls=SKIP)) as driver:
        driver.send_record(Record(CLICKS, None, b"k", None, 0))
        driver.send_record(Record(CLICKS, b'{"customer":"ann"}', b"k", None, 0))
        assert seen(driver) == ["1 clicks@1"]
        assert driver.committed_offsets(CLICKS) == {0: 2}
        with pytest.raises(Exception, match=r"orders\[0\]@0"):
            driver.send_record(Record("orders", None, b"k", [(TYPE_HEADER, b"Ordered")], 0))


def test_a_refused_record_is_traced_back_to_the_event_of_its_input() -> None:
    """Events of both inputs have the same offset: the other one is not to blame."""
    source = build(PAYMENTS, error_policy=DEAD_LETTER)
    source.output("seen")

    def refuse(ctx: EventContext[Any], event: Click) -> None:
        ctx.store.put("count", -1)
        ctx.forward(Record("seen", b"REFUSED", b"k", partition=0))

    source._declared.router.routes[b"Click"].handler = refuse
    with TestDriver(source, start=False) as driver:
        driver._world.broker.refuses = lambda _, entry: entry.value == b"REFUSED" and entry.key == b"k"
        for topic, event in ((PAYMENTS, Click("ann")), ("orders", Ordered("ann")), (PAYMENTS, Ordered("ann"))):
            driver.send(event, topic=topic, partition=0, wait=False)
        driver.start()
        driver.settle()
        (letter,) = driver.dead_letters()
        assert (letter.header("__kes_dlq_topic"), letter.header("__kes_dlq_offset")) == (b"payments", b"0")
        assert sorted(seen(driver)) == ["1 orders@0", "2 payments@1"]
        driver.check()


# -- positions ---------------------------------------------------------------------------------------------------------


def test_each_offset_record_has_the_whole_position() -> None:
    with TestDriver(build(PAYMENTS, CLICKS)) as driver:
        send(driver, "orders", PAYMENTS, PAYMENTS)
        record = last_record(driver)
        assert (record.offset, record.position_in(PAYMENTS, 0), record.position_in(CLICKS, 0)) == (
            1,
            (2, printed_id(PAYMENTS)),
            (0, printed_id(CLICKS)),
        )
        driver.compact()
        driver.crash()
        driver.restart()
        send(driver, CLICKS, wait=False)
        driver.settle()
        assert seen(driver)[-1] == "4 clicks@0"
        driver.check()


def versions(*inputs: tuple[str, ...]) -> Any:
    """Sources of one group, made one after the other; the last one from then on. The first is the driver's own."""
    made = itertools.chain(inputs, itertools.repeat(inputs[-1]))
    return lambda: build(*next(made), num_standbys=1)


def test_an_input_is_added_to_a_source_with_state_member_by_member() -> None:
    """The first members do not know it. One that does takes a partition from one that does not, by a move and after a
    crash; back at an old one, the position is carried."""
    old, new = (), (PAYMENTS,)
    with TestDriver(versions(new, old, new, old, new), members=1) as driver:
        send(driver, "orders", PAYMENTS, wait=False)
        driver.advance(5.0)
        assert seen(driver) == ["1 orders@0"]
        driver.join()
        driver.leave(0)  # moved to the one that knows the input
        driver.settle()
        assert seen(driver) == ["1 orders@0", "2 payments@0"]
        driver.restart(0)
        driver.leave(1)  # and back to one that does not
        send(driver, "orders", PAYMENTS, wait=False)
        driver.advance(5.0)
        assert seen(driver)[2:] == ["3 orders@1"]
        assert last_record(driver).position_in(PAYMENTS, 0) == (1, printed_id(PAYMENTS))
        driver.crash(0)
        driver.restart(1)
        driver.settle()
        assert seen(driver)[3:] == ["4 payments@1"]
        driver.check()


def test_a_position_that_an_older_release_has_dropped_is_refused() -> None:
    with TestDriver(build(PAYMENTS)) as driver:
        send(driver, "orders", PAYMENTS)
        driver.leave()
        broker, record = driver._world.broker, last_record(driver)
        dropped = msgspec.json.encode(msgspec.structs.replace(record, inputs=msgspec.UNSET))
        broker.append("shop.orders.changelog", 0, OFFSET_KEY, dropped, None, broker.wall_ms())
        with pytest.raises(
            OffsetError,
            match=r"payments\[0\]: the group shop has committed offset 1, .* holds no offset of payments: a release",
        ):
            driver.restart()


def test_a_partition_that_moves_while_an_interjection_waits_takes_no_record_that_is_dropped() -> None:
    """The intake is closed during the interjection, with records of both inputs in the queues."""

    async def slowly(ctx: EventContext[Any]) -> None:
        await elapse(1.0)

    with TestDriver(build(PAYMENTS, num_standbys=1), topics={PAYMENTS: 2}) as driver:
        for partition in (0, 1):
            source = driver._world.members[0].source
            driver._world.loop.create_task(source.interject(partition, slowly))
        driver.advance(0.1)
        for partition in (0, 1):
            for topic in ("orders", PAYMENTS):
                driver.send(Ordered("ann"), partition=partition, topic=topic, wait=False)
        driver.advance(0.1)
        driver._world.members[0].source._run.ask_to_stop(drain=True)
        driver._world.start(1)
        driver.settle()
        assert driver.owner(0) == driver.owner(1) == 1
        assert len(seen(driver)) == 4
        driver.check()


def test_an_input_that_is_another_topic_now_is_refused() -> None:
    with TestDriver(build(PAYMENTS)) as driver:
        send(driver, "orders", PAYMENTS)
        driver.leave()
        driver._world.broker.recreated[PAYMENTS] += 1
        with pytest.raises(TopicReplaced, match=r"payments\[0\]: the topic was deleted and created again"):
            driver.restart()


def test_an_input_that_is_another_topic_now_stops_a_running_member() -> None:
    with TestDriver(build(PAYMENTS)) as driver:
        send(driver, "orders", PAYMENTS)
        driver._world.broker.recreated[PAYMENTS] += 1
        with pytest.raises(TopicReplaced, match="payments"):
            driver.advance(30.0)


def test_where_a_new_input_begins_is_decided_once() -> None:
    """By ``auto_offset_reset``; and then it is committed, so that a restart does not decide it again."""
    with TestDriver(versions((PAYMENTS,), (), (PAYMENTS,))) as driver:
        send(driver, "orders", wait=False)
        driver.advance(3.0)
        driver.leave()
        driver.restart()
        driver.advance(3.0)
        assert last_record(driver).position_in(PAYMENTS, 0) == (0, printed_id(PAYMENTS))
        driver.check()


def test_a_record_follows_a_position_only_if_it_does_in_every_input() -> None:
    """One that is further in one input, and behind in another, was not made by a member that went on from there."""
    record = OffsetRecord(7, "w", 1, 1, inputs=further_positions(None, 0, {PAYMENTS: (3, "id")}))
    assert record.reaches((7, 3), [PAYMENTS], 0)
    assert not record.reaches((7, 4), [PAYMENTS], 0)
    assert not record.reaches((7, 3, 0), [PAYMENTS, "not known to it"], 0)
    assert OffsetRecord(7, "w", 1, 1).reaches((7,), [], 0)


async def test_what_needs_one_topic_refuses_a_source_with_several() -> None:
    source = build(PAYMENTS)
    with pytest.raises(ConfigError, match=r"a replay takes the records of one topic.*\(payments\)"):
        PartitionReplay(source.program(), 0, wall_ms=0)
    sink = PostgresSink(source, "postgresql:///nowhere", name="stock")
    with pytest.raises(ConfigError, match=r"its fence is one offset of the source's topic.*\(payments\)"):
        async with sink._opened():
            pass


class Remind(msgspec.Struct, frozen=True):
    of: str


def ahead() -> EventSource[Any]:
    """A source whose handlers run ahead of their turn, each with a timer of its own."""
    source = EventSource(config(error_policy=DEAD_LETTER), Table.factory(key=str, value=int))
    source.input(PAYMENTS)

    async def handle(ctx: EventContext[Any], event: Ordered) -> None:
        assert ctx.input is not None
        ctx.schedule_in(60, Remind(ctx.input.topic))
        await ctx.turn()
        ctx.forward(Record("seen", f"{ctx.input.topic}@{ctx.offset} {event.customer}".encode(), b"k", partition=0))

    def remind(ctx: EventContext[Any], event: Remind) -> None:
        ctx.forward(Record("seen", event.of.encode(), b"k", partition=0))

    source.register_event_type(Ordered, handle, concurrency=4)
    source.register_event_type(Remind, remind)
    return source


@pytest.mark.parametrize(("bad", "good"), [("orders", PAYMENTS), (PAYMENTS, "orders")])
def test_a_refusal_of_work_that_runs_ahead_is_met_by_its_own_event(bad: str, good: str) -> None:
    """Their offsets are equal, and the other input comes first."""
    with TestDriver(ahead(), start=False) as driver:
        driver._world.broker.refuses = lambda _, entry: (entry.value or b"").endswith(b" bad")
        for number, (topic, customer) in enumerate([(good, "ann"), (bad, "bad"), (good, "ann")]):
            value = msgspec.json.encode(Ordered(customer))
            headers: Any = [(TYPE_HEADER, b"Ordered")]
            driver.send_record(Record(topic, value, b"k", headers, 0, 1_000 + number), wait=False)
        driver.start()
        driver.advance(20.0)
        letters = [letter.header("__kes_dlq_topic") for letter in driver.dead_letters()]
        assert letters == [bad.encode()]
        assert seen(driver) == [f"{good}@0 ann", f"{good}@1 ann"]


def test_timers_of_equal_offsets_of_two_inputs_are_two() -> None:
    with TestDriver(ahead()) as driver:
        send(driver, "orders", PAYMENTS)
        driver.advance(100.0)
        assert sorted(seen(driver)) == ["orders", "orders@0 ann", PAYMENTS, "payments@0 ann"]
        driver.check()
