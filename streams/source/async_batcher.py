"""Items of many events in one call, inside an event source's order and transactions."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from streams.errors import BatchError
from streams.outcomes import ErrorPolicy, ExecutionState
from streams.records import IncomingRecord
from streams.runtime.async_work.batch_stage import BatchDefinition, BatchItem, BatchStage
from streams.runtime.async_work.invoke import check_ends, kind_of
from streams.runtime.partition.event_context import EventContext
from streams.settings.jobs import BatcherConfig, check_settings
from streams.settings.once import Once
from streams.source.event_source import EventSource

ValueT = TypeVar("ValueT")
StoreT = TypeVar("StoreT")
E = TypeVar("E")
P = TypeVar("P", bound=Callable[..., Any])
Answer = ExecutionState | None
Results = Sequence[Any] | None
Given = BatchItem[ValueT] | tuple[Hashable, ValueT]
AtTurn = Callable[[EventContext[StoreT], list[BatchItem[ValueT]]], Answer | Awaitable[Answer]]

DEFAULTS = BatcherConfig()
"""Settings of a batcher that is given none."""


class AsyncBatcher(Generic[StoreT, ValueT]):
    """Collects the items of many events, of all partitions, and passes them to one call. A finalizer runs at the turn
    of each event, when all of *its* items are done.

    ``execute(items)`` gets a ``list[BatchItem]`` and is ``async def`` (a task of the event loop), a plain function (on
    a thread), or, with ``kind="process"``, a plain function that runs in a process (function, items and results must be
    picklable). It returns a list with **one result per item, in their order**; an exception in it is that item's error,
    and no other's (``await asyncio.gather(..., return_exceptions=True)`` is such a list). ``None`` stands for ``None``
    for each. An exception that it raises is the error of all of its items (once ``config.retry`` has given up), and so
    is a wrong number of results (``BatchError``). Attributes that it sets on the items are ignored. Calls run **at
    least once**: again after a crash, a lost partition or an aborted attempt, perhaps in other company, so they must
    bear that (an upsert, an idempotency key, a fence).

    Items of one key and partition are never in two running calls, and keep the order of their events, also within a
    call, which may have several of them. ``BatcherConfig`` decides when a call begins; partitions take turns.

    ``finalizer(ctx, items)`` is a handler like any other: it runs in the order of the partition, has the store,
    forwards, and takes effect exactly once. Its items have ``result``, in the order the planner gave them; an event
    that has no items gets there too, with an empty list. ``on_failure(ctx, items)`` is called in its place when at
    least one of the items has an ``error``; without it such an event goes to its error policy's last word, with the
    first of the errors. Other events of the same call are not touched. Later items of a failed key are not called
    before the event's turn is over, so that the failure has its consequences first (later items of that key in the
    *same* call are the call's business; later ones of the same event fail with it).

    A full queue never blocks: an event for whose items there is no room stays where it is, and only its partition's
    reading waits with it. When a partition is given up, its items that are in no call yet are withdrawn. A running call
    is cancelled only when no partition needs any of its items.

    Make it before the event source starts; it belongs to that source. It may be the ``then`` of an
    ``AsyncJobScheduler``: the result of a job becomes one item, with the job's key.
    """

    def __init__(
        self,
        source: EventSource[StoreT],
        execute: Callable[[list[BatchItem[ValueT]]], Results] | Callable[[list[BatchItem[ValueT]]], Awaitable[Results]],
        finalizer: AtTurn[StoreT, ValueT] | None = None,
        *,
        config: BatcherConfig = DEFAULTS,
        kind: str | None = None,
        on_failure: AtTurn[StoreT, ValueT] | None = None,
        name: str = "",
    ) -> None:
        self.name = name or getattr(execute, "__qualname__", None) or repr(execute)
        check_settings(f"the batcher {self.name}", config, BatcherConfig)
        check_ends(f"the batcher {self.name}", "ctx", "items", finalizer=finalizer, on_failure=on_failure)
        self._source: EventSource[StoreT] = source
        self._definition: BatchDefinition = BatchDefinition(
            name=self.name,
            kind=kind_of(f"the batcher {self.name}", execute, kind),
            execute=execute,
            finalizer=finalizer,
            on_failure=on_failure,
            config=config,
        )

    def register_event_type(
        self,
        event_class: type[E],
        planner: Callable[[IncomingRecord, E], Sequence[Given[ValueT]] | Given[ValueT] | None] | None = None,
        /,
        *,
        key: Callable[[E], Hashable] | None = None,
        on_error: ErrorPolicy | None = None,
        once: Once | None = None,
    ) -> Callable[[P], P]:
        """Batch the items of each event of this class.

        The decorated (or given) function turns ``(record, event)`` into a list of items, each a ``(key, value)`` or a
        ``BatchItem(key, value, user_data)``, or a single one of them, or ``None`` (nothing to do: the event completes
        in its turn, without the finalizer). Or ``key`` alone maps an event to the key, and the event itself is the
        value of its only item. The function runs ahead of the event's turn, so it has no store; its exceptions go to
        ``on_error`` (default: ``config.error_policy``). ``once``: as that of ``EventSource.on``. Raises
        ``RegistrationError``.
        """
        return self._source._declared.handlers.register_planner(
            self._definition, self._definition.execute, _checked, event_class, planner, key, on_error, once
        )

    async def submit(self, ctx: EventContext[StoreT], items: Sequence[Given[ValueT]]) -> list[BatchItem[ValueT]]:
        """Batch items of a handler or an interjection that has its turn already; returns them, with their results.

        They travel with those of other partitions, and the partition waits meanwhile (nothing else has its turn). It is
        for work that depends on the store; register work that can run ahead. Neither finalizer nor ``on_failure`` is
        called. Raises the first error that an item has; items that are given as ``BatchItem`` have theirs.
        """
        stage = ctx._host.stages.get(self._definition)
        assert isinstance(stage, BatchStage)
        return await stage.submit(ctx, items_of(f"the batcher {self.name}: submit", list(items)) or [])


def _checked(what: str, _: IncomingRecord, planned: Any) -> list[BatchItem[Any]] | None:
    return items_of(what, planned, own=True)


def items_of(what: str, planned: Any, *, own: bool = False) -> list[BatchItem[Any]] | None:
    """Turn the answer of a planner into items. ``own``: copy those that are items already. Raises ``BatchError``."""
    if planned is None:
        return None
    if not isinstance(planned, list):
        if not isinstance(planned, BatchItem | tuple):
            raise BatchError(
                f"{what} returned {type(planned).__name__!r}; it must be a list of (key, value) or BatchItem"
            )
        planned = [planned]
    return [_item(what, one, own) for one in planned]


def _item(what: str, given: Any, own: bool) -> BatchItem[Any]:
    if isinstance(given, BatchItem):
        # A planner may return one object for many events, and each has a result of its own. Items of ``submit`` are the
        # caller's, who reads the results in them.
        item: BatchItem[Any] = copy.copy(given) if own else given
    elif isinstance(given, tuple) and len(given) == 2:
        item = BatchItem(given[0], given[1])
    else:
        raise BatchError(
            f"{what} returned an item of type {type(given).__name__!r}; it must be (key, value) or BatchItem"
        )
    try:
        hash(item.key)
    except TypeError as error:
        raise BatchError(f"{what} returned an item whose key cannot be hashed: {error}") from None
    return item
