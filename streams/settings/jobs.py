"""Settings of work that runs ahead of its turn: limits and timeouts."""

from __future__ import annotations

import os
from typing import Final, Literal

import msgspec

from streams.errors import ConfigError
from streams.outcomes import ErrorResponse, Retry
from streams.sak.numbers import is_number, is_whole


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a scheduler. The names are those of go-kafka-event-source's ``SchedulerConfig``.

    * ``concurrency`` is the number of jobs that run at a time in this process, all partitions together.
    * ``worker_queue_depth`` is the number of jobs of one key that may wait behind the one that runs.
    * ``max_concurrent_keys`` is the number of keys of one partition that may have jobs. (Of all jobs of one partition
      at most 16 per slot wait, 1,000 at least.)
    * ``timeout_seconds`` is the time of one attempt of a job. ``None``: as long as it takes.
    * ``retry`` is the policy for a job that raises. ``None`` means one attempt.

    * ``rate_per_second`` is the number of jobs that begin in a second in this process, all partitions together, after a
      pause that of one second at once. ``None``: as many as have a slot.
    * ``max_jobs`` is the number of durable jobs (``ctx.start_job``) that one partition may have, waiting ones
      included. At that bound, or with 64 MiB of items, ``when_full="wait"`` takes no further input until there are
      fewer, behind the events that it has begun with (128 at most); with ``"fail"`` ``start_job`` raises
      ``JobsFull`` (called ahead of the event's turn, the event fails with it at its turn).

    If there is no room for a partition's next event, that partition stops reading, and no other one does.
    """

    concurrency: int
    worker_queue_depth: int = 100
    max_concurrent_keys: int = 10_000
    timeout_seconds: float | None = None
    retry: Retry | None = None
    rate_per_second: float | None = None
    max_jobs: int = 100_000
    when_full: Literal["wait", "fail"] = "wait"

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("worker_queue_depth", 0), ("max_concurrent_keys", 1), ("max_jobs", 1)):
            _check_whole(self, name, least)
        rate: object = self.rate_per_second  # whatever it is
        if rate is not None and not (is_number(rate) and rate > 0):
            raise ConfigError(f"SchedulerConfig.rate_per_second is {rate!r}; it must be more than 0, or None")
        when_full: object = self.when_full
        if when_full not in ("wait", "fail"):
            raise ConfigError(f"SchedulerConfig.when_full is {when_full!r}; use 'wait' or 'fail'")
        _check_timeout(self)
        _check_retry(self)


class BatcherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Size, delay and limits of a batcher's calls.

    * ``max_batch_size`` is the number of items of one call, at most.
    * ``max_delay_seconds`` is the time that an item waits for company when there is a slot for a batch. With 0 a batch
      begins as soon as there is a slot; what comes while all slots are taken makes the next ones.
    * ``max_concurrent_batches`` is the number of calls that run at a time in this process.
    * ``max_queued_items`` is the number of items of one partition that wait or run. Beyond, its reading waits; that of
      no other partition does. An event with more items than that goes in alone.
    * ``timeout_seconds`` is the time of one attempt of a call. ``None``: as long as it takes.
    * ``retry`` is the policy for a call that raises, with all of its items. ``None`` means one attempt.
    """

    max_batch_size: int = 100
    max_delay_seconds: float = 0.005
    max_concurrent_batches: int = 4
    max_queued_items: int = 10_000
    timeout_seconds: float | None = None
    retry: Retry | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_concurrent_batches", "max_queued_items"):
            _check_whole(self, name, 1)
        delay: object = self.max_delay_seconds  # whatever it is
        if not is_number(delay) or not 0 <= self.max_delay_seconds < 86_400:
            raise ConfigError(f"BatcherConfig.max_delay_seconds is {delay!r}; it must be 0 or more, less than a day")
        _check_timeout(self)
        _check_retry(self)


def check_settings(what: str, config: object, kind: type[SchedulerConfig | BatcherConfig]) -> None:
    """Raises ``ConfigError`` for what is no settings at all."""
    if not isinstance(config, kind):
        raise ConfigError(f"the config of {what} is {config!r}; it must be a {kind.__name__}")


def _check_whole(settings: msgspec.Struct, name: str, least: int) -> None:
    value = getattr(settings, name)
    if not is_whole(value) or value < least:
        raise ConfigError(f"{type(settings).__name__}.{name} is {value!r}; it must be a whole number, {least} or more")


def _check_timeout(settings: SchedulerConfig | BatcherConfig) -> None:
    value: object = settings.timeout_seconds
    if value is None or (is_number(value) and value > 0):
        return
    raise ConfigError(f"{type(settings).__name__}.timeout_seconds is {value!r}; it must be more than 0, or None")


def _check_retry(settings: SchedulerConfig | BatcherConfig) -> None:
    value: object = settings.retry
    if value is None:
        return
    name = f"{type(settings).__name__}.retry"
    if not isinstance(value, Retry):
        raise ConfigError(f"{name} is {value!r}; it must be a Retry, or None")
    if value.then is not ErrorResponse.FAIL_CONSUMER:
        raise ConfigError(f"{name} has then={value.then}; the last word is that of the event: its on_error")
    if value.parks:
        raise ConfigError(f"{name} has waits='key', which is for events: a job holds its key while it waits")


# The four are those of go-kafka-event-source.
_CPUS: Final = os.cpu_count() or 1

COMPUTE: Final = SchedulerConfig(concurrency=_CPUS, worker_queue_depth=1000)
"""Limits for work that keeps a processor busy: one job per processor."""
FAST_NETWORK: Final = SchedulerConfig(concurrency=4 * _CPUS)
"""Limits for calls that return within milliseconds: four per processor."""
SLOW_NETWORK: Final = SchedulerConfig(concurrency=16 * _CPUS)
"""Limits for calls that take tens of milliseconds or more: 16 per processor."""
WIDE_NETWORK: Final = SchedulerConfig(concurrency=32 * _CPUS, worker_queue_depth=1000)
"""Limits for slow calls, often many for one key: 32 per processor, and a thousand may wait for one key."""
