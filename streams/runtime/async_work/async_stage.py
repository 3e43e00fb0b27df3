"""Stages: the work of events ahead of their turn. Defined once per event source, opened once per run."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from streams.core.policy import Answered
from streams.records import IncomingRecord
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.host import Host
from streams.runtime.partition.reorder_buffer import AsideEntry, Entry, Finish, ReorderBuffer
from streams.statistics import StageStatistics

PlanT = TypeVar("PlanT")
WorkT = TypeVar("WorkT", bound="StageWork")


class Stage(Protocol):
    """One running stage. On the loop; nothing here may block or wait."""

    def begin(self, entry: Entry) -> bool:
        """Take the entry in, and settle it later. ``False``: there is no room for it, and ``entry.buffer.wake`` is
        called when there may be. Never raises for an error of the user's code: the entry fails."""
        ...

    def statistics(self) -> StageStatistics: ...

    def close(self) -> Collection[asyncio.Task[Any]]:
        """Cancel what still runs. Returns the tasks that take a moment to end."""
        ...


class StageDefinition(Protocol):
    """The definition of a stage in an event source."""

    @property
    def name(self) -> str: ...

    @property
    def described(self) -> tuple[str, ...]:
        """Return the parts that two copies of it have in common, as far as they can be seen from outside."""
        ...

    def open(self, host: Host) -> Stage: ...


class Follower(Stage, Protocol):
    """A stage that goes on where another one ends (``then``)."""

    def has_room(self, entry: Entry, key: Hashable) -> bool:
        """Check whether an event may begin whose work comes here later; if not, ``entry.buffer.wake`` is called when it
        may. (Events that are on their way here are not counted: those are as many as the stages before have room
        for.)"""
        ...

    def add(self, entry: Entry, key: Hashable, item: Any) -> None:
        """Go on with an entry, whose work has this key and this result so far. There is no check for room: its event is
        in the reorder buffer already."""
        ...


class StageWork(ABC):
    """The work of an event, or of a handler that has its turn, whose ``entry`` it settles."""

    __slots__ = ()

    entry: Entry

    @abstractmethod
    def finish(self, ctx: EventContext[Any]) -> Any:
        """Run the finalizer, or ``on_failure``, at the event's turn."""

    @abstractmethod
    def withdraw(self) -> None:
        """See ``partition.reorder_buffer.Work``."""


