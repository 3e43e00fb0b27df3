"""Stages of batches by themselves: who is cancelled with whom, and what ends a call from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from streams import BatcherConfig, BatchItem, IncomingRecord, TopicPartition
from streams.records import Acknowledgement, Delivery, Record
from streams.runtime.async_work.batch_stage import BatchDefinition, BatchStage
from streams.runtime.async_work.producer_outlet import Outlet
from streams.runtime.partition.reorder_buffer import Entry, ReorderBuffer
from tests.unit.waiting import PATIENCE, until


def entry(partition: int, offset: int, *keys: str) -> Entry:
    made = Entry(
        partition, IncomingRecord("in", partition, offset, None, b"", None), None, None, ReorderBuffer(lambda: None)
    )
    made.plan = [BatchItem(key, f"{partition}:{offset}:{key}") for key in keys]
    return made


def stage(execute: Callable[[list[BatchItem[Any]]], Any], **config: Any) -> BatchStage:
    definition = BatchDefinition(
        name="b",
        kind="async",
        execute=execute,
        finalizer=None,
        on_failure=None,
        config=BatcherConfig(**{"max_delay_seconds": 0.0, **config}),
    )
    return BatchStage(definition, SimpleNamespace())  # type: ignore[arg-type]


class Calls:
    def __init__(self) -> None:
        self.begun: list[list[str]] = []
        self.cancelled: list[list[str]] = []
        self.gate = asyncio.Event()

    async def __call__(self, items: list[BatchItem[Any]]) -> None:
        names = [item.value for item in items]
        self.begun.append(names)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(names)
            raise


async def test_a_call_is_cancelled_when_nobody_needs_it_and_not_before() -> None:
    calls = Calls()
    batches = stage(calls)
    first, second = entry(0, 0, "a"), entry(1, 0, "a")
    assert batches.begin(first)
    assert batches.begin(second)
    await until(lambda: calls.begun, "it begins")
    assert calls.begun == [["0:0:a", "1:0:a"]]
    first.drop()
    for _ in range(5):
        await asyncio.sleep(0)
    assert calls.cancelled == []
    second.drop()
    await until(lambda: calls.cancelled, "nobody needs it")
    await until(lambda: batches.statistics().keys == 0, "the keys are free")
    assert (batches.statistics().running, batches.statistics().waiting) == (0, 0)


async def test_what_was_dropped_while_it_waited_is_not_called() -> None:
    calls = Calls()
    batches = stage(calls, max_batch_size=1, max_concurrent_batches=1)
    entries = [entry(0, number, "a", "b") for number in range(3)]
    for one in entries:
        assert batches.begin(one)
    await until(lambda: calls.begun, "the first one begins")
    entries[1].drop()
    calls.gate.set()
    await until(lambda: entries[2].is_settled, "the others end")
    assert calls.begun == [["0:0:a"], ["0:0:b"], ["0:2:a"], ["0:2:b"]]
    assert entries[0].is_settled


async def test_a_handler_that_has_its_turn_does_not_wait_for_a_later_event() -> None:
    """Whose key has failed, and is held until its turn is over: that never comes while this one waits."""

    async def execute(items: list[BatchItem[Any]]) -> list[Any]:
        return [RuntimeError("no") if str(item.value).startswith("0:") else "done" for item in items]

    batches = stage(execute)
    later = entry(0, 7, "a")
    batches.begin(later)
    await until(lambda: later.is_settled, "it has failed")
    ctx: Any = SimpleNamespace(topic_partition=TopicPartition("in", 0))
    async with asyncio.timeout(PATIENCE):
        (item,) = await batches.submit(ctx, [BatchItem("a", "in turn")])
    assert item.result == "done"


async def test_exceptions_that_are_no_errors_are_results_too() -> None:
    async def execute(items: list[BatchItem[Any]]) -> list[Any]:
        return [asyncio.CancelledError()]

    batches = stage(execute)
    one = entry(0, 0, "a")
    batches.begin(one)
    await until(lambda: one.is_settled, "it fails")
    assert isinstance(one.error, RuntimeError)


async def test_room_comes_free_also_by_withdrawing() -> None:
    calls = Calls()
    batches = stage(calls, max_batch_size=1, max_concurrent_batches=1, max_queued_items=2)
    woken: list[int] = []
    first, second, third = entry(0, 0, "a"), entry(0, 1, "b"), entry(0, 2, "c")
    third.buffer = ReorderBuffer(lambda: woken.append(1))
    assert batches.begin(first)
    assert batches.begin(second)
    assert not batches.begin(third)
    second.drop()
    assert woken == [1]
    assert batches.begin(third)


async def test_close_cancels_what_runs_and_begins_nothing() -> None:
    calls = Calls()
    batches = stage(calls, max_batch_size=1, max_concurrent_batches=1)
    for number in range(2):
        batches.begin(entry(0, number, "a", "b"))
    await until(lambda: calls.begun, "one runs")
    tasks = batches.close()
    await asyncio.wait(tasks, timeout=PATIENCE)
    for _ in range(5):
        await asyncio.sleep(0)
    assert calls.begun == calls.cancelled == [["0:0:a"]]


class NoWorker:
    def __init__(self) -> None:
        self.is_abandoned = False

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        return function(*args)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        function(*args)

    def abandon(self) -> None:
        self.is_abandoned = True


async def test_an_outlet_that_is_closed_at_once_lets_its_thread_go() -> None:
    worker = NoWorker()
    outlet = Outlet(worker, lambda: pytest.fail("not wanted"), lambda _: True, lambda _: None, lambda *_: None)
    await asyncio.wait([outlet.close()], timeout=PATIENCE)
    await until(lambda: worker.is_abandoned, "its thread ends")


async def test_a_record_that_no_queue_takes_fails_and_does_not_wait() -> None:
    reports: list[Acknowledgement] = []
    producer = SimpleNamespace(
        is_broken=False, produce=lambda record, token: False, poll=lambda seconds: [], close=lambda: None
    )
    outlet = Outlet(NoWorker(), lambda: producer, lambda _: True, reports.append, lambda *_: None)  # type: ignore[arg-type,return-value]
    outlet.send(Delivery(Record("t", b"x" * 100)))
    await until(lambda: reports, "it is told")
    assert "queue.buffering.max.kbytes" in str(reports[0].error)
    await asyncio.wait([outlet.close()], timeout=PATIENCE)
