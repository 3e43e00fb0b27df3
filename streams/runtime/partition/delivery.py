"""The way of delivered records into one partition: handled where they are delivered, or queued for its task.

Live traffic brings a few records of a partition at a time. To wake a task for two of them costs as much as to handle
them, so while the task waits for nothing but records, plain handlers run in the call that delivers these. Everything
that needs more is the task's, as ever: failures, handlers of other kinds, what a slice does not take in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, Final

from streams.model.topics import TypesRecords
from streams.records import IncomingRecord
from streams.runtime.partition.host import Host
from streams.runtime.partition.hot_path import SLICE, HotPath, next_size
from streams.runtime.partition.inbox import Inbox
from streams.runtime.partition.once import due_s
from streams.runtime.partition.state import Partition
from streams.runtime.ports import Polled
from streams.runtime.signal import Signal

BACK_TO_BACK_SECONDS: Final = 0.0005
"""Deliveries that follow one another by less are taken for one: they have waited together for the loop, and nothing
else runs between them."""


def typed(deliver: Callable[[Polled], None], types: TypesRecords | None) -> Callable[[Polled], None]:
    """Return what takes the batches of the source's own topic. Bound once: without a rule it is ``deliver`` itself."""
    if types is None:
        return deliver

    def take(batch: Polled) -> None:
        deliver(batch._replace(records={number: types.received(found) for number, found in batch.records.items()}))

    return take


class DeliveryBudget:
    """The events that one delivery to all partitions may handle: as many as one slice, since other tasks wait
    meanwhile. On the loop."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._size = SLICE // 8  # small at first, as slices are
        self._left = 0
        self._began = self._ended = float("-inf")

    def begin(self) -> int:
        """Begin a delivery. Returns how many events it may handle."""
        now = self._now()
        if now - self._ended > BACK_TO_BACK_SECONDS:
            self._left, self._began = self._size, now
        return self._left

    def end(self, left: int) -> None:
        """End it; so many of these are left."""
        self._ended = self._now()
        if left < self._left:
            self._left, self._size = left, next_size(self._size, self._ended - self._began)


class DeliveredRecords:
    """The deliveries to one partition with one input. On the loop; ``wait`` on the partition's task."""

    def __init__(self, partition: Partition, host: Host, inbox: Inbox, hot_path: HotPath, wake: Signal) -> None:
        self._partition = partition
        self._host = host
        self._inbox = inbox
        self._hot_path = hot_path
        self._wake = wake
        self._waiting: tuple[Context, asyncio.Task[Any]] | None = None  # the task, while it waits
        self._failed: tuple[IncomingRecord, BaseException] | None = None
        self._raised: BaseException | None = None

    async def wait(self) -> tuple[IncomingRecord, BaseException] | None:
        """Wait until woken, by what is left for the task or anything else; records that come meanwhile are handled as
        they are delivered. Returns one whose first attempt failed, and why; its room is to be given back. Raises what a
        handler has raised to end the process."""
        task = asyncio.current_task()
        assert task is not None  # this is a coroutine
        self._waiting = copy_context(), task
        try:
            await self._wake.wait()
        finally:
            self._waiting = None
        if self._raised is not None:
            raise self._raised
        failed, self._failed = self._failed, None
        return failed

    def take(self, records: list[IncomingRecord], size: int, most: int) -> int:
        """Handle ``most`` of these records of so many bytes, if the task waits and there is room; queue the rest.
        Returns how many were handled. In a callback of the loop, not in a task."""
        inbox, waiting = self._inbox, self._waiting
        # Woken, it has something to do that comes before these.
        if waiting is None or not most or self._wake.is_set or self._host.pool.is_full:
            inbox.add(records, size)
            return 0
        partition, count = self._partition, len(records)
        context, task = waiting
        loop = task.get_loop()
        failure: BaseException | None
        try:
            # Handlers have the partition's task as the current one wherever they run: anyio's scopes, too, ask for it.
            asyncio._enter_task(loop, task)
            try:
                position, failure = context.run(self._hot_path.run, records if count <= most else records[:most], 0)
            finally:
                asyncio._leave_task(loop, task)
        except BaseException as error:  # for the task: the loop would only log what a callback raises
            self._raised, position, failure = error, 0, None
        if position < count or partition.is_closing:
            self._leave(records, size, position, failure)
            return position
        self._host.input.handled(count, size)
        news = partition.timers or partition.timekeeper.has_news or partition.seen.unmeasured
        if news or due_s(partition, self._host) is not None:  # the task has waited without an end
            self._wake.notify()
        return position

    def _leave(self, records: list[IncomingRecord], size: int, position: int, failure: BaseException | None) -> None:
        """Leave the records from this position on to the task; the first one has failed if there is a ``failure``."""
        inbox, count = self._inbox, len(records)
        if self._partition.is_closing:  # its store has failed, and the queue is dropped: these come again
            self._host.input.handled(count, size)
            return
        done = size * position // count
        if position:
            self._host.input.handled(position, done)
        if failure is not None:
            failed, size_of_failed = records[position], (size - done) // (count - position)
            inbox.add([failed], size_of_failed)  # it counts as queued until its policy has had its way
            inbox.take()
            self._failed = failed, failure
            position, done = position + 1, done + size_of_failed
        if position < count:
            inbox.add(records[position:], size - done)