class TurnEntry(AsideEntry):
    """The entry of work that a handler requests from a stage in its turn. It is in no buffer: the handler waits for
    it."""

    __slots__ = ("_done",)

    def __init__(self, ctx: EventContext[Any]) -> None:
        topic, partition = ctx.topic_partition
        record = IncomingRecord(topic, partition, -1, None, None, [], 0)
        super().__init__(("turn", partition), record, None, None, ReorderBuffer(lambda: None))
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.trace = ctx._trace

    def drop(self) -> None:
        self.trace = None  # it is the span of the handler, which goes on
        super().drop()

    async def wait_settled(self) -> Finish:
        """Wait for the end of the work; return the rest of it for the turn. Raises the error with which the work
        failed."""
        await self._done
        if self.error is not None:
            raise self.error
        assert self.finish is not None
        return self.finish

    def _settled(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


def where_of(entry: Entry, key: Hashable) -> str:
    """Return where an entry and its key stand, for a log line."""
    record = entry.record
    if record.offset < 0:  # the rest of a handler, which has its turn
        return f"{record.topic}[{record.partition}]"
    return f"{record.where}, key {repr(key)[:64]}"


class AsyncStage(ABC, Generic[PlanT, WorkT]):
    """One running stage of work with a finalizer. On the loop; nothing here blocks or waits."""

    def __init__(self, *, takes_failures: bool) -> None:
        self._takes_failures = takes_failures  # there is an ``on_failure``

    @abstractmethod
    def admits(self, entry: Entry, plan: PlanT) -> bool:
        """Check whether there is room for this work; if not, ``entry.buffer.wake`` is called when there may be."""

    @abstractmethod
    def start(self, entry: Entry, plan: PlanT) -> WorkT:
        """Queue the work, without a look at the room, and make it that of the entry."""

    def begin(self, entry: Entry) -> bool:
        plan = entry.plan
        if plan is None:
            entry.settle(_nothing)
        elif self.admits(entry, plan):
            self.start(entry, plan)
        else:
            return False
        return True

    def end(self, work: StageWork, error: BaseException | None, attempts: int) -> None:
        """Settle the entry of work that has ended; a failure that is not for ``on_failure`` fails it."""
        # A demand to stop, and what ends the process, are not for ``on_failure``: no code of the user overrides them.
        for_user = isinstance(error, Exception) and not isinstance(error, Answered)
        if error is None or (self._takes_failures and for_user):
            work.entry.settle(work.finish)
        else:
            work.entry.fail(error, attempts)

    async def settled(self, ctx: EventContext[Any], plan: PlanT) -> tuple[WorkT, Finish]:
        """Do work for a handler that has its turn. Returns it with the rest of it for the turn; raises the error with
        which it failed, unless ``on_failure`` takes that."""
        entry = TurnEntry(ctx)
        try:
            return self.start(entry, plan), await entry.wait_settled()
        finally:
            # Also if the handler is cancelled while it waits: the work and the keys that it holds are given up with it.
            entry.drop()

    async def in_turn(self, ctx: EventContext[Any], plan: PlanT | None) -> Any:
        """Do all work of an event's plan, finalizer included, when the event has its turn already. Returns the
        finalizer's answer."""
        if plan is None:
            return None
        _, finish = await self.settled(ctx, plan)
        answer = finish(ctx)
        return await answer if isinstance(answer, Awaitable) else answer


def _nothing(_: EventContext[Any]) -> None:
    """Complete an event without work."""


class Item(Protocol):
    """One of several items of work for an event, with its own outcome."""

    error: Exception | None


ItemT = TypeVar("ItemT", bound=Item)


AtTurn = Callable[[EventContext[Any], list[Any]], Any]
"""A finalizer, or an ``on_failure``: it gets the list of an event's items."""


class ItemsWork(StageWork, Generic[ItemT]):
    """The items of one event, until each of them has its outcome. ``left``: the number without one."""

    __slots__ = ("_stage", "attempts", "entry", "fatal", "items", "left")

    def __init__(self, stage: ItemsStage[Any, Any], entry: Entry, items: list[ItemT]) -> None:
        self._stage = stage
        self.entry = entry
        self.items = items
        self.left = len(items)
        self.attempts = 1
        # An error that ends the process, and not the event. Kept until the turn: only there it is raised.
        self.fatal: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """Return the fatal error, or that of the first item that failed."""
        return self.fatal or next((item.error for item in self.items if item.error is not None), None)

    def finish(self, ctx: EventContext[Any]) -> Any:
        function = self._stage.finalizer if self.error is None else self._stage.on_failure
        return None if function is None else function(ctx, self.items)

    def withdraw(self) -> None:
        self._stage.cancel(self)


ItemsWorkT = TypeVar("ItemsWorkT", bound=ItemsWork[Any])


class ItemsStage(AsyncStage[PlanT, ItemsWorkT]):
    """A stage that does several items of work for an event."""

    def __init__(self, finalizer: AtTurn | None, on_failure: AtTurn | None) -> None:
        super().__init__(takes_failures=on_failure is not None)
        self.finalizer = finalizer
        self.on_failure = on_failure

    @abstractmethod
    def cancel(self, work: ItemsWorkT) -> None:
        """Stop the running work of items that are no longer wanted, and release their holds."""

    def item_done(self, work: ItemsWorkT) -> None:
        work.left -= 1
        if not work.left:
            self.all_done(work)

    def all_done(self, work: ItemsWorkT) -> None:
        self.end(work, work.error, work.attempts)

    async def submit(self, ctx: EventContext[Any], plan: PlanT) -> list[Any]:
        """Do the items of a handler that has its turn, without finalizer and ``on_failure``. Returns them; raises the
        first error."""
        work, _ = await self.settled(ctx, plan)
        if work.error is not None:
            raise work.error
        return work.items


@dataclass(frozen=True, eq=False)
class Ahead:
    """The way of one type's events to a stage. ``plan`` makes the contents of ``Entry.plan`` from an event: it is user
    code, and its errors fail the event."""

    stage: StageDefinition
    plan: Callable[[IncomingRecord, Any], Any]


class Stages:
    """The stages of one run, opened when they are first needed."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.loop = asyncio.get_running_loop()
        self._open: dict[int, tuple[StageDefinition, Stage]] = {}

    def get(self, definition: StageDefinition) -> Stage:
        # The definition is kept beside its stage: a new one cannot get its id while it is alive.
        known = self._open.get(id(definition))
        if known is None:
            known = self._open[id(definition)] = (definition, definition.open(self._host))
        return known[1]

    def statistics(self) -> tuple[StageStatistics, ...]:
        return tuple(stage.statistics() for _, stage in self._open.values())

    def close(self) -> list[asyncio.Task[Any]]:
        """Close all stages; running work is cancelled. Returns the tasks that take a moment to end."""
        tasks = [task for _, stage in self._open.values() for task in stage.close()]
        self._open.clear()
        return tasks


def described(*functions: Callable[..., Any] | None) -> tuple[str, ...]:
    """Return the names of a stage's functions, for ``StageDefinition.described``."""
    return tuple(
        ""
        if function is None
        else f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        for function in functions
    )


class Blocked:
    """Entries that found no room; ``wake`` has all of them try again when there may be some."""

    def __init__(self) -> None:
        self._buffers: dict[ReorderBuffer, None] = {}  # not a set: in the order in which they came

    def add(self, entry: Entry) -> None:
        self._buffers[entry.buffer] = None

    def wake(self) -> None:
        if self._buffers:
            buffers, self._buffers = self._buffers, {}
            for buffer in buffers:
                buffer.wake()
