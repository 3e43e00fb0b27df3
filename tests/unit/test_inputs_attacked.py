"""What is done to sources with inputs, joined tables and a loop by those who mean no good, or do not know better."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, EventContext, EventSource, EventSourceConfig, Table
from streams.errors import OffsetError, TopicError
from streams.records import TYPE_HEADER, Record
from streams.sak.murmur2 import partition_of
from streams.stores.joined import PARTITIONERS
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse
from tests.unit.joins_kit import CUSTOMERS, Customer, Shop, place, rows, seen, update
from tests.vocabulary import Ordered, config_of

PAYMENTS, LOOP, DAY_MS = "payments", "shop.orders.loop", 86_400_000


def build(**settings: Any) -> EventSource[Any]:
    """Orders and payments, counted per partition in their order; handled ahead of their turn if they take time."""
    config = config_of(**{"group_id": "shop", "topic": "orders", "num_partitions": 2} | settings)
    source = EventSource(config, Table.factory(key=str, value=int))
    source.input(PAYMENTS)

    async def ordered(ctx: EventContext[Any], event: Ordered) -> None:
        await elapse(event.seconds)
        await ctx.turn()
        count = ctx.store.get("count", 0) + 1
        ctx.store.put("count", count)
        record = ctx.input
        assert record is not None
        text = f"{count} {record.topic}@{ctx.offset}"
        ctx.forward(Record("seen", text.encode(), b"k", partition=record.partition))

    source.register_event_type(Ordered, ordered, concurrency=8)
    return source


def order(topic: str = "orders", seconds: float = 0.0, at_ms: int = 0) -> Record:
    value = msgspec.json.encode(Ordered("ann", seconds=seconds))
    return Record(topic, value, b"k", [(TYPE_HEADER, b"Ordered")], 0, at_ms)


# -- positions ---------------------------------------------------------------------------------------------------------


def test_an_event_that_is_done_before_an_earlier_one_commits_over_none() -> None:
    """The lost ack of goka: N + 1 is acknowledged while N is under way, and a crash loses N."""
    with TestDriver(build()) as driver:
        for topic, seconds in (("orders", 30.0), ("orders", 0.0), (PAYMENTS, 0.0)):
            driver.send_record(order(topic, seconds), wait=False)
        driver.advance(10)
        assert driver.committed_offsets().get(0, 0) == 0, "nothing behind the slow one is committed"
        driver.crash()
        driver.restart()
        driver.advance(60)
        assert sorted(text.split()[1] for text in seen(driver)) == ["orders@0", "orders@1", "payments@0"]
        assert [text.split()[0] for text in seen(driver)] == ["1", "2", "3"]
        driver.check()


@pytest.mark.parametrize("by_hand", ["back", "gone", "ahead"])
@pytest.mark.parametrize("topic", ["orders", PAYMENTS])
def test_the_groups_offset_of_one_input_is_set_by_hand(
    topic: str, by_hand: str, caplog: pytest.LogCaptureFixture
) -> None:
    with TestDriver(build()) as driver:
        for name in ("orders", PAYMENTS) * 3:
            driver.send_record(order(name))
        driver.leave()
        broker = driver._world.broker
        there = broker.offset_key(topic, 0)
        if by_hand == "gone":
            del broker.offsets[there]
        else:
            broker.offsets[there] = 0 if by_hand == "back" else 9
        if by_hand == "ahead":
            with pytest.raises(OffsetError, match=rf"{topic}\[0\]: .*committed offset 9.*kes offsets accept"):
                driver.restart()
            return
        driver.restart()
        driver.send_record(order(topic))
        assert len(seen(driver)) == 7, "nothing is handled twice"
        assert f"{topic}[0]: the group's committed offset is" in caplog.text
        driver.check()


def test_an_input_that_was_cut_is_refused() -> None:
    with TestDriver(build()) as driver:
        for _ in range(3):
            driver.send_record(order(PAYMENTS))
        driver.leave()
        broker = driver._world.broker
        for _ in range(4):
            broker.append(PAYMENTS, 0, b"k", b"{}", None)
        broker.log(PAYMENTS, 0).start = 5
        with pytest.raises(OffsetError, match=r"payments\[0\]: .*at offset 3, but records 3 to 4 are gone"):
            driver.restart()


@pytest.mark.parametrize("behind", ["orders", PAYMENTS])
def test_clocks_of_producers_a_day_apart(behind: str) -> None:
    """Time is a preference: nobody waits a day, and each record comes once."""
    with TestDriver(build()) as driver:
        before, now_ms = driver.now, int(driver.time() * 1000)
        for topic in ("orders", PAYMENTS) * 20:
            driver.send_record(order(topic, at_ms=now_ms - (DAY_MS if topic == behind else 0)), wait=False)
        driver.settle()
        assert [int(text.split()[0]) for text in seen(driver)] == list(range(1, 41))
        assert driver.now - before < 30
        driver.check()


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_what_is_no_event_in_the_loop_has_the_decode_policy() -> None:
    """Of somebody who writes into a topic that is not theirs."""
    with TestDriver(build(loop=True, decode_policy=DEAD_LETTER)) as driver:
        for value, headers in ((b"junk", None), (None, None), (b"junk", [(TYPE_HEADER, b"Ordered")])):
            driver.send_record(Record(LOOP, value, b"k", headers, 0))
        driver.send_record(order(LOOP))
        assert [letter.header("__kes_dlq_topic") for letter in driver.dead_letters()] == [LOOP.encode()] * 3
        assert seen(driver) == [f"1 {LOOP}@3"]
        driver.check()


# -- joined tables -----------------------------------------------------------------------------------------------------


def test_a_handler_keeps_a_row_and_changes_it() -> None:
    shop, kept = Shop(), list[Customer]()

    def spoil(ctx: EventContext[Any], event: Ordered) -> None:
        found = ctx.joined(shop.customers).get(event.customer)
        assert found is not None
        kept.append(found)
        for one in kept:
            one.name = "spoiled"
        shop.placed(ctx, event)

    shop.source._declared.router.routes[b"Ordered"].handler = spoil
    with TestDriver(shop.source) as driver:
        driver.table(CUSTOMERS).put("ann", Customer("Ann"))
        place(driver, "ann", "ann")
        driver.crash()
        driver.restart()
        place(driver, "ann")
        assert seen(driver) == ["ann is Ann"] * 3
        assert rows(driver) | rows(driver, 1) == {b"ann": b'{"name":"Ann"}'}
        driver.check()


def test_rows_of_two_partitioners_are_named_and_none_fits() -> None:
    keys = [f"c{number}".encode() for number in range(40)]
    with TestDriver(Shop().source, start=False) as driver:
        for number, key in enumerate(keys):
            place_of = PARTITIONERS["crc32" if number % 4 == 3 else "murmur2"]
            driver.send_record(Record(CUSTOMERS, b'{"name":"Ann"}', key, None, place_of(key, 2)), wait=False)
        with pytest.raises(TopicError, match=r"belongs to partition . of 2 by murmur2.*none of murmur2, crc32, fnv1a"):
            driver.start()


def test_a_table_that_is_written_on_without_end_holds_up_no_event() -> None:
    """It is read up to the end that it had, and no further, before the first event."""
    with TestDriver(Shop(update).source, start=False) as driver:
        broker, partition = driver._world.broker, partition_of(b"ann", 2)
        names = (b'{"name":"n%d"}' % number for number in itertools.count())
        for _ in range(5):
            broker.append(CUSTOMERS, partition, b"ann", next(names), None)
        place(driver, "ann", wait=False)
        driver.at(
            "commit.after", lambda _: broker.append(CUSTOMERS, partition, b"ann", next(names), None) >= 0, times=40
        )
        driver.start()
        driver.settle()
        texts = seen(driver)
        met = next(number for number, text in enumerate(texts) if text.startswith("ann is"))
        assert 5 <= met < len(texts) - 10, "rows came before it, and many more after it"
        driver.check()


def test_table_and_changelog_are_compacted_between_two_kills() -> None:
    with TestDriver(Shop(update).source) as driver:
        broker = driver._world.broker
        for turn in range(3):
            for name in ("ann", "bob", "ann"):
                driver.table(CUSTOMERS).put(name, Customer(f"{name}{turn}"))
            if turn == 1:
                driver.table(CUSTOMERS).delete("bob")
            driver.crash()
            driver.compact()
            for number in range(2):
                broker.log(CUSTOMERS, number).compact(broker.log(CUSTOMERS, number).end)
            driver.restart()
            place(driver, "ann", "bob")
        assert [text for text in seen(driver) if " is " in text] == [
            "ann is ann0", "bob is bob0", "ann is ann1", "bob is -", "ann is ann2", "bob is bob2",
        ]  # fmt: skip
        assert [text for text in seen(driver) if "bob:" in text] == [
            "bob: - to bob0", "bob: bob0 to bob1", "bob: bob1 to -", "bob: - to bob2",
        ]  # fmt: skip
        driver.check()


@pytest.mark.nightly
def test_four_hundred_partitions() -> None:
    config = EventSourceConfig(group_id="shop", topic="orders", num_partitions=400, loop=True)
    source = EventSource(config, Table.factory(key=str, value=int))
    customers = source.join(CUSTOMERS, key=str, value=Customer)
    source.input(PAYMENTS)

    def placed(ctx: EventContext[Any], event: Ordered) -> None:
        found = ctx.joined(customers).get(event.customer)
        ctx.forward(Record("seen", f"{event.customer} is {found and found.name}".encode(), b"k", partition=0))
        if ctx.topic_partition.topic == "orders":
            ctx.loop(Ordered(event.customer), key=event.customer)

    source.register_event_type(Ordered, placed)
    with TestDriver(source, members=2, start=False) as driver:
        for number in range(400):
            key, value = b"c%d" % number, b'{"name":"n%d"}' % number
            driver.send_record(Record(CUSTOMERS, value, key, None, partition_of(key, 400)), wait=False)
        driver.start()
        place(driver, *(f"c{number}" for number in range(400)), wait=False)
        driver.settle(300.0)
        assert sorted(seen(driver)) == sorted([f"c{number} is n{number}" for number in range(400)] * 2)
        driver.check()
