"""Parked keys of sources with several inputs, a loop, or joined tables: one queue for all records of a key."""

from __future__ import annotations

from typing import Any

import pytest

from streams import DEAD_LETTER, PARK, EventContext, EventSource, EventSourceConfig, Table
from streams.errors import RegistrationError
from streams.records import Record
from streams.settings import ParkingConfig
from streams.testing import TestDriver
from tests.unit.inputs_kit import silence_inputs
from tests.unit.parking_kit import AHEAD, Add, Bank, add, redeploy, send

pytestmark = pytest.mark.usefixtures("quiet")
ways = pytest.mark.parametrize("way", ["plain", *AHEAD])


@ways
def test_a_key_waits_over_all_inputs(way: str) -> None:
    bank = Bank(way=way)
    bank.inputs = {"more": {}}
    bank.broken = {1}
    with bank.driver(members=2) as driver:
        add(driver, 1, topic="more")
        add(driver, 2)
        add(driver, 3, topic="more")
        add(driver, 4, key="b")
        (parked,) = driver.parked()
        assert [(record.topic, record.offset) for record in parked.events] == [("more", 0), ("adds", 0), ("more", 1)]
        driver.leave(driver.owner(0))
        add(driver, 5)
        bank.broken = set()
        driver.retry_parked("a")
        driver.settle()
        assert dict(driver.store(0).items()) == {"a": (1, 2, 3, 5), "b": (4,)}
        assert bank.places[-4:] == ["more[0]@0", "adds[0]@0", "more[0]@1", "adds[0]@2"]  # each as the record it was
        driver.check()


def test_many_records_of_a_parked_key_among_those_of_several_inputs() -> None:
    bank = Bank()
    bank.inputs = {"more": {}}
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1)
        for number in range(2, 40):
            send(driver, number, key="abc"[number % 3], topic=("adds", "more")[number % 2])
        driver.settle()
        bank.broken = set()
        redeploy(driver)
        for place, key in enumerate("abc"):
            there = driver.store(0).get(key) or ()
            for parity in (0, 1):
                expected = [n for n in range(2, 40) if n % 3 == place and n % 2 == parity]
                assert [n for n in there if n % 2 == parity and n > 1] == expected
        driver.check()


def test_an_event_that_waits_for_room_is_not_attempted_again_whatever_its_input() -> None:
    bank = Bank(parking=ParkingConfig(max_keys=1))
    bank.inputs = {"more": {}}
    bank.broken = {1, 2}
    with bank.driver() as driver:
        add(driver, 1)
        send(driver, 2, key="b", topic="more")
        driver.advance(1)
        assert driver.statistics().partitions[0].parking_full == "max_keys"
        assert driver.skip_head("a")
        (parked,) = driver.parked()
        assert (parked.key, parked.attempts) == (b"b", 1)
        assert bank.attempts == [(1, 1), (2, 1)]


def test_the_loop_feeds_its_own_parked_key() -> None:
    bank = Bank(loop=True)
    bank.broken = {5}
    with bank.driver() as driver:
        add(driver, 1005)  # the loop's event fails
        add(driver, 1006, 7)
        (parked,) = driver.parked()
        assert [record.topic for record in parked.events] == ["bank.adds.loop", "adds", "adds"]
        bank.broken = set()
        driver.retry_parked("a")
        driver.settle()
        assert driver.store(0).get("a") == (1005, 5, 1006, 7, 6)  # 6 was sent behind 7's place
        assert not driver.parked()
        driver.check()


def test_a_head_has_the_policy_of_its_own_input() -> None:
    bank = Bank(decode_policy=PARK)
    bank.inputs = {"more": {"nulls": DEAD_LETTER}}
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1)
        driver.send_record(Record("more", None, b"a", [("__grt__", b"Add")], 0))
        add(driver, 2, key="b")  # the other input has its turn
        bank.broken = set()
        driver.retry_parked("a")
        driver.settle()
        assert not driver.parked()
        assert [letter.topic for letter in driver.dead_letters()] == ["bank.adds.dead-letters"]
        driver.check()


def test_the_line_is_held_without_a_look_at_inputs_that_were_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise time would stand still: the end of that wait is over, and nothing new can end it."""
    silence_inputs(monkeypatch)
    bank = Bank(parking=ParkingConfig(max_keys=1), alignment_seconds=3.0)
    bank.inputs = {"more": {}}
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1)
        driver.advance(5)
        add(driver, 2, key="b", topic="more")
        send(driver, 1, key="c")  # waits for the other input
        driver.advance(0.5)
        send(driver, 3, 4, key="b", topic="more")
        driver.advance(10)
        assert driver.statistics().partitions[0].parking_full == "max_keys"
        bank.broken = set()
        driver.advance(60)
        driver.settle()
        assert dict(driver.store(0).items()) == {"a": (1,), "b": (2, 3, 4), "c": (1,)}
        driver.check()


def joining(**settings: Any) -> EventSource[Any]:
    config = EventSourceConfig(group_id="bank", topic="adds", num_partitions=1, error_policy=PARK, **settings)
    source = EventSource(config, store=Table.factory(key=str, value=str))
    rates = source.join("rates", key=str, value=str)

    @source.on
    def on_add(ctx: EventContext[Any], event: Add) -> None:
        rate = ctx.joined(rates).get(event.key)
        if rate is None:
            raise LookupError(f"no rate of {event.key}")
        ctx.store.put(f"{event.key}{event.number}", rate)

    return source


def test_rows_of_a_table_do_not_wait_in_the_queue_of_their_key() -> None:
    with TestDriver(joining) as driver:
        add(driver, 1)  # there is no row yet
        assert len(driver.parked()[0].events) == 1
        driver.send_record(Record("rates", b"5", b"a", None, 0))
        add(driver, 2)
        (parked,) = driver.parked()
        assert [record.topic for record in parked.events] == ["adds", "adds"]
        driver.advance(60)
        assert dict(driver.store(0).items()) == {"a1": "5", "a2": "5"}
        driver.check()


def test_a_row_that_cannot_be_read_is_not_to_be_parked() -> None:
    with pytest.raises(RegistrationError, match="a row of the joined table 'rates'"):
        TestDriver(lambda: joining(decode_policy=PARK))
