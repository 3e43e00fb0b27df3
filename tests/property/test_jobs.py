"""Durable jobs over random histories, against what was started; each safeguard taken out once; and the jobs alone,
against lists.

Jobs are started, cancelled and set again, their receiver fails and hangs, members die, leave, freeze and come back: a
job's end is there once, unless it was cancelled, and each call is of a committed start, under the job's one id.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import Retry
from streams.core.jobs import COUNTER, PREFIX, BrokenJob, JobAction, JobEnd, JobRecord, Jobs, JobState, SeenJob
from streams.core.parking import NEVER_MS
from streams.core.timers import Timer
from streams.core.token_bucket import TokenBucket
from streams.errors import MembershipLost, NotOwned
from streams.records import IncomingRecord
from streams.runtime.changelog import decode_timer, encode_timer, timer_key
from streams.runtime.partition.job_runs import JobRuns
from streams.runtime.partition.timers import PartitionTimers
from streams.settings import TimeoutConfig
from streams.testing import TestDriver, Unsettled
from tests.broker.gate import nightly
from tests.property.kit import seeded, trouble
from tests.simulation.member_safeguards import edited_text
from tests.unit import test_jobs as unit
from tests.unit.jobs_kit import Order, Shop

pytestmark = pytest.mark.usefixtures("quiet")

STEPS = ["send"] * 5 + ["time"] * 4 + ["mend", "crash", "restart", "restart", "leave", "trouble", "trouble", "operate"]


class JobHistory:
    """One random history of a shop's orders."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        retry = Retry(attempts=1000, backoff_seconds=self.chance.choice([0.5, 8]), max_backoff_seconds=20)
        drain = TimeoutConfig(drain_timeout_seconds=2)
        limits = {"concurrency": self.chance.choice([1, 4]), "timeout_seconds": 30}
        self.shop = Shop(retry=retry, ordered=self.chance.random() < 0.7, scheduler=limits, timeouts=drain)
        self.names: dict[int, str] = {}
        self.sent: dict[str, list[int | None]] = {}  # by name: numbers, and ``None`` for a cancel
        self.number = 0

    def run(self, steps: int) -> None:
        with self.shop.driver(members=2, seed=self.chance.getrandbits(30), patience=30) as driver:
            for _ in range(steps):
                with suppress(Unsettled, MembershipLost, NotOwned):
                    self.step(driver, self.chance.choice(STEPS))
            self.shop.broken.clear()
            self.shop.seconds.clear()
            for number in (0, 1):
                with suppress(Exception):
                    driver.thaw(number)
                if number not in driver.members:
                    driver._world.start(number)
            driver.advance(120)
            driver.settle(300)
            self.judge(driver)

    def step(self, driver: TestDriver[Any], what: str) -> None:
        chance = self.chance
        if what == "send":
            for _ in range(chance.choice([1, 1, 2, 5])):
                self.number += 1
                key = chance.choice("ab")
                name = f"{key}{chance.choice('12')}" if chance.random() < 0.5 else f"{key}-{self.number}"
                if chance.random() < 0.15:
                    self.sent.setdefault(name, []).append(None)
                    driver.send(Order(self.number, key, "cancel", name), key=key, wait=False)
                    continue
                if chance.random() < 0.3:
                    self.shop.broken.add(self.number)
                self.shop.seconds[self.number] = chance.choice([0, 0, 0.01, 1, 10, 60])
                self.names[self.number] = name
                self.sent.setdefault(name, []).append(self.number)
                delay = chance.choice([0, 0, 0, 5])
                driver.send(Order(self.number, key, "", name, delay), key=key, wait=False)
        elif what == "mend":
            self.shop.broken -= {number for number in self.shop.broken if chance.random() < 0.5}
        elif what == "time":
            driver.advance(chance.choice([0.01, 0.1, 1, 4, 30]))
        elif what == "crash" and len(driver.members) > 1:
            driver.crash(chance.choice(driver.members))
        elif what == "restart" and len(driver.members) < 2:
            driver._world.start(next(number for number in (0, 1) if number not in driver.members))
        elif what == "leave" and len(driver.members) > 1:
            driver.leave(chance.choice(driver.members))
        elif what == "operate" and driver.jobs():
            driver.retry_job(chance.choice(driver.jobs()).name)
        elif what == "trouble" and driver.members:
            trouble(driver, chance)

    def judge(self, driver: TestDriver[Any]) -> None:
        driver.check()
        assert not driver.jobs()
        there = [*(driver.store(0).get("a") or ()), *(driver.store(0).get("b") or ())]
        assert len(set(there)) == len(there), f"a job has ended twice: {there}"
        assert all(number > 0 for number in there), f"a job has failed for good: {there}"
        for name, numbers in self.sent.items():
            last = numbers[-1]
            if last is not None:
                assert last in there, f"the job {last} ({name}) has no end"
        ids: dict[int, set[str]] = {}
        for number, job_id, _ in self.shop.calls:
            ids.setdefault(number, set()).add(job_id)
        assert all(len(found) == 1 for found in ids.values()), "a job has two ids"
        every = [next(iter(found)) for found in ids.values()]
        assert len(set(every)) == len(every), "two jobs have one id"
        assert set(there) <= ids.keys()
        if self.shop.ordered:
            for key in "ab":
                ended = list(driver.store(0).get(key) or ())
                assert ended == sorted(ended), f"the jobs of {key} have ended as {ended}"


