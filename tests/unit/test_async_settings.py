"""What schedulers, batchers and producers refuse when they are made."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from streams import (
    DEAD_LETTER,
    AsyncBatcher,
    AsyncJobScheduler,
    BatcherConfig,
    BatchProducer,
    EventSource,
    EventSourceConfig,
    MissedRuns,
    Retry,
    SchedulerConfig,
)
from streams.errors import ConfigError, RegistrationError
from streams.testing import TestDriver
from tests.unit.async_kit import new_source
from tests.unit.runtime_kit import Bench
from tests.vocabulary import Named

SOURCE: Any = new_source()
OTHER: Any = EventSource(EventSourceConfig(group_id="o", topic="t", num_partitions=1))
KEY: Any = {"key": lambda event: "k"}
NOT_A_NUMBER = float("nan")


async def task(*_: Any) -> None: ...


def plain(event: Named) -> str:
    return ""


def _inner() -> Callable[[Named], str]:
    def inside(event: Named) -> str:
        return ""

    return inside


BESIDE = _inner()
jobs: Any = functools.partial(AsyncJobScheduler, SOURCE)
calls: Any = functools.partial(AsyncBatcher, SOURCE)
records: Any = functools.partial(BatchProducer, SOURCE)
limits: Any = functools.partial(SchedulerConfig, concurrency=1)
retries: Any = Retry
batch_limits: Any = BatcherConfig
every: Any = SOURCE.schedule_interjection

UNFIT: list[Any] = [
    (lambda: jobs(plain, kind="async"), r"a plain function; it cannot be of the kind 'async'"),
    (lambda: jobs(task, kind="thread"), r"async; it cannot be of the kind 'thread'"),
    (lambda: jobs(plain, kind="fiber"), r"use one of async, thread, process"),
    (lambda: jobs(lambda event: "", kind="process"), r"at the top of a module"),
    (lambda: jobs(BESIDE, kind="process"), r"at the top of a module"),
    (lambda: jobs(task, then=AsyncJobScheduler(OTHER, task)), r"two event sources"),
    (lambda: jobs(task, lambda ctx, item, result: None, then=jobs(task)), r"results go to one of them"),
    (lambda: jobs(task).register_event_type(Named, lambda record, event: None, **KEY), r"not both"),
    (lambda: jobs(task).register_event_type(Named, task), r"is async"),
    (lambda: jobs(None), "None, which cannot be called"),
    (lambda: jobs(task, "f"), "finalizer of the jobs task"),
    (lambda: jobs(task).register_event_type(Named, key="n"), "key"),
    (lambda: calls(task, kind="thread"), "cannot be of the kind 'thread'"),
    (lambda: calls(task, kind="fiber"), "use one of"),
    (lambda: calls(task, on_failure="f"), "on_failure of the batcher"),
    (lambda: calls(5), "cannot be called"),
    (lambda: calls(task).register_event_type(Named, lambda record, event: None, **KEY), "not both"),
    (lambda: calls(task).register_event_type(Named, key="n"), "key"),
    (lambda: calls(task).register_event_type(Named, task), "is async"),
    (lambda: records().register_event_type(Named, task), "is async"),
    (lambda: records(5), "finalizer of the producer"),
    (lambda: SOURCE.register_event_type(Named, 5), "the handler of Named is 5"),
    (lambda: every(5, every=1), "cannot be called"),
]


@pytest.mark.parametrize(("make", "said"), UNFIT)
def test_what_does_not_fit_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(RegistrationError, match=said):
        make()


async def test_what_comes_twice_or_too_late_is_refused(bench: Bench) -> None:
    source = bench.make(None)
    scheduler: Any = AsyncJobScheduler(source, task)
    scheduler.register_event_type(Named, **KEY)
    with pytest.raises(RegistrationError, match=r"has a handler already"):
        AsyncJobScheduler(source, task).register_event_type(Named, **KEY)
    await bench.start()
    for late in (lambda: AsyncJobScheduler(source, task), lambda: scheduler.register_event_type(Named, **KEY)):
        with pytest.raises(RegistrationError, match=r"too late"):
            late()


WRONG: list[Any] = [
    (lambda: limits(concurrency=0), "SchedulerConfig.concurrency"),
    (lambda: limits(concurrency=True), "SchedulerConfig.concurrency"),
    (lambda: limits(worker_queue_depth=-1), "SchedulerConfig.worker_queue_depth"),
    (lambda: limits(max_concurrent_keys=0), "SchedulerConfig.max_concurrent_keys"),
    (lambda: limits(timeout_seconds=0), "SchedulerConfig.timeout_seconds"),
    (lambda: limits(timeout_seconds=NOT_A_NUMBER), "SchedulerConfig.timeout_seconds"),
    (lambda: limits(timeout_seconds="5"), "SchedulerConfig.timeout_seconds"),
    (lambda: limits(retry=3), "SchedulerConfig.retry"),
    (lambda: limits(retry=DEAD_LETTER), "the last word is that of the event: its on_error"),
    (lambda: retries(attempts=0), "Retry.attempts"),
    (lambda: retries(attempts=2.5), "Retry.attempts"),
    (lambda: retries(backoff_seconds=-1), "Retry.backoff_seconds"),
    (lambda: retries(backoff_seconds=11), "between 0 and max_backoff_seconds (10.0)"),
    (lambda: retries(max_backoff_seconds=NOT_A_NUMBER), "Retry.max_backoff_seconds"),
    (lambda: retries(backoff_factor=0.5), "Retry.backoff_factor"),
    (lambda: retries(jitter=2), "Retry.jitter"),
    (lambda: retries(then="dead_letter"), "ErrorResponse.DEAD_LETTER"),
    (lambda: retries(timeout_seconds=0), "Retry.timeout_seconds"),
    (lambda: retries(timeout_seconds=NOT_A_NUMBER), "Retry.timeout_seconds"),
    (lambda: retries(on=(asyncio.CancelledError,)), "Retry.on"),
    (lambda: retries(on=ValueError), "a tuple"),
    (lambda: batch_limits(max_batch_size=0), "BatcherConfig.max_batch_size"),
    (lambda: batch_limits(max_concurrent_batches=0), "BatcherConfig.max_concurrent_batches"),
    (lambda: batch_limits(max_queued_items=True), "BatcherConfig.max_queued_items"),
    (lambda: batch_limits(max_delay_seconds=-1), "BatcherConfig.max_delay_seconds"),
    (lambda: batch_limits(max_delay_seconds="1"), "BatcherConfig.max_delay_seconds"),
    (lambda: batch_limits(timeout_seconds=0), "BatcherConfig.timeout_seconds"),
    (lambda: batch_limits(retry=3), "BatcherConfig.retry"),
    (lambda: jobs(task, config=8), "must be a SchedulerConfig"),
    (lambda: calls(task, config=8), "must be a BatcherConfig"),
    (lambda: records(client_settings={"acks": 1}), "acks"),
    (lambda: records(client_settings={"message.timeout.ms": 1}), "delivery_timeout_seconds"),
    (lambda: records(max_queued_records=0), "max_queued_records"),
    (lambda: records(delivery_timeout_seconds=0), "delivery_timeout_seconds"),
    (lambda: records(delivery_timeout_seconds="9"), "delivery_timeout_seconds is '9'"),
    (lambda: records(bootstrap_servers="user@host:1"), "bootstrap_servers"),
    (lambda: SOURCE.register_event_type(Named, task, concurrency="4"), "the concurrency of"),
    (lambda: every(task, every=None), "either every=, or cron="),
    (lambda: every(task, every="10"), "every is '10'"),
    (lambda: every(task, every=float("inf")), "every is inf"),
    (lambda: every(task, every=1, missed="skip"), str(MissedRuns.SKIP)),
]


@pytest.mark.parametrize(("make", "named"), WRONG)
def test_settings_that_cannot_be_are_refused_by_name(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        make()


@pytest.mark.parametrize("seconds", [float("inf"), NOT_A_NUMBER])
def test_time_does_not_go_on_for_ever(seconds: float) -> None:
    source = new_source()
    source.register_event_type(Named, lambda ctx, event: None)
    with TestDriver(source) as driver, pytest.raises(ConfigError, match="time cannot go on by"):
        driver.advance(seconds)
