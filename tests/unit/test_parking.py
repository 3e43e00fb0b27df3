"""Parked keys over the simulated broker: order per key, attempts, timers, moves."""

from __future__ import annotations

import pytest

from streams import (
    PARK,
    ErrorResponse,
    Retry,
)
from streams.errors import EventFailure
from streams.records import Record
from streams.settings import ParkingConfig
from tests.unit.parking_kit import AHEAD, Add, Bank, add, parked_records, redeploy

pytestmark = pytest.mark.usefixtures("quiet")
ways = pytest.mark.parametrize("way", ["plain", "batch", *AHEAD])


@ways
def test_later_events_of_the_key_wait_and_others_go_on(way: str) -> None:
    bank = Bank(way=way)
    bank.broken = {2}
    with bank.driver() as driver:
        add(driver, 1, 2, 3)
        add(driver, 10, key="b")
        assert dict(driver.store(0).items()) == {"a": (1,), "b": (10,)}
        (parked,) = driver.parked()
        assert [record.offset for record in parked.events] == [1, 2]
        assert (parked.key, parked.attempts, parked.error) == (b"a", 1, "RuntimeError: no 2")
        assert driver.statistics().partitions[0].parked_events == 2
        engine = driver._world.members[0].engine
        assert engine is not None
        (reported,) = engine.status._parked()  # for ``kes group``, ``lag`` and ``doctor``
        assert (reported.partition, reported.keys, reported.events) == (0, 1, 2)
        bank.broken = set()
        driver.advance(40)  # by time
        driver.settle()
        assert not driver.parked()
        assert driver.store(0).get("a") == (1, 2, 3)
        assert [event.number for event in driver.outputs("out", Add)] == [1, 10, 2, 3]
        driver.check()
        assert bank.attempts[-2:] == [(2, 2), (3, 1)]
        assert driver.statistics().handled_events == {"Add": 4}


@ways
def test_a_head_that_fails_again_waits_longer_and_a_success_resets_the_pace(way: str) -> None:
    bank = Bank(way=way, parking=ParkingConfig(first_retry_seconds=10, max_retry_seconds=40))
    bank.broken = {1, 2}
    with bank.driver() as driver:
        add(driver, 1, 2)
        driver.advance(200)
        tries = [attempt for number, attempt in bank.attempts if number == 1]
        assert tries == list(range(1, len(tries) + 1))
        assert 5 <= len(tries) <= 9
        bank.broken = {2}
        driver.retry_parked("a")
        (parked,) = driver.parked()
        assert (parked.attempts, len(parked.events)) == (1, 1)
        assert driver.store(0).get("a") == (1,)
        driver.check()


@ways
def test_attempts_go_on_from_the_queue_of_the_key(way: str) -> None:
    bank = Bank(Retry(attempts=3, backoff_seconds=1, jitter=0, waits="key", then=ErrorResponse.DEAD_LETTER), way)
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1, 2)
        add(driver, 10, key="b")
        assert driver.store(0).get("b") == (10,)
        assert len(driver.parked()[0].events) == 2
        driver.advance(10)
        assert not driver.parked()
        assert [attempt for number, attempt in bank.attempts if number == 1] == [1, 2, 3]
        (letter,) = driver.dead_letters()
        assert (letter.value, letter.header("__kes_dlq_attempts")) == (b'{"number":1,"key":"a"}', b"3")
        assert driver.store(0).get("a") == (2,)
        driver.check()


def test_a_stop_from_the_queue_names_the_command_that_lets_the_head_go() -> None:
    bank = Bank(Retry(attempts=2, backoff_seconds=1, jitter=0, waits="key"))
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1)
        with pytest.raises(EventFailure, match="kes parked skip-head"):
            driver.advance(10)


def test_records_that_cannot_be_read_wait_for_a_new_owner() -> None:
    bank = Bank(decode_policy=PARK)
    with bank.driver() as driver:
        driver.send_record(Record("adds", b"{", b"a", [("__grt__", b"Add")], 0))
        add(driver, 1)
        driver.advance(1000)
        (parked,) = driver.parked()
        assert (parked.attempts, len(parked.events)) == (1, 2)
        redeploy(driver)
        (parked,) = driver.parked()
        assert (parked.attempts, len(parked.events)) == (2, 2)
        assert driver.skip_head("a", dead_letter=True)
        driver.settle()
        assert not driver.parked()
        assert driver.store(0).get("a") == (1,)
        (letter,) = driver.dead_letters()
        assert letter.value == b"{"
        driver.check()