@pytest.mark.parametrize("seed", [*range(8), *(nightly(seed) for seed in range(8, 500))])
def test_any_history_of_jobs_ends_as_it_should(seed: int) -> None:
    JobHistory(seed).run(40)


# -- the safeguards ----------------------------------------------------------------------------------------------------


def history(seed: int) -> Callable[[], None]:
    return lambda: JobHistory(seed).run(40)


JOB_SAFEGUARDS: dict[str, tuple[list[tuple[Any, str, str, str]], Callable[[], None]]] = {
    "a_job_begins_before_the_commit_of_its_start": (
        [
            (PartitionTimers, "admitted", "self._timers.set_aside(name)", "pass"),
            (JobRuns, "attempt", " or name in timers.jobs.unsettled", ""),
        ],
        unit.test_a_job_runs_behind_its_commit_and_its_end_is_an_event,
    ),
    "a_result_is_taken_for_whatever_has_the_name": (
        [
            (JobRuns, "attempt", "if run.number == state.number:", "if True:"),
            (JobRuns, "settled", "record.state.number != run.number", "False"),
        ],
        unit.test_a_name_that_is_set_again_cancels_the_former_job,
    ),
    "each_attempt_has_its_own_id": (
        [(JobRuns, "_begin", "JobRun(state.id, ", "JobRun(f'{state.id}-{state.attempts}', ")],
        history(0),
    ),
    "numbers_are_not_kept": ([(Jobs, "numbered", "made[COUNTER] = self.counter", "pass")], history(0)),
    "jobs_of_an_order_run_side_by_side": (
        [(Jobs, "is_first", "record.lane is None", "True")],
        unit.test_jobs_of_an_order_run_one_after_the_other_over_their_retries,
    ),
    "a_job_that_was_found_runs_without_a_note": (
        [(JobRuns, "attempt", "name in self._found", "False")],
        unit.test_a_job_that_ends_its_process_uses_up_its_attempts,
    ),
    "the_next_of_an_order_is_forgotten": (
        [(JobRuns, "settled", "(*changed, *behind)", "changed")],
        unit.test_jobs_of_an_order_run_one_after_the_other_over_their_retries,
    ),
    "what_is_committed_is_not_looked_at": (
        [(Jobs, "settled", 'self.unsettled.get(name, b"") != value', "True")],
        unit.test_a_job_runs_behind_its_commit_and_its_end_is_an_event,
    ),
    "long_pauses_are_in_memory_only": (
        [(JobRuns, "_failed", "seconds < SHORT_SECONDS", "True")],
        unit.test_long_pauses_survive_and_short_ones_are_in_memory,
    ),
    "a_cancelled_run_goes_on": (
        [(JobRuns, "_cancel", "run.work.cancel()", "pass")],
        unit.test_a_running_job_is_cancelled_behind_the_commit,
    ),
    "an_end_passes_the_queue_of_its_key": (
        [(JobRuns, "_end", "partition.parked.get(due.key)", "None")],
        unit.test_an_end_of_a_parked_key_waits_behind_it,
    ),
    "a_donor_cancels_at_once": (
        [(JobRuns, "drain", "while self._runs and", "while False and")],
        lambda: unit.test_a_move_gives_running_jobs_the_time_of_a_drain(1.0),
    ),
    "jobs_begin_while_the_donor_drains": (
        [(JobRuns, "drain", "self._is_closing = True", "pass"), (JobRuns, "attempt", "self._is_closing or ", "")],
        unit.test_no_job_begins_while_the_donor_drains,
    ),
    "the_bound_holds_up_no_input": (
        [(PartitionTimers, "_bound_jobs", "self.jobs_full = name", "pass")],
        unit.test_at_its_bound_the_partition_takes_no_input_and_ends_go_on,
    ),
    "the_counter_does_not_move": (
        [(PartitionTimers, "contents", " if self.jobs.next else there", " if False else there")],
        lambda: unit.test_a_warm_move_and_back_keeps_jobs_and_parked_keys(parks=False),
    ),
}


