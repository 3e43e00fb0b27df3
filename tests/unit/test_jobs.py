"""Durable jobs: calls at least once with one id, ends exactly once in the order of the partition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, PARK, SKIP, EventFailure, Retry
from streams.core.jobs import COUNTER
from streams.looks.letter_choice import problems_of
from streams.looks.letters import Letter
from streams.records import Record
from streams.settings import GroupConfig, TimeoutConfig
from tests.unit.jobs_kit import LONG, Call, Order, Shop, job_records, order

pytestmark = pytest.mark.usefixtures("quiet")


def numbers(shop: Shop) -> list[int]:
    return [number for number, _, _ in shop.calls]


def test_a_job_runs_behind_its_commit_and_its_end_is_an_event() -> None:
    shop = Shop()
    committed = [False]
    with shop.driver() as driver:
        driver.at("commit.before", lambda _: committed.append(bool(shop.calls)))
        order(driver, 1)
        assert committed[1:] == [False]  # no call for an event that is not committed
        assert numbers(shop) == shop.answered == [1]
        assert driver.store(0).get("a") == (1,)
        assert [call.number for call in driver.outputs("ends", Call)] == [1]
        assert list(job_records(driver)) == [COUNTER]  # which is never removed
        driver.check()


def test_a_failed_event_starts_no_job() -> None:
    shop = Shop(error_policy=SKIP)
    with shop.driver() as driver:
        order(driver, 1, act="fail")
        order(driver, 2)
        assert numbers(shop) == [2]


def test_an_aborted_transaction_is_sent_again_and_its_job_begins_once() -> None:
    shop = Shop()
    with shop.driver() as driver:
        driver.abort()
        order(driver, 1)
        driver.lose_reply("commit")
        order(driver, 2)
        assert numbers(shop) == shop.answered == [1, 2]


@pytest.mark.parametrize("point", ["commit.before", "commit.after", "handler.after", "flush.after"])
@pytest.mark.parametrize("skip", [0, 1])
def test_killed_at_any_step_a_job_has_one_end_and_one_id(point: Any, skip: int) -> None:
    shop = Shop()
    with shop.driver(members=2) as driver:
        driver.at(point, driver.crash, skip=skip)  # the second time it is the end of the job
        order(driver, 1, wait=False)
        driver.settle()
        if len(driver.members) < 2:
            driver.restart()
        order(driver, 2)
        assert driver.store(0).get("a") == (1, 2)
        assert [call.number for call in driver.outputs("ends", Call)] == [1, 2]
        ids = {number: {job_id for of, job_id, _ in shop.calls if of == number} for number in (1, 2)}
        assert all(len(found) == 1 for found in ids.values())
        driver.check()


def test_a_job_that_ends_its_process_uses_up_its_attempts() -> None:
    shop = Shop(retry=Retry(attempts=2, backoff_seconds=1, jitter=0))
    deaths = 0
    with shop.driver() as driver:
        shop.seconds[1] = 1000
        driver.send(Order(1), key="a", wait=False)
        for _ in range(6):
            driver.advance(20)
            if driver.jobs() and driver.jobs()[0].is_running:
                driver._world.members[0].crash()
                deaths += 1
                driver._world.start(0)
        driver.settle()
        assert deaths == 3  # its attempts, and one more
        assert shop.failed == [(1, "JobFailed: the process that ran it has ended")]


def test_a_job_that_was_found_is_noted_before_it_runs() -> None:
    shop = Shop()
    with shop.driver() as driver:
        shop.seconds[1] = 1000
        driver.send(Order(1), key="a", wait=False)
        driver.advance(1)
        assert not job_records(driver)["@0/0"].value.count(b"noted")
        driver._world.members[0].crash()
        driver._world.start(0)
        driver.advance(60)
        assert len(shop.calls) == 2
        assert job_records(driver)["@0/0"].value.count(b"noted")


def test_long_pauses_survive_and_short_ones_are_in_memory() -> None:
    shop = Shop(retry=LONG)
    shop.broken = {1}
    with shop.driver() as driver:
        order(driver, 1)
        assert driver.jobs()[0].attempts == 1
        driver.leave()
        driver.restart()
        assert numbers(shop) == [1]  # the pause goes on
        shop.broken.clear()
        driver.advance(601)
        assert [attempt for _, _, attempt in shop.calls] == [1, 2]
        assert shop.answered == [1]


def test_the_time_of_a_retry_counts_from_the_start() -> None:
    shop = Shop(retry=msgspec.structs.replace(LONG, attempts=100, timeout_seconds=3600))
    shop.broken = {1}
    with shop.driver() as driver:
        order(driver, 1)
        for _ in range(4):
            driver.leave()
            driver.restart()
            driver.advance(900)
        assert shop.failed == [(1, "ConnectionError: no answer to 1")]
        assert not driver.jobs()


def test_jobs_of_an_order_run_one_after_the_other_over_their_retries() -> None:
    shop = Shop()
    shop.broken = {1}
    shop.seconds = {1: 0.1, 2: 0.1, 3: 0.1}
    with shop.driver() as driver:
        order(driver, 1, 2, wait=False)
        order(driver, 3, key="b", wait=False)
        driver.advance(0.9)
        assert numbers(shop) == [1, 3]  # 2 waits for the retries of 1, and 3 does not
        driver.advance(10)
        assert numbers(shop) == [1, 3, 1, 1, 2]
        assert driver.store(0).get("a") == (-1, 2)


def test_jobs_without_an_order_run_side_by_side() -> None:
    shop = Shop(ordered=False, scheduler={"concurrency": 2})
    shop.seconds = dict.fromkeys(range(5), 1.0)
    with shop.driver() as driver:
        order(driver, 0, 1, 2, 3, 4)
        assert shop.most_running == 2
        driver.advance(5)
        assert sorted(shop.answered) == [0, 1, 2, 3, 4]


def test_events_of_the_key_go_on_while_a_job_runs() -> None:
    shop = Shop()
    shop.seconds = {1: 100}
    with shop.driver() as driver:
        driver.send(Order(1), key="a", wait=False)
        driver.advance(1)
        assert driver.committed_offsets()[0] > 0
        assert driver.jobs()[0].is_running


def test_delay_and_rate() -> None:
    shop = Shop(ordered=False, scheduler={"rate_per_second": 2.0, "concurrency": 100})
    with shop.driver() as driver:
        order(driver, 1, delay=60)
        assert not shop.calls
        driver.advance(61)
        assert numbers(shop) == [1]
        driver.advance(10)
        order(driver, *range(2, 10), wait=False)
        driver.advance(0.4)
        assert len(shop.calls) == 3  # those of one second at once
        driver.advance(2)
        assert 6 <= len(shop.calls) <= 8
        driver.advance(5)
        assert len(shop.calls) == 9


# -- cancelling, and setting again -------------------------------------------------------------------------------------


def test_a_name_that_is_set_again_cancels_the_former_job() -> None:
    shop = Shop()
    shop.seconds = {1: 100}
    with shop.driver() as driver:
        order(driver, 1, name="n", wait=False)
        driver.advance(1)
        order(driver, 2, name="n")
        assert shop.cancelled == [1]
        assert shop.answered == [2]
        assert len({job_id for _, job_id, _ in shop.calls}) == 2


@pytest.mark.parametrize("seconds", [0.0, 0.02, 100.0])
def test_a_cancelled_job_has_no_end(seconds: float) -> None:
    shop = Shop()
    shop.seconds = {1: seconds}
    with shop.driver() as driver:
        driver.send(Order(1, name="n"), key="a", wait=False)
        driver.send(Order(1, act="cancel", name="n"), key="a", wait=False)
        driver.advance(2)
        assert not driver.jobs()
        assert shop.answered == []
        assert shop.failed == []
        assert shop.running == 0


def test_a_running_job_is_cancelled_behind_the_commit() -> None:
    shop = Shop()
    shop.seconds = {1: 100}
    with shop.driver() as driver:
        driver.send(Order(1, name="n"), key="a", wait=False)
        driver.advance(1)
        driver.at("commit.before", lambda _: shop.cancelled.append(-1))
        order(driver, 1, act="cancel", name="n")
        assert shop.cancelled == [-1, 1]
        assert shop.answered == shop.failed == []


def test_an_operator_cancels_and_retries() -> None:
    shop = Shop(retry=LONG)
    shop.broken = {1, 2}
    with shop.driver() as driver:
        order(driver, 1, name="one")
        order(driver, 2, name="two", key="b")
        assert driver.cancel_job("one")
        assert shop.failed == [(1, "JobCancelled: an operator has cancelled the job")]
        shop.broken.clear()
        assert driver.retry_job("two")
        assert shop.answered == [2]
        assert not driver.cancel_job("two")
        assert not driver.jobs()


# -- the end -----------------------------------------------------------------------------------------------------------


def test_an_end_of_a_parked_key_waits_behind_it() -> None:
    shop = Shop(decode_policy=PARK)
    with shop.driver() as driver:
        shop.seconds = {1: 5}
        driver.send(Order(1), key="a", wait=False)
        driver.advance(1)
        driver.send_record(Record("orders", b"\xff", b"a", [("__grt__", b"Order")], 0), wait=False)  # unreadable
        driver.advance(10)
        assert len(driver.parked()[0].events) == 2
        assert shop.answered == []
        assert not driver.jobs()
        driver.leave()
        driver.restart()
        assert driver.skip_head("a")
        assert shop.answered == [1]
        assert len(shop.calls) == 1
        driver.check()


def test_a_finalizer_that_fails_parks_the_end_and_a_repair_works_it_off() -> None:
    shop = Shop(retry=None)
    shop.on_error = PARK
    shop.finalizer_broken = {1}
    with shop.driver() as driver:
        order(driver, 1)
        order(driver, 2)
        assert not driver.jobs()
        assert len(driver.parked()) == 1
        assert driver.parked()[0].events[0].offset == -1
        shop.finalizer_broken.clear()
        driver.leave()
        driver.restart()
        driver.settle()
        assert shop.answered == [1, 2]
        assert driver.store(0).get("a") == (1, 2)
        assert numbers(shop) == [1, 2]  # no further call
        driver.check()


def test_without_on_failure_the_job_is_parked_and_its_key_goes_on() -> None:
    shop = Shop(retry=None)
    shop.takes_failures = False
    shop.on_error = PARK
    shop.broken = {1}
    with shop.driver() as driver:
        order(driver, 1, name="n")
        order(driver, 2, key="b")
        driver.advance(1_000)
        assert driver.jobs()[0].is_parked
        assert numbers(shop) == [1, 2]
        assert not driver.parked()
        driver.leave()
        driver.restart()
        assert numbers(shop) == [1, 2]
        shop.broken.clear()
        driver.retry_job("n")
        assert shop.answered == [2, 1]


@pytest.mark.parametrize("policy", [SKIP, DEAD_LETTER])
def test_other_last_words_let_the_job_go(policy: Retry) -> None:
    shop = Shop(retry=None)
    shop.takes_failures = False
    shop.on_error = policy
    shop.broken = {1}
    with shop.driver() as driver:
        order(driver, 1, 2)
        assert shop.answered == [2]
        letters = driver.dead_letters()
        assert len(letters) == (policy is DEAD_LETTER)
        if letters:
            assert letters[0].header("__kes_dlq_handler") == b"tests.unit.jobs_kit.Shop.deliver"
            assert letters[0].value == b'{"number":1,"key":"a"}'
            box: Any = SimpleNamespace(partitions=lambda topic: 1)
            [problem] = problems_of(box, [Letter(letters[0], 0, False)], {}, None)
            job_id = shop.calls[0][1]
            assert f"it is the end of a durable job (deliver, {job_id}), and no event: send an event" in problem


def test_a_stop_meets_the_job_again() -> None:
    shop = Shop(retry=None)
    shop.takes_failures = False
    shop.broken = {1}
    driver = shop.driver()
    with driver:
        order(driver, 1, wait=False)
        with pytest.raises(EventFailure, match="job '@0/0'"):
            driver.advance(5)
        shop.broken.clear()
        driver.restart()
        assert shop.answered == [1]


# -- moves -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [1.0, 100.0])
def test_a_move_gives_running_jobs_the_time_of_a_drain(seconds: float) -> None:
    shop = Shop(num_partitions=2, timeouts=TimeoutConfig(drain_timeout_seconds=3), scheduler={"timeout_seconds": None})
    shop.seconds = {1: seconds, 2: seconds}
    with shop.driver() as driver:
        driver.send(Order(1), partition=0, key="a", wait=False)
        driver.send(Order(2), partition=1, key="a", wait=False)
        driver.advance(0.5)
        driver._world.start(1)
        driver.advance(250)
        assert sorted(shop.answered) == [1, 2]
        assert len(shop.calls) == (2 if seconds == 1.0 else 3)
        assert len({job_id for _, job_id, _ in shop.calls}) == 2
        assert [list(job_records(driver, number)) for number in (0, 1)] == [[COUNTER]] * 2


def test_no_job_begins_while_the_donor_drains() -> None:
    shop = Shop(ordered=False, timeouts=TimeoutConfig(drain_timeout_seconds=3))
    shop.seconds = {1: 2.0}
    with shop.driver() as driver:
        driver.send(Order(1), key="a", wait=False)
        driver.send(Order(2, delay=1.0), key="a", wait=False)
        driver.advance(0.5)
        driver.leave()
        assert numbers(shop) == shop.answered == [1]  # events go on, and so does the end of what ran
        driver.restart()
        driver.advance(5)
        assert shop.answered == [1, 2]


@pytest.mark.parametrize("parks", [False, True])
def test_a_warm_move_and_back_keeps_jobs_and_parked_keys(parks: bool) -> None:
    shop = Shop(num_partitions=2, retry=LONG, error_policy=PARK, group=GroupConfig(num_standbys=1))
    shop.broken = {1, 2}
    with shop.driver() as driver:
        for partition in (0, 1):
            driver.send(Order(1 + partition), partition=partition, key="a", wait=False)
            if parks:
                driver.send(Order(9, "p", act="fail"), partition=partition, key="p", wait=False)
        driver.settle()
        driver.join()  # the donor keeps a copy of what it hands over
        driver.leave(1)
        assert len(driver.jobs()) == 2
        assert len(driver.parked()) == 2 * parks
        driver.leave(0)
        driver.restart(0)
        driver.check()


def test_a_lost_owner_uses_no_answer() -> None:
    shop = Shop()
    shop.seconds = {1: 20}
    with shop.driver(members=2) as driver:
        driver.send(Order(1), key="a", wait=False)
        driver.advance(1)
        driver.freeze(driver.owner(0), 60)
        driver.advance(200)
        assert driver.store(0).get("a") == (1,)
        assert len(driver.outputs("ends")) == 1
        assert len({job_id for _, job_id, _ in shop.calls}) == 1
        driver.check()


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_at_its_bound_the_partition_takes_no_input_and_ends_go_on() -> None:
    shop = Shop(ordered=False, scheduler={"max_jobs": 3, "concurrency": 100})
    shop.seconds = dict.fromkeys(range(100), 5.0)
    with shop.driver() as driver:
        for number in range(300):
            driver.send(Order(number), key="a", wait=False)
        driver.advance(1)
        assert driver.statistics().partitions[0].jobs_full == "deliver"
        there = driver.statistics().partitions[0].jobs
        assert 3 <= there < 300
        driver.advance(600)
        assert sorted(shop.answered) == list(range(300))
        assert driver.statistics().partitions[0].jobs_full == ""


def test_when_full_fails_only_the_events_that_want_more_fail() -> None:
    shop = Shop(ordered=False, error_policy=DEAD_LETTER, scheduler={"max_jobs": 2, "when_full": "fail"})
    shop.seconds = dict.fromkeys(range(10), 1000.0)
    with shop.driver() as driver:
        for number in range(4):
            driver.send(Order(number), key="a", wait=False)
        driver.advance(5)
        assert len(driver.dead_letters()) == 2
        assert b"JobsFull" in dict(driver.dead_letters()[0].headers or ()).values()


def test_a_job_that_is_replaced_at_the_bound_makes_room() -> None:
    shop = Shop(ordered=False, error_policy=DEAD_LETTER, scheduler={"max_jobs": 1, "when_full": "fail"})
    shop.seconds = {1: 1000.0}
    with shop.driver() as driver:
        order(driver, 1, name="n", wait=False)
        driver.advance(1)
        order(driver, 2, name="n")
        assert shop.answered == [2]
        assert not driver.dead_letters()
