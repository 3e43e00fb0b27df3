"""Parked keys whose handlers do work ahead of their turn: concurrent handlers, and jobs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from streams import PARK, Retry
from streams.runtime.partition.retirement import Retirement
from streams.runtime.partition.worker import PartitionWorker
from streams.settings import ParkingConfig, SchedulerConfig
from streams.testing import Unsettled
from tests.simulation.member_safeguards import edited_text
from tests.unit.parking_kit import AHEAD, Bank, add, redeploy, send

pytestmark = pytest.mark.usefixtures("quiet")
ways = pytest.mark.parametrize("way", AHEAD)


@ways
@pytest.mark.parametrize("where", ["ahead", "in its turn"])
def test_work_that_ran_ahead_of_an_event_that_queues_has_no_effect(way: str, where: str) -> None:
    bank = Bank(way=way)
    bank.seconds = {7: 2}  # of another key, in front: all that follow have done their work before their turns
    (bank.broken_ahead if where == "ahead" else bank.broken).add(1)
    with bank.driver() as driver:
        send(driver, 7, key="b")
        send(driver, 1, 2, 3)
        driver.advance(1)
        assert bank.calls == ([7, 1] if where == "ahead" else [7, 1, 2, 3])
        driver.settle()
        (parked,) = driver.parked()
        assert [record.offset for record in parked.events] == [1, 2, 3]
        assert dict(driver.store(0).items()) == {"b": (7,)}
        bank.broken_ahead, bank.broken, bank.calls = set(), set(), []
        driver.retry_parked("a")
        driver.settle()
        assert driver.store(0).get("a") == (1, 2, 3)
        assert bank.calls == [1, 2, 3]  # again, in the order of the key
        driver.check()


@ways
def test_no_work_begins_for_events_of_a_parked_key(way: str) -> None:
    bank = Bank(way=way)
    bank.broken_ahead = {1}
    with bank.driver() as driver:
        add(driver, 1)
        add(driver, 2, 3)
        assert bank.calls == [1]
        assert len(driver.parked()[0].events) == 3


@ways
def test_a_head_at_work_holds_up_nothing(way: str) -> None:
    bank = Bank(way=way)
    bank.broken_ahead = {1}
    with bank.driver() as driver:
        add(driver, 1, 2)
        bank.broken_ahead, bank.seconds = set(), {1: 30}
        send(driver)
        driver.advance(40)  # the head is at work
        assert bank.calls == [1, 1]
        send(driver, 5, key="b")
        send(driver, 3)
        driver.advance(1)
        assert dict(driver.store(0).items()) == {"b": (5,)}
        driver.advance(60)
        assert driver.store(0).get("a") == (1, 2, 3)
        assert bank.calls == [1, 1, 5, 2, 3]  # and it was called once
        driver.check()


@ways
def test_an_operator_withdraws_the_work_of_the_head_that_he_lets_go(way: str) -> None:
    bank = Bank(way=way)
    bank.broken_ahead = {1}
    with bank.driver() as driver:
        add(driver, 1, 2)
        bank.broken_ahead, bank.seconds = set(), {1: 1000}
        driver.advance(40)
        assert driver.skip_head("a")
        driver.settle()
        assert bank.cancelled == [1]
        assert driver.store(0).get("a") == (2,)
        driver.check()


@ways
def test_a_head_at_work_has_its_turn_before_its_partition_is_given_up(way: str) -> None:
    bank = Bank(way=way)
    bank.broken_ahead = {1}
    with bank.driver(members=2) as driver:
        add(driver, 1, 2)
        bank.broken_ahead, bank.seconds = set(), {1: 5}
        while bank.calls == [1]:
            driver.advance(1)
        driver.leave(driver.owner(0))
        driver.settle()
        assert driver.store(0).get("a") == (1, 2)
        assert bank.calls == [1, 1, 2]
        driver.check()


@ways
def test_attempts_of_a_head_are_counted_over_work_ahead_and_turns(way: str) -> None:
    bank = Bank(Retry(attempts=4, backoff_seconds=1, jitter=0, waits="key", then=PARK.then), way)
    bank.broken_ahead = {1}
    with bank.driver() as driver:
        add(driver, 1, 2)
        assert driver.parked()[0].attempts == 1
        driver.advance(1.5)
        assert driver.parked()[0].attempts == 2
        bank.broken_ahead, bank.broken = set(), {1}
        driver.advance(2)
        assert driver.parked()[0].attempts == 3
        assert bank.attempts == [(1, 3)]
        redeploy(driver)
        assert driver.parked()[0].attempts == 4
        driver.check()


@ways
def test_the_line_is_held_at_a_bound_and_the_next_owner_takes_it_over_whole(way: str) -> None:
    bank = Bank(way=way, parking=ParkingConfig(max_keys=1))
    bank.broken, bank.broken_ahead = {1}, {2}
    bank.seconds = {1: 0.1}  # until then the others have ended
    with bank.driver(members=2) as driver:
        for number, key in ((1, "a"), (2, "b"), (3, "b"), (4, "c")):
            send(driver, number, key=key)
        driver.advance(1)
        assert driver.statistics(driver.owner(0)).partitions[0].parking_full == "max_keys"
        with suppress(Unsettled):  # the next owner holds the line, too
            driver.leave(driver.owner(0))
        assert dict(driver.store(0).items()) == {}
        bank.broken, bank.broken_ahead = set(), set()
        driver.advance(60)
        driver.settle()
        assert dict(driver.store(0).items()) == {"a": (1,), "b": (2, 3), "c": (4,)}
        driver.check()


@ways
def test_work_that_was_spared_goes_by_the_queue_when_its_key_is_open_again(way: str) -> None:
    bank = Bank(way=way)
    bank.broken_ahead = {1}
    with bank.driver() as driver:
        add(driver, 1)
        bank.broken_ahead, bank.seconds = set(), {7: 60}
        send(driver, 7, key="b")  # holds up the turns of those behind it
        send(driver, 2, 3)  # issued while their key is parked
        driver.advance(40)
        assert driver.store(0).get("a") == (1,)
        assert not driver.parked()
        driver.settle()
        assert driver.store(0).get("a") == (1, 2, 3)
        assert bank.calls == [1, 7, 1, 2, 3]
        driver.check()


def test_a_head_that_finds_no_room_in_its_stage_begins_when_there_is_some() -> None:
    bank = Bank(way="concurrent", concurrency=1, keys=1)
    bank.broken_ahead = {1}
    with bank.driver() as driver:
        for key in "abcd":
            add(driver, 1, 2, key=key)
        bank.broken_ahead = set()
        bank.seconds = {1: 1}
        redeploy(driver)
        assert dict(driver.store(0).items()) == dict.fromkeys("abcd", (1, 2))
        driver.check()


@ways
@pytest.mark.parametrize("slow", [1, 7])
def test_a_key_that_is_parked_while_work_of_it_runs_is_met_at_the_turn(way: str, slow: int) -> None:
    bank = Bank(way=way)
    bank.broken = {101}
    with bank.driver() as driver:
        add(driver, 100)  # sets a timer, which fails in 5 s
        bank.seconds = {slow: 10}
        send(driver, 7, key="b")
        send(driver, 1)
        driver.settle()
        (parked,) = driver.parked()
        assert [record.offset for record in parked.events] == [-1, 2]
        bank.broken = set()
        driver.retry_parked("a")
        driver.settle()
        assert driver.store(0).get("a") == (100, 101, 1)
        driver.check()


def test_the_calls_of_a_job_are_one_attempt_at_its_event() -> None:
    bank = Bank(way="jobs")
    bank.limits = SchedulerConfig(concurrency=4, retry=Retry(attempts=3, backoff_seconds=0.01))
    bank.broken_ahead = {1}
    with bank.driver() as driver:
        add(driver, 1)
        assert bank.calls == [1, 1, 1]
        assert driver.parked()[0].attempts == 1
        driver.retry_parked("a")
        driver.settle()
        assert bank.calls == [1] * 6
        assert driver.parked()[0].attempts == 2


@pytest.mark.parametrize(
    ("owner", "method", "before", "after", "check"),
    [
        (
            Retirement, "_goes_on", "first.record.key in parked", "False",
            lambda: test_a_key_that_is_parked_while_work_of_it_runs_is_met_at_the_turn("jobs", 7),
        ),
        (
            PartitionWorker, "_between", "self._heads.ahead.withdraw_gone()", "pass",
            lambda: test_an_operator_withdraws_the_work_of_the_head_that_he_lets_go("jobs"),
        ),
    ],
    ids=["turns behind the first one pass parked keys", "work of heads that have gone goes on"],
)  # fmt: skip
def test_each_safeguard_is_missed(
    owner: Any, method: str, before: str, after: str, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of which no simulated world misses the loss."""
    monkeypatch.setattr(owner, method, edited_text(getattr(owner, method), before, after))
    with pytest.raises((AssertionError, Unsettled)):
        check()