@pytest.mark.parametrize("name", JOB_SAFEGUARDS)
def test_each_safeguard_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edits, check = JOB_SAFEGUARDS[name]
    for owner, method, before, after in edits:
        monkeypatch.setattr(owner, method, edited_text(getattr(owner, method), before, after))
    with pytest.raises(BaseException):  # noqa: B017, PT011 - whatever finds it
        check()


# -- the jobs alone ----------------------------------------------------------------------------------------------------

operations = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "again", "end", "fail", "park", "settle", "settle", "restore", "act"]),
        st.integers(0, 3),
    ),
    max_size=60,
)


@given(operations)
@seeded
def test_jobs_are_lists(steps: list[tuple[str, int]]) -> None:
    jobs, log, lines = Jobs(), dict[str, bytes](), list[dict[str, bytes | None]]()
    lanes: dict[bytes, list[int]] = {}
    started, clock = 0, 7

    def change(changes: dict[str, Timer | None]) -> list[str]:
        numbered = jobs.numbered(changes, "kes-1-0")
        encoded = {name: None if timer is None else encode_timer(timer) for name, timer in numbered.items()}
        lines.append(encoded)
        return jobs.apply(numbered, encoded)

    for what, which in steps:
        name = f"{PREFIX}{which}"
        record = jobs.by_name.get(name)
        lane = b"%d" % (which % 2)
        if what == "start" or (what == "again" and record is not None):
            state = JobState("deliver", b"item", 1, order=lane if which else None)
            assert change({name: JobRecord.of(name, 5, state, b"k")}) == [name]
            assert jobs.by_name[name].state.id == f"kes-1-0-{started}"
            started += 1
        elif what == "settle" and lines:
            committed = lines.pop(0)
            log |= {name: value for name, value in committed.items() if value is not None}
            for gone in [name for name, value in committed.items() if value is None]:
                log.pop(gone, None)
            changed, behind = jobs.settled(committed)
            assert {*changed} <= committed.keys()
            assert all(jobs.by_name.get(one) is None or jobs.is_first(jobs.by_name[one]) for one in behind)
        elif what == "restore" and not lines:
            timers = [decode_timer(IncomingRecord("log", 0, 1, timer_key(at), log[at], None))[1] for at in log]
            restored = Jobs(timer for timer in timers if timer is not None)
            assert restored.by_name == jobs.by_name
            assert (restored.counts.get("deliver", 0), restored.size) == (jobs.counts.get("deliver", 0), jobs.size)
            assert (restored.next, restored.parked) == (jobs.next, jobs.parked)
            jobs = restored
        elif record is not None and what == "end":
            assert change({name: None, "other": None}) == []
        elif record is not None and what in ("fail", "park"):
            change({name: record.changed(NEVER_MS, attempts=record.state.attempts + 1, parked=what == "park")})
        elif record is not None and what == "act":
            action: JobAction = "cancel" if (record.state.number + which) % 2 else "retry"
            seen = SeenJob(name, record.state.number, record.state.since_ms)
            assert jobs.acted(seen._replace(number=seen.number + 1), action, clock) is None
            acted, clock = jobs.acted(seen, action, clock), clock + 1
            assert (acted is None) is record.state.cancelled
            if acted is not None:
                jobs.set(acted)
                change({name: acted})
                assert jobs.acted(seen, action, clock) is None  # a request that is repeated
        there = list(jobs.by_name.values())
        assert jobs.figures()[:2] == (len(there), sum(one.state.parked for one in there))
        assert jobs.size == sum(len(one.state.item) for one in there)
        lanes = {}
        for one in there:
            lanes.setdefault(one.state.order or b"", []).append(one.state.number)
            assert one.lane is not None or jobs.is_first(one)
        for order, numbers in lanes.items():
            first = [one for one in there if one.state.order == order and jobs.is_first(one)]
            assert order == b"" or [one.state.number for one in first] in ([], [min(numbers)])
    while lines:
        jobs.settled(lines.pop(0))
    assert not jobs.unsettled
    for one in jobs.by_name.values():
        numbers = [other.state.number for other in jobs.by_name.values() if other.lane == one.lane]
        assert jobs.is_first(one) is (one.lane is None or one.state.number == min(numbers))


