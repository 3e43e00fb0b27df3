"""The stage of ``AsyncBatcher``: items of many events, of all partitions, in one call."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from streams.core.keyed_queue import KeyedItem, KeyedQueue, PartitionLimits
from streams.errors import BatchError
from streams.model.tracing import EventSpan, under_span
from streams.runtime.async_work.async_stage import (
    AtTurn,
    Blocked,
    ItemsStage,
    ItemsWork,
    described,
    where_of,
)
from streams.runtime.async_work.invoke import Calls, Outcome
from streams.runtime.partition.failures import cancelled_inside
from streams.runtime.partition.host import Host
from streams.runtime.partition.reorder_buffer import AsideEntry, Entry
from streams.settings.jobs import BatcherConfig
from streams.statistics import StageStatistics

ValueT = TypeVar("ValueT")


class BatchItem(Generic[ValueT]):
    """One item of an event. ``key``: hashable; ``user_data``: any object for the finalizer. ``result`` and ``error``
    are set when its call has ended: one of them is ``None``."""

    __slots__ = ("error", "key", "result", "user_data", "value")

    def __init__(self, key: Hashable, value: ValueT, user_data: Any = None) -> None:
        self.key = key
        self.value = value
        self.user_data = user_data
        self.result: Any = None
        self.error: Exception | None = None

    def __repr__(self) -> str:
        return f"BatchItem({self.key!r}, {self.value!r})"


Items = Sequence[BatchItem[Any]]


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchDefinition:
    """The definition of an ``AsyncBatcher``. ``kind``: ``async``, ``thread`` or ``process``."""

    name: str
    kind: str
    execute: Callable[[list[BatchItem[Any]]], Any]
    finalizer: AtTurn | None
    on_failure: AtTurn | None
    config: BatcherConfig

    @property
    def described(self) -> tuple[str, ...]:
        return self.kind, *described(self.execute, self.finalizer, self.on_failure)

    def open(self, host: Host) -> BatchStage:
        return BatchStage(self, host)


AGAIN: Final = object()
"""The outcome of an item that was not tried, since one before it has failed in the same call. It is in a later call."""


class _BatchWork(ItemsWork[BatchItem[Any]]):
    """The items of one event."""

    __slots__ = ("held", "parts")

    parts: list[_BatchedItem]
    held: list[_BatchedItem]


class _BatchedItem(KeyedItem):
    """One item on its way."""

    __slots__ = ("batch", "is_wanted", "item", "work")

    def __init__(self, work: _BatchWork, item: BatchItem[Any]) -> None:
        self.position = work.entry.record.offset
        self.work = work
        self.item = item
        self.batch: _BatchCall | None = None
        self.is_wanted = True


class _BatchCall:
    """A call that runs. ``wanted``: parts of it that are still awaited."""

    __slots__ = ("parts", "task", "wanted")

    def __init__(self, parts: list[_BatchedItem]) -> None:
        self.parts = parts
        self.wanted = len(parts)
        self.task: asyncio.Task[None]


class BatchStage(ItemsStage[list[BatchItem[Any]], _BatchWork]):
    """One running batcher."""

    def __init__(self, definition: BatchDefinition, host: Host) -> None:
        super().__init__(definition.finalizer, definition.on_failure)
        config = definition.config
        self._name = definition.name
        self._loop = asyncio.get_running_loop()
        self._batches: KeyedQueue[_BatchedItem] = KeyedQueue(
            config.max_concurrent_batches,
            PartitionLimits(items=config.max_queued_items),
            batch_size=config.max_batch_size,
            max_delay=config.max_delay_seconds,
        )
        self._calls = Calls(  # each attempt has a list of its own: a function may use it up
            host, definition.kind, definition.execute, config.timeout_seconds, config.retry, prepare=list
        )
        self._blocked = Blocked()
        self._running: dict[_BatchCall, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._calls_made = self._called = 0  # calls, and their items
        self._context = contextvars.copy_context()  # or a call would inherit that of whichever item came last

    def admits(self, entry: Entry, plan: list[BatchItem[Any]]) -> bool:
        return not plan or self._has_room(entry, plan[0].key, len(plan))

    def start(self, entry: Entry, plan: list[BatchItem[Any]]) -> _BatchWork:
        work = _BatchWork(self, entry, plan)
        work.parts, work.held = [_BatchedItem(work, item) for item in work.items], []
        if not plan:
            self.all_done(work)
            return work
        entry.work = work
        # Not by its lane: items of a key and partition are in one call at a time, also after the partition came back.
        lane = entry.lane if isinstance(entry, AsideEntry) else entry.record.partition
        now = self._loop.time()
        for part in work.parts:
            self._batches.add(lane, part.item.key, part, now)
        if self._batches.has_full_batch:
            self._pump()
        elif self._timer is None:
            self._arm()  # also when it is due now: items of the same moment go with it
        return work

    def has_room(self, entry: Entry, key: Hashable) -> bool:
        return self._has_room(entry, key, 1)

    def add(self, entry: Entry, key: Hashable, item: Any) -> None:
        self.start(entry, [BatchItem(key, item)])

    def statistics(self) -> StageStatistics:
        batches, mean = self._batches, self._called / self._calls_made if self._calls_made else 0.0
        return StageStatistics(self._name, batches.running, batches.waiting, batches.keys, self._calls_made, mean)

    def close(self) -> list[asyncio.Task[None]]:
        self._is_closed = True
        self._disarm()
        tasks = [batch.task for batch in self._running]
        for task in tasks:
            task.cancel()
        return tasks

    # -- the way of an event's items -----------------------------------------------------------------------------------

    def _has_room(self, entry: Entry, key: Hashable, count: int) -> bool:
        if self._batches.has_room(entry.record.partition, key, count):
            return True
        self._blocked.add(entry)
        return False

    def cancel(self, work: _BatchWork) -> None:
        """Withdraw items that are not awaited any more; a call is cancelled when none of its items is awaited."""
        parts, work.parts = work.parts, []
        held, work.held = work.held, []
        for part in held:
            self._batches.release(part)
        for part in parts:
            if not part.is_wanted:
                continue
            part.is_wanted = False
            if self._batches.withdraw(part):
                continue
            batch = part.batch
            assert batch is not None
            batch.wanted -= 1
            if not batch.wanted:
                batch.task.cancel()
        if held:
            self._pump()
        self._blocked.wake()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Begin the calls that can begin, and set the alarm for the next."""
        if self._is_closed:
            return
        now = self._loop.time()
        while (parts := self._batches.take(now)) is not None:
            self._begin(_BatchCall(parts))
        self._disarm()
        self._arm()

    def _arm(self) -> None:
        due = None if self._is_closed else self._batches.due()
        if due is not None:
            self._timer = self._loop.call_at(due, self._is_due)

    def _is_due(self) -> None:
        self._timer = None
        self._pump()

    def _disarm(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _begin(self, batch: _BatchCall) -> None:
        traces: dict[EventSpan, None] = {}  # not a set: in the order of their events
        for part in batch.parts:
            part.batch = batch
            entry = part.work.entry
            # The call may have effects outside: a revoked partition ends its event (``ReorderBuffer.cut``).
            entry.begun = True
            if entry.trace is not None:
                traces[entry.trace] = None
        self._running[batch] = None
        self._calls_made += 1
        self._called += len(batch.parts)
        name, context = f"kes-batch-{self._name}", self._context.copy()
        parents = list(traces)
        span = parents[0].child(f"batch {self._name}", parents[1:]) if parents else None
        batch.task = self._loop.create_task(self._run(batch, span), name=name, context=context)
        # Not at the end of ``_run``: a task that is cancelled before it begins never runs.
        batch.task.add_done_callback(lambda task: self._ended(batch, task))

    async def _run(self, batch: _BatchCall, span: EventSpan | None) -> None:
        items = [part.item for part in batch.parts]
        outcome: Awaitable[Outcome] = self._calls.outcome(items, lambda: self._where(batch.parts))
        answer, error, attempts = await (outcome if span is None else under_span(span, outcome))
        if error is not None:
            self._failed(batch, error, attempts)
            return
        again: list[_BatchedItem] = []
        for part, outcome in zip(batch.parts, self._results(answer, len(items)), strict=True):
            if outcome is AGAIN:
                again.append(part)
            else:
                self._done(part, outcome, attempts)
        # The last one first, since each goes in front of those of its key: the order of the key stays.
        for part in reversed(again):
            if part.is_wanted:
                self._batches.put_back(part)

    def _where(self, parts: Sequence[_BatchedItem]) -> str:
        first = where_of(parts[0].work.entry, parts[0].item.key)
        return f"the batch {self._name} of {len(parts)} items, the first of {first}"

    def _ended(self, batch: _BatchCall, task: asyncio.Task[None]) -> None:
        del self._running[batch]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not self._is_closed:  # cancelled from outside: its events would wait without an end
            self._failed(batch, error, 1)
        # Behind the ``hold`` of failed items: otherwise this would free their keys, and the next items of these could
        # begin before the failures have met their policies.
        self._batches.end(batch.parts)
        self._pump()
        self._blocked.wake()

    def _failed(self, batch: _BatchCall, error: BaseException, attempts: int) -> None:
        """Fail the items of a call that failed as a whole."""
        for part in batch.parts:
            if not isinstance(error, Exception | asyncio.CancelledError):
                part.work.fatal = error  # it ends the process at the event's turn, whatever the items before it did
            self._done(part, error, attempts)

    def _done(self, part: _BatchedItem, outcome: Any, attempts: int) -> None:
        if not part.is_wanted:
            return
        part.is_wanted = False
        item, work = part.item, part.work
        if isinstance(outcome, BaseException):
            item.result, item.error = None, cancelled_inside(outcome)
            work.attempts = max(work.attempts, attempts)
            self._batches.hold(part, self._loop.time())  # until the turn of its event is over
            work.held.append(part)
            self._not_tried(work, item)
        else:
            item.result, item.error = outcome, None  # an earlier call, or the function itself, may have left an error
        self.item_done(work)

    def _not_tried(self, work: _BatchWork, failed: BatchItem[Any]) -> None:
        """Fail the items behind a failed one in its event, with its key: the key is held until the event's turn is
        over."""
        for part in work.parts:
            if part.is_wanted and part.item.key == failed.key and self._batches.withdraw(part):
                part.is_wanted = False
                part.item.result, part.item.error = None, failed.error
                work.left -= 1

    def _results(self, answer: Any, count: int) -> Sequence[Any]:
        """Check the answer of a call: one result or exception per item."""
        if answer is None:
            return [None] * count
        if not isinstance(answer, list | tuple):
            answered = f"answered {type(answer).__name__!r}"
        elif len(answer) != count:
            answered = f"answered {len(answer)} results for {count} items"
        else:
            return answer
        error = BatchError(
            f"the batcher {self._name} {answered}; it must return one result (or exception) per item, in "
            "their order, or None"
        )
        return [error] * count
