"""Durable jobs that cannot be, or are wanted no more; spoilt records and definitions that are gone: nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, PARK, SKIP, AsyncJobScheduler, EventContext, EventFailure, EventSource, Retry
from streams import EventSourceConfig as Config
from streams.core.jobs import COUNTER, PREFIX, Jobs
from streams.errors import ConfigError, OffsetError, RegistrationError
from streams.metrics import DurableJobEnded
from streams.runtime.changelog import encode_timer, timer_key
from streams.runtime.partition.job_runs import JobRun
from streams.settings import SchedulerConfig
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse
from tests.unit.jobs_kit import LONG, Call, Order, Shop, job_records, order

pytestmark = pytest.mark.usefixtures("quiet")


def test_many_jobs_of_one_event_are_counted_once() -> None:
    """By the time of the processor: each start had looked through those before it."""
    took = list[float]()

    def source() -> EventSource[Any]:
        source: EventSource[Any] = EventSource(Config(group_id="shop", topic="orders", num_partitions=1))

        async def call(number: int) -> int:
            return number

        limits = SchedulerConfig(concurrency=4, when_full="fail")
        jobs: Any = AsyncJobScheduler(source, call, lambda ctx, number, result: None, config=limits)

        @source.on
        def on_order(ctx: EventContext[Any], event: Order) -> None:
            began = time.thread_time()
            for number in range(event.number):
                ctx.start_job(jobs, number, order=None)
            took.append(time.thread_time() - began)

        return source

    with TestDriver(source) as driver:
        driver.send(Order(8_000), key="a")
        assert took[0] < 2, "they took 8 s and more"
        assert driver.jobs() == []


def test_a_definition_that_is_gone_leaves_its_jobs_waiting() -> None:
    shop = Shop(retry=LONG)
    shop.broken = {1}
    with shop.driver() as driver:
        order(driver, 1, name="n")
        order(driver, 2, name="m", key="b", delay=700)
        driver.leave()
        shop.defines_jobs = False
        driver.restart()
        driver.advance(900)
        assert len(driver.jobs()) == 2
        driver.cancel_job("n")
        assert [job.name for job in driver.jobs()] == ["m"]
        driver.leave()
        shop.defines_jobs = True
        driver.restart()
        driver.settle()
        assert shop.answered == [2]


@pytest.mark.parametrize(("act", "answered"), [("cancel", [2]), ("", [2, 3])])
def test_a_handler_lets_a_parked_job_go_and_a_deployment_does_not(act: str, answered: list[int]) -> None:
    shop = Shop(retry=None)
    shop.takes_failures, shop.on_error, shop.broken = False, PARK, {1}
    with shop.driver() as driver:
        order(driver, 1, name="n")
        order(driver, 2)  # of the same order
        driver.leave()
        shop.takes_failures, shop.on_error = True, None
        shop.broken.clear()
        driver.restart()
        driver.advance(1_000)
        assert driver.jobs()[0].is_parked
        assert [number for number, _, _ in shop.calls] == [1]
        order(driver, 3, act=act, name="n")
        assert shop.answered == answered
        assert len({job_id for _, job_id, _ in shop.calls}) == 1 + len(answered)
        assert shop.failed == []
        assert not driver.jobs()


def source_of(job: Any, **options: Any) -> tuple[EventSource[None], Any]:
    source = EventSource(Config(group_id="g", topic="t", num_partitions=1))
    jobs: Any = AsyncJobScheduler(source, job, lambda ctx, item, result: None, **options)
    return source, jobs


async def plain(item: int) -> int:
    await elapse(0)
    return item


async def no_types(item):  # type: ignore[no-untyped-def]
    return item


async def unwritable(item: int) -> object:
    return object()


async def large(item: int) -> bytes:
    return b"x" * 300_000


def start(source: EventSource[Any], jobs: Any, item: object, **options: Any) -> TestDriver[Any]:
    @source.on
    def on_order(ctx: EventContext[None], event: Order) -> None:
        ctx.start_job(jobs, item, **options)

    return TestDriver(source)


@pytest.mark.parametrize(
    ("job", "item", "options", "error"),
    [
        (no_types, 1, {}, "has no annotation for the item"),
        (plain, "x" * 10, {}, "cannot be encoded|expected"),
        (plain, 1, {"delay": -1}, "0 or more"),
        (plain, 1, {"delay": "soon"}, "0 or more"),
        (plain, 1, {"name": "@mine"}, "does not begin with @"),
        (plain, 1, {"name": ""}, "a job's name"),
        (plain, 1, {"key": 5}, "the key of a job is a int"),
        (plain, 1, {"order": 5}, "the order of a job is a int"),
    ],
)
def test_what_cannot_be_started_fails_the_event_by_name(job: Any, item: object, options: Any, error: str) -> None:
    source, jobs = source_of(job)
    with start(source, jobs, item, **options) as driver, pytest.raises(EventFailure, match=error):
        driver.send(Order(1), key="a")


def test_other_sources_jobs_and_two_of_one_name_are_refused() -> None:
    source, _ = source_of(plain)
    _, foreign = source_of(plain)
    with start(source, foreign, 1) as driver, pytest.raises(EventFailure, match="another"):
        driver.send(Order(1), key="a")
    source, jobs = source_of(plain)
    AsyncJobScheduler(source, plain)
    with start(source, jobs, 1) as driver, pytest.raises(EventFailure, match="give each a name="):
        driver.send(Order(1), key="a")
    source, _ = source_of(plain)
    with start(source, "jobs", 1) as driver, pytest.raises(EventFailure, match="takes an AsyncJobScheduler"):
        driver.send(Order(1), key="a")


@pytest.mark.parametrize(("job", "error"), [(unwritable, "cannot be"), (large, "has 300000 bytes|300002 bytes")])
def test_results_that_cannot_be_kept_are_failed_attempts(job: Any, error: str) -> None:
    found: list[str] = []
    source, jobs = source_of(job, on_failure=lambda ctx, item, reason: found.append(str(reason)))
    with start(source, jobs, 1) as driver:
        if job is unwritable:
            with pytest.raises(EventFailure, match="cannot be durable"):
                driver.send(Order(1), key="a")
            return
        driver.send(Order(1), key="a")
        driver.settle()
    assert len(found) == 1
    assert "bytes" in found[0]


def test_an_item_that_is_too_large_is_refused_in_the_handler() -> None:
    async def keep(item: bytes) -> None: ...

    source, jobs = source_of(keep)
    with start(source, jobs, b"x" * 300_000) as driver, pytest.raises(EventFailure, match="at most 262144"):
        driver.send(Order(1), key="a")


@pytest.mark.parametrize(
    "more", [{"rate_per_second": 0}, {"rate_per_second": "x"}, {"max_jobs": 0}, {"when_full": "drop"}]
)
def test_settings_are_checked(more: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(more))):
        SchedulerConfig(concurrency=1, **more)


def test_registration_refuses_by_name_what_cannot_be() -> None:
    async def run_taker(item: int, run: JobRun) -> None: ...

    source, jobs = source_of(run_taker)
    with pytest.raises(RegistrationError, match=r"start it with ctx\.start_job"):
        jobs.register_event_type(Order, key=lambda event: event.key)
    with pytest.raises(RegistrationError, match="on_error is 5"):
        source_of(plain, on_error=5)
    last: Any = AsyncJobScheduler(source, plain, name="last")
    first: Any = AsyncJobScheduler(source, plain, then=last, name="first")
    with start(source, first, 1) as driver, pytest.raises(EventFailure, match="they have `then`"):
        driver.send(Order(1), key="a")


def test_records_that_are_spoilt_stop_the_partition_by_name() -> None:
    shop = Shop(retry=LONG)
    shop.broken = {1}
    with shop.driver() as driver:
        order(driver, 1, name="n")
        driver.leave()
        world, zero = driver._world, encode_timer(Jobs().counter)
        world.broker.append(world.config.changelog, 0, timer_key(COUNTER), zero, None)
        with pytest.raises(OffsetError, match=r"the jobs in the changelog are broken.*has the number 0, and the next"):
            driver.restart()


def test_measurements_name_the_ends() -> None:
    seen: list[DurableJobEnded] = []
    shop = Shop(retry=None, metrics_handler=lambda one: seen.append(one) if isinstance(one, DurableJobEnded) else None)
    shop.broken = {2}
    with shop.driver() as driver:
        order(driver, 1, 2)
    assert [one.outcome for one in seen] == ["done", "failed"]


class GatedShop(Shop):
    """The call of number 1 ends when ``gate`` is set."""

    gate: asyncio.Event

    async def deliver(self, call: Call, run: JobRun) -> str:
        if call.number == 1:
            await self.gate.wait()
        return await super().deliver(call, run)


@pytest.mark.parametrize("act", ["cancel", ""])
def test_a_run_that_ends_before_its_cancellation_is_committed(act: str) -> None:
    """Its answer is used for nothing, and the job that takes its name keeps its delay."""
    shop = GatedShop()
    shop.gate = asyncio.Event()
    with shop.driver() as driver:
        order(driver, 1, name="n", wait=False)
        driver.advance(1)
        driver.at("commit.before", lambda _: shop.gate.set())
        order(driver, 2, act=act, name="n", delay=30, wait=False)
        driver.advance(10)
        assert shop.gate.is_set()
        assert shop.answered == shop.failed == []
        assert [job.name for job in driver.jobs()] == ([] if act else ["n"])
        driver.advance(60)
        assert shop.answered == ([] if act else [2])


class ExitingShop(Shop):
    async def deliver(self, call: Call, run: JobRun) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize("policy", [PARK, SKIP, None])
@pytest.mark.parametrize("takes_failures", [True, False])
def test_a_job_that_exits_ends_the_source(
    policy: Retry | None, takes_failures: bool, caplog: pytest.LogCaptureFixture
) -> None:
    shop = ExitingShop()
    shop.on_error, shop.takes_failures = policy, takes_failures
    with pytest.raises(SystemExit), shop.driver() as driver:
        order(driver, 1)
    assert shop.failed == []
    del driver
    gc.collect()  # a task that the driver has left behind would be logged by then
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize("policy", [PARK, SKIP, DEAD_LETTER, None])
def test_an_operators_cancel_without_on_failure_lets_the_job_go(policy: Retry | None) -> None:
    """Whatever the policy is: it is for jobs that fail."""
    shop = Shop(retry=LONG)
    shop.on_error, shop.takes_failures = policy, False
    shop.broken = {1}
    with shop.driver() as driver:
        order(driver, 1, name="n")
        assert driver.cancel_job("n")
        driver.advance(1)
        assert not driver.jobs()
        assert not driver.dead_letters()
        order(driver, 2)
        assert shop.answered == [2]


@pytest.mark.parametrize("which", ["finalizer", "on_failure"])
@pytest.mark.parametrize("policy", [PARK, DEAD_LETTER])
def test_an_end_that_fails_names_the_users_function(which: str, policy: Retry) -> None:
    shop = Shop(retry=None)
    shop.on_error = policy
    shop.finalizer_broken = {1}
    if which == "on_failure":
        shop.broken, shop.failed = {1}, None  # type: ignore[assignment]
    with shop.driver() as driver:
        order(driver, 1)
        queues = driver._worker(0).timers.parked.by_name.values()  # type: ignore[union-attr]
        named = [queue.state.handler for queue in queues]
        named += [(letter.header("__kes_dlq_handler") or b"").decode() for letter in driver.dead_letters()]
        assert named == [f"tests.unit.jobs_kit.Shop.source.<locals>.{which}"]


def test_what_was_started_ahead_of_the_turn_is_held_to_the_bound_at_the_turn() -> None:
    shop = Shop(ordered=False, error_policy=DEAD_LETTER, scheduler={"max_jobs": 2, "when_full": "fail"})
    shop.concurrency = 8
    shop.seconds = dict.fromkeys(range(10), 1000.0)
    with shop.driver() as driver:
        for number in range(6):
            driver.send(Order(number, str(number)), key=str(number), wait=False)
        driver.advance(5)
        assert len(driver.jobs()) == 2
        assert {letter.header("__kes_dlq_error") for letter in driver.dead_letters()} == {b"JobsFull"}
        assert len(driver.dead_letters()) == 4


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_copy_has_jobs_as_they_are_in_the_changelog(has_ended: bool) -> None:
    """Attempts that are kept in memory, and an end that waits for its turn, are not there for a new owner."""
    shop = Shop()
    shop.broken = {1}
    with shop.driver() as driver:
        driver.send(Order(1), key="a", wait=False)
        driver.advance(0.9)
        assert driver.jobs()[0].attempts == 1
        worker = driver._worker(0)
        assert worker is not None
        if has_ended:
            worker.timers.set_job(msgspec.structs.replace(worker.timers.jobs.by_name["@job/@0/0"], due_ms=0))
        copied = {name: encode_timer(timer) for name, timer in worker.timers.contents().items()}
        assert copied == {
            name if name == COUNTER else PREFIX + name: encode_timer(timer)
            for name, timer in job_records(driver).items()
        }
        driver.advance(10)
        assert worker.timers.contents().keys() == {COUNTER}