def record_of(number: int, name: str = "n") -> JobRecord:
    return JobRecord.of(PREFIX + name, 5, JobState("deliver", b"1", 1, number, f"kes-{number}"), b"k")


@pytest.mark.parametrize("action", ["retry", "cancel"])
def test_an_act_is_for_the_start_that_was_seen_and_carried_out_once(action: JobAction) -> None:
    parked = JobState("deliver", b"item", 1, number=0, attempts=3, error="no answer", parked=True)
    counter = Timer(COUNTER, NEVER_MS, "kes.jobs", b'{"next":1}')
    jobs = Jobs([JobRecord.of(f"{PREFIX}n", NEVER_MS, parked, None), counter])
    seen = SeenJob(f"{PREFIX}n", 0, 1)
    assert jobs.acted(seen._replace(name=f"{PREFIX}other"), action, 9) is None
    assert jobs.acted(seen._replace(number=1), action, 9) is None
    acted = jobs.acted(seen, action, 9)
    assert acted is not None
    assert (acted.due_ms, acted.state.cancelled, acted.state.attempts) == (
        9, action == "cancel", 3 if action == "cancel" else 0,
    )  # fmt: skip
    jobs.set(acted)
    assert jobs.acted(seen, action, 10) is None


def test_records_that_do_not_belong_together_are_refused_by_name() -> None:
    counter = Timer(COUNTER, NEVER_MS, "kes.jobs", b'{"next":3}')
    assert Jobs([counter, record_of(2)]).next == 3
    for records in ([record_of(2)], [counter, record_of(3)], [counter, record_of(-1)]):
        with pytest.raises(BrokenJob, match=r"job 'n' .* has the number"):
            Jobs(records)
    for broken in (Timer(COUNTER, 0, "", b"{"), Timer(PREFIX + "n", 0, "", b"\xff")):
        with pytest.raises(BrokenJob, match="cannot be read"):
            Jobs([counter, broken])


@given(st.binary(max_size=20), st.none() | st.binary(max_size=20), st.text(max_size=20))
@seeded
def test_the_end_of_a_job_comes_back_from_a_queue(item: bytes, result: bytes | None, failure: str) -> None:
    record = JobRecord.of(PREFIX + "n", 5, JobState("deliver", item, 1, 7, "kes-7"), b"k")
    end = JobEnd.of_record(record, result, failure)
    back = JobEnd.of_queued(end.queued)
    assert (back.job_name, back.state.id, back.state.jobs, back.key) == ("n", "kes-7", "deliver", b"k")
    assert (back.value, back.result, back.failure) == (item, result, failure)
    assert back.origin == record.origin
    assert back.facts == {"job": "n", "jobs": "deliver", "job_id": "kes-7"}
    assert "kes-7" in back.title


def test_a_waiting_job_has_its_item_once_in_memory() -> None:
    item = b"x" * 1000
    record = JobRecord.of(PREFIX + "n", 5, JobState("deliver", item, 1, 7, "kes-7"), b"k")
    assert record.value == b""
    assert record.state.item is item
    changelog = IncomingRecord("", 0, 0, timer_key(record.name), encode_timer(record), None)
    found = decode_timer(changelog)[1]
    assert found is not None
    for there in (found, record):  # from the changelog, or handed over in memory
        assert Jobs([Timer(COUNTER, NEVER_MS, "kes.jobs", b'{"next":8}'), there]).by_name == {record.name: record}


def test_a_bucket_gives_so_many_tokens_a_second() -> None:
    bucket, begun, now = TokenBucket(2.0, 0.0), list[float](), 0.0
    while now < 10:
        seconds = bucket.seconds_to_token(now)
        if seconds:
            now += seconds
        else:
            bucket.take()
            begun.append(now)
    assert begun[:2] == [0, 0]
    assert len(begun) == 21
    assert TokenBucket(0.5, 0.0).seconds_to_token(-5) == 0
