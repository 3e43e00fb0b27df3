"""The stage of ``AsyncBatcher``: items of many events, of all partitions, in one call."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from streams.core.keyed_batches import KeyedBatches, Queued
from streams.errors import BatchError
from streams.job_settings import BatcherConfig
from streams.runtime.calls import Calls
from streams.runtime.event_context import EventContext
from streams.runtime.failures import cancelled_inside
from streams.runtime.job_runner import Overtaken
from streams.runtime.line import Entry
from streams.runtime.stages import Blocked, described
from streams.statistics import StageStatistics

if TYPE_CHECKING:
    from streams.runtime.host import Host

ValueT = TypeVar("ValueT")


class BatchItem(Generic[ValueT]):
    """One item of an event. ``key``: hashable; ``user_data``: whatever belongs to it, for the finalizer. ``result`` and
    ``error`` are set when its call has ended: one of them is ``None``."""

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
    """What ``AsyncBatcher`` knows. ``kind``: ``async``, ``thread`` or ``process``."""

    name: str
    kind: str
    execute: Callable[[list[BatchItem[Any]]], Any]
    finalizer: Callable[[EventContext[Any], list[BatchItem[Any]]], Any] | None
    on_failure: Callable[[EventContext[Any], list[BatchItem[Any]]], Any] | None
    config: BatcherConfig

    @property
    def described(self) -> tuple[str, ...]:
        """See ``stages.StageDefinition``."""
        return self.kind, *described(self.execute, self.finalizer, self.on_failure)

    def open(self, host: Host) -> BatchStage:
        """For one run."""
        return BatchStage(self, host)


class _Work:
    """The items of one event, until all of them are done."""

    __slots__ = ("attempts", "done", "entry", "fatal", "held", "items", "left", "parts", "stage")

    def __init__(self, stage: BatchStage, items: Items, entry: Entry | None, done: Callable[[_Work], None]) -> None:
        self.stage = stage
        self.items = list(items)
        self.left = len(self.items)
        self.attempts = 0
        self.fatal: BaseException | None = None  # what a call raised that ends a process, and not an event
        self.entry = entry
        self.done = done
        self.parts: list[_Part] = []
        self.held: list[Queued[_Part]] = []

    def is_before(self, other: _Work) -> bool:
        """Whether its event comes before that of another one. (Those without have their turn.)"""
        return (
            self.entry is not None and other.entry is not None and self.entry.record.offset < other.entry.record.offset
        )

    @property
    def error(self) -> Exception | None:
        """Of the first item that failed."""
        return next((item.error for item in self.items if item.error is not None), None)

    def withdraw(self) -> None:
        """See ``line.Work``."""
        self.stage.cancel(self)


class _Part:
    """One item on its way."""

    __slots__ = ("batch", "is_wanted", "item", "queued", "work")

    def __init__(self, work: _Work, item: BatchItem[Any]) -> None:
        self.work = work
        self.item = item
        self.queued: Queued[_Part]
        self.batch: _Batch | None = None
        self.is_wanted = True


class _Batch:
    """A call that runs. ``wanted``: parts of it that somebody still waits for."""

    __slots__ = ("parts", "queued", "task", "wanted")

    def __init__(self, queued: list[Queued[_Part]]) -> None:
        self.queued = queued
        self.parts = [one.item for one in queued]
        self.wanted = len(queued)
        self.task: asyncio.Task[None]


class BatchStage:
    """One running batcher. On the loop; nothing here blocks or waits."""

    def __init__(self, definition: BatchDefinition, host: Host) -> None:
        config = definition.config
        self._definition = definition
        self._loop = asyncio.get_running_loop()
        self._batches: KeyedBatches[_Part] = KeyedBatches(
            config.max_batch_size, config.max_delay_seconds, config.max_concurrent_batches, config.max_queued_items
        )
        self._calls = Calls(  # each attempt has a list of its own: a function may use it up
            host, definition.kind, definition.execute, config.timeout_seconds, config.retry, prepare=list
        )
        self._blocked = Blocked()
        self._running: dict[_Batch, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._context = contextvars.copy_context()  # or a call would inherit that of whichever item came last

    def begin(self, entry: Entry) -> bool:
        """See ``stages.Stage``."""
        items: list[BatchItem[Any]] | None = entry.plan
        if items is None:
            entry.settle(_nothing)
        elif not items:
            entry.settle(self._finish(items))
        elif not self._has_room(entry, len(items)):
            return False
        else:
            self._enter(entry, items)
        return True

    def has_room(self, entry: Entry, key: Hashable) -> bool:
        """See ``stages.Follower``."""
        return self._has_room(entry, 1)

    def add(self, entry: Entry, key: Hashable, item: Any) -> None:
        """See ``stages.Follower``."""
        self._enter(entry, [BatchItem(key, item)])

    async def complete(self, ctx: EventContext[Any], item: Any) -> Any:
        """See ``stages.Follower``."""
        return await self.in_turn(ctx, [BatchItem(object(), item)])

    async def in_turn(self, ctx: EventContext[Any], items: list[BatchItem[Any]] | None) -> Any:
        """All that an event's plan asks for, finalizer included, when the event has its turn already."""
        if items is None:
            return None
        work = await self._settled(ctx, items)
        if work.error is not None and self._definition.on_failure is None:
            raise work.error
        answer = self._finish(work.items)(ctx)
        return await answer if isinstance(answer, Awaitable) else answer

    async def submit(self, ctx: EventContext[Any], items: Items) -> list[BatchItem[Any]]:
        """Items of a handler that has its turn. Returns them when all are done; raises the first error."""
        work = await self._settled(ctx, items)
        if work.error is not None:
            raise work.error
        return work.items

    def statistics(self) -> StageStatistics:
        """What is under way."""
        batches = self._batches
        mean = batches.taken / batches.made if batches.made else 0.0
        return StageStatistics(
            self._definition.name, batches.running, batches.waiting, batches.keys, batches.made, mean
        )

    def close(self) -> list[asyncio.Task[None]]:
        """See ``stages.Stage``."""
        self._is_closed = True
        self._disarm()
        tasks = [batch.task for batch in self._running]
        for task in tasks:
            task.cancel()
        return tasks

    # -- the way of an event's items -----------------------------------------------------------------------------------

    def _has_room(self, entry: Entry, count: int) -> bool:
        if self._batches.has_room(entry.record.partition, count):
            return True
        self._blocked.add(entry)
        return False

    def _enter(self, entry: Entry, items: Items) -> None:
        work = _Work(self, items, entry, self._done_ahead)
        entry.work = work
        self._queue(work, entry.record.partition)

    def _done_ahead(self, work: _Work) -> None:
        entry, error = work.entry, work.fatal or work.error
        assert entry is not None
        if error is None or (work.fatal is None and self._definition.on_failure is not None):
            entry.settle(self._finish(work.items))
        else:
            entry.fail(error, work.attempts)

    async def _settled(self, ctx: EventContext[Any], items: Items) -> _Work:
        future: asyncio.Future[None] = self._loop.create_future()
        work = _Work(self, items, None, lambda _: None if future.done() else future.set_result(None))
        if not work.items:
            return work
        self._queue(work, ("turn", ctx.topic_partition.partition))  # or it may wait for a key that waits for this turn
        try:
            await future
        finally:
            self.cancel(work)
        if work.fatal is not None:
            raise work.fatal
        return work

    def _queue(self, work: _Work, lane: Hashable) -> None:
        for item in work.items:
            part = _Part(work, item)
            self._add(part, lane, item.key)
            work.parts.append(part)
        if self._batches.has_full_batch:
            self._pump()
        elif self._timer is None:
            self._arm()  # also when it is due now: what comes in the same moment goes with it

    def _add(self, part: _Part, lane: Hashable, key: Hashable) -> None:
        """As ``job_runner.Overtaken`` says, it waits for no key that the failure of a later event holds."""
        while any(part.work.is_before(holder.work) for holder in self._batches.holders(lane, key)):
            key = Overtaken(key)
        part.queued = self._batches.add(lane, key, part, self._loop.time())

    def cancel(self, work: _Work) -> None:
        """Nobody waits for these any more: they are withdrawn, and a call is cancelled if all of its items are such."""
        parts, work.parts = work.parts, []
        held, work.held = work.held, []
        for queued in held:
            self._batches.release(queued)
        for part in parts:
            if not part.is_wanted:
                continue
            part.is_wanted = False
            if self._batches.withdraw(part.queued):
                continue
            batch = part.batch
            assert batch is not None
            batch.wanted -= 1
            if not batch.wanted:
                batch.task.cancel()
        if held:
            self._pump()
        self._blocked.wake()

    def _finish(self, items: list[BatchItem[Any]]) -> Callable[[EventContext[Any]], Any]:
        """What the event does at its turn."""
        failed = any(item.error is not None for item in items)
        function = self._definition.on_failure if failed else self._definition.finalizer
        return _nothing if function is None else lambda ctx: function(ctx, items)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Begin what can begin, and have it looked at again when more can."""
        if self._is_closed:
            return
        now = self._loop.time()
        while (queued := self._batches.take(now)) is not None:
            self._begin(_Batch(queued))
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

    def _begin(self, batch: _Batch) -> None:
        for part in batch.parts:
            part.batch = batch
            if part.work.entry is not None:
                part.work.entry.begun = True
        self._running[batch] = None
        name, context = f"kes-batch-{self._definition.name}", self._context.copy()
        batch.task = self._loop.create_task(self._run(batch), name=name, context=context)
        batch.task.add_done_callback(lambda task: self._ended(batch, task))

    async def _run(self, batch: _Batch) -> None:
        items = [part.item for part in batch.parts]
        answer, error, attempts = await self._calls.outcome(items)
        if error is not None:
            self._failed(batch, error, attempts)
            return
        for part, outcome in zip(batch.parts, self._results(answer, len(items)), strict=True):
            self._done(part, outcome, attempts)

    def _ended(self, batch: _Batch, task: asyncio.Task[None]) -> None:
        del self._running[batch]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not self._is_closed:  # cancelled by somebody else: nobody waits in vain
            self._failed(batch, error, 1)
        self._batches.ended(batch.queued)
        self._pump()
        self._blocked.wake()

    def _failed(self, batch: _Batch, error: BaseException, attempts: int) -> None:
        """The call has, as a whole."""
        for part in batch.parts:
            if not isinstance(error, Exception | asyncio.CancelledError):
                part.work.fatal = error
            self._done(part, error, attempts)

    def _done(self, part: _Part, outcome: Any, attempts: int) -> None:
        if not part.is_wanted:
            return
        part.is_wanted = False
        item, work = part.item, part.work
        if isinstance(outcome, BaseException):
            item.result, item.error = None, outcome if isinstance(outcome, Exception) else cancelled_inside(outcome)
            work.attempts = max(work.attempts, attempts)
            self._hold(part)
            self._not_tried(work, item)
        else:
            item.result, item.error = outcome, None  # whatever an earlier call, or the function itself, left there
        work.left -= 1
        if not work.left:
            work.done(work)

    def _hold(self, part: _Part) -> None:
        """It has failed, and holds its key until the event's turn is over; those before it are let pass."""
        queued = part.queued
        self._batches.hold(queued)
        part.work.held.append(queued)
        for waiting in self._batches.behind(queued):
            if waiting.work.is_before(part.work):
                self._batches.withdraw(waiting.queued)
                self._add(waiting, queued.lane.name, queued.key.name)

    def _not_tried(self, work: _Work, failed: BatchItem[Any]) -> None:
        """What is behind a failed item in its event, with its key, fails with it: the key is held until the event's
        turn is over."""
        for part in work.parts:
            if part.is_wanted and part.item.key == failed.key and self._batches.withdraw(part.queued):
                part.is_wanted = False
                part.item.result, part.item.error = None, failed.error
                work.left -= 1

    def _results(self, answer: Any, count: int) -> Sequence[Any]:
        """One result or exception per item."""
        if answer is None:
            return [None] * count
        if not isinstance(answer, list | tuple):
            answered = f"answered {type(answer).__name__!r}"
        elif len(answer) != count:
            answered = f"answered {len(answer)} results for {count} items"
        else:
            return answer
        error = BatchError(
            f"the batcher {self._definition.name} {answered}; it must return one result (or exception) per item, in "
            "their order, or None"
        )
        return [error] * count


def _nothing(_: EventContext[Any]) -> None:
    """Nothing to do."""