@ways
def test_a_deployed_repair_works_off_all_queues(way: str) -> None:
    bank = Bank(way=way)
    bank.broken = {1}
    with bank.driver() as driver:
        for key in "abcdefgh":
            add(driver, 1, 2, 3, key=key)
        assert len(driver.parked()) == 8
        bank.broken = set()
        redeploy(driver)
        assert not driver.parked()
        assert dict(driver.store(0).items()) == dict.fromkeys("abcdefgh", (1, 2, 3))
        driver.check()
        assert not parked_records(driver)


@ways
def test_queues_come_along_with_the_partition(way: str) -> None:
    bank = Bank(way=way)
    bank.broken = {1}
    with bank.driver(members=2) as driver:
        add(driver, 1, 2)
        before = driver.owner(0)
        driver.leave(before)
        driver.settle()
        assert driver.owner(0) != before
        add(driver, 3)
        (parked,) = driver.parked()
        assert len(parked.events) == 3
        bank.broken = set()
        driver.retry_parked("a")
        assert driver.store(0).get("a") == (1, 2, 3)
        driver.check()


@ways
def test_a_record_without_key_is_parked_alone(way: str) -> None:
    bank = Bank(way=way)
    bank.broken = {1}
    with bank.driver() as driver:
        for _ in range(3):
            driver.send(Add(1), partition=0)
        driver.send(Add(2), partition=0)
        driver.send(Add(3), key=b"", partition=0)
        assert [len(parked.events) for parked in driver.parked()] == [1, 1, 1]
        assert driver.store(0).get("a") == (2, 3)
        bank.broken = set()
        driver.advance(60)
        assert not driver.parked()
        driver.check()


@ways
def test_a_timer_of_a_parked_key_takes_its_place_and_can_still_be_cancelled(way: str) -> None:
    bank = Bank(way=way)
    with bank.driver() as driver:
        add(driver, 100)
        bank.broken = {99}
        add(driver, 99)  # it would cancel the timer
        driver.advance(6)  # the timer is due
        (parked,) = driver.parked()
        assert len(parked.events) == 2
        bank.broken = set()
        driver.retry_parked("a")
        assert not driver.parked()
        assert driver.store(0).get("a") == (100, 99)  # and no 101
        driver.check()


@ways
def test_a_timer_of_a_parked_key_fires_behind_the_events_before_it(way: str) -> None:
    bank = Bank(way=way)
    with bank.driver() as driver:
        add(driver, 100)
        bank.broken = {1}
        add(driver, 1)
        driver.advance(6)
        add(driver, 2)
        assert [record.offset for record in driver.parked()[0].events] == [1, -1, 2]
        redeploy(driver)
        assert [record.offset for record in driver.parked()[0].events] == [1, -1, 2]
        bank.broken = set()
        driver.retry_parked("a")
        assert driver.store(0).get("a") == (100, 1, 101, 2)
        driver.check()


def test_a_timer_that_fails_is_parked_by_reference() -> None:
    bank = Bank()
    with bank.driver() as driver:
        bank.broken = {101}
        add(driver, 100)
        driver.advance(6)
        add(driver, 1)
        (parked,) = driver.parked()
        assert [record.offset for record in parked.events] == [-1, 1]
        assert driver.statistics().partitions[0].timers == 1
        bank.broken = set()
        driver.advance(60)
        assert driver.store(0).get("a") == (100, 101, 1)
        assert driver.statistics().partitions[0].timers == 0
        driver.check()


def test_a_timer_that_an_operator_lets_go_does_not_fire() -> None:
    bank = Bank()
    with bank.driver() as driver:
        bank.broken = {101}
        add(driver, 100)
        driver.advance(6)
        add(driver, 1)
        driver.skip_head("a", dead_letter=True)
        bank.broken = set()
        driver.advance(60)
        assert driver.store(0).get("a") == (100, 1)
        (letter,) = driver.dead_letters()
        assert letter.header("__kes_dlq_timer") == b"t"
        driver.check()
