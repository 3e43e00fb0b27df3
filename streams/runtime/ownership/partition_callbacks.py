"""The user's functions about partitions that come and go. On the loop.

Those of one partition run one after the other. None holds up the group: each call is bounded in time, and what it
raises is logged and counted.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

import anyio

from streams.core.partition import PartitionState
from streams.errors import StreamsError
from streams.metrics import CallbackFailed
from streams.records import PartitionChange
from streams.runtime.member import Member
from streams.runtime.partition.failures import cancelled_inside
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.signal import Broadcast

_log = logging.getLogger(__name__)

Function = Callable[[PartitionChange], object]
Functions = Mapping[str, Sequence[Function]]
"""By moment (``on_assigned``, ``on_activated``, ``on_will_revoke``, ``on_revoked``), in the order of registration."""
NO_FUNCTIONS: Final[Functions] = {}

_Call = tuple[Function, Awaitable[object] | None]
"""A function, and its answer if it was called already."""

SHARE: Final = 0.5
"""A call takes at most this share of ``drain_timeout_seconds``. The rest is for the running events."""


class PartitionCallbacks:
    """The functions of one run, and those of the settings."""

    def __init__(self, member: Member, functions: Functions) -> None:
        self._member = member
        self._functions = {moment: tuple(found) for moment, found in functions.items() if found}
        self._seconds = SHARE * member.config.timeouts.drain_timeout_seconds
        self._turns: dict[int, anyio.Lock] = {}
        self._under_way: Counter[int] = Counter()  # calls by partition
        self._warned: dict[int, int] = {}  # partition -> epoch that was warned of its revoke
        self._ended = Broadcast()

    async def assigned(
        self, workers: Sequence[PartitionWorker], restore: Callable[[Sequence[PartitionWorker]], Awaitable[None]]
    ) -> None:
        """Call ``on_assigned`` for partitions that are about to be restored, wait for that, then restore them."""
        if functions := self._functions.get("on_assigned"):
            async with anyio.create_task_group() as calls:
                for worker in workers:
                    change = PartitionChange(worker.partition, worker.epoch, "assigned")
                    calls.start_soon(self._call, "on_assigned", change, [(one, None) for one in functions])
        await restore(workers)

    def moved_here(self, worker: PartitionWorker) -> None:
        """Call ``on_assigned`` for a partition that works at once."""
        self._report("on_assigned", worker, "moved")

    def activated(self, worker: PartitionWorker, reason: str) -> None:
        """Call ``on_activated``."""
        self._of_settings(self._member.config.on_partition_activated, worker.partition)
        self._report("on_activated", worker, reason)

    async def will_revoke(self, worker: PartitionWorker, reason: str) -> float:
        """Call ``on_will_revoke``, once, if the partition works, and wait for that. Returns the seconds that it took:
        they count as those of the drain."""
        functions, began = self._functions.get("on_will_revoke"), self._member.now()
        if functions and worker.state is PartitionState.ACTIVE:
            worker.end_events()  # before the call: what it writes from a cache, say, would lack later events
            change = PartitionChange(worker.partition, worker.epoch, reason)
            await self._call("on_will_revoke", change, [(one, None) for one in functions])
        return self._member.now() - began

    def revoked(self, worker: PartitionWorker, reason: str) -> None:
        """Call ``on_revoked``."""
        self._of_settings(self._member.config.on_partition_revoked, worker.partition)
        self._report("on_revoked", worker, reason)

    async def wait_ended(self) -> None:
        """Wait until no call is under way, for as long as one call may take."""
        if self._under_way.total():
            with anyio.move_on_after(self._seconds, shield=True):
                while self._under_way.total():
                    await self._ended.wait()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _of_settings(self, function: Callable[[int], None] | None, partition: int) -> None:
        if function is not None:
            try:
                function(partition)
            except (Exception, asyncio.CancelledError) as error:
                self._member.fail(StreamsError(f"a callback for partition {partition} failed: {error!r}"))

    def _report(self, moment: str, worker: PartitionWorker, reason: str) -> None:
        """Call the functions: plain ones now, if no other call of the partition is under way."""
        functions = self._functions.get(moment, ())
        if not functions:
            return
        change = PartitionChange(worker.partition, worker.epoch, reason)
        begun: list[_Call] = [(one, None) for one in functions]
        if not self._under_way[change.partition] and not any(map(inspect.iscoroutinefunction, functions)):
            begun = [(one, answer) for one in functions if (answer := self._begin(moment, one, change)) is not None]
        if begun:
            self._under_way[change.partition] += 1  # from now on, not from when its task begins
            self._member.spawn(partial(self._call, moment, change, begun, is_counted=True))

    async def _call(
        self, moment: str, change: PartitionChange, calls: Sequence[_Call], *, is_counted: bool = False
    ) -> None:
        """Call functions, or await what they have answered, when the earlier calls of the partition have ended."""
        at = "an earlier call"
        self._under_way[change.partition] += not is_counted
        try:
            with anyio.move_on_after(self._seconds) as scope:
                async with self._turns.setdefault(change.partition, anyio.Lock()):
                    if moment == "on_will_revoke" and self._is_repeated(change):
                        return
                    for function, begun in calls:
                        at = _named(function)
                        answer = self._begin(moment, function, change) if begun is None else begun
                        if answer is not None:
                            await self._end(moment, function, change, answer)
            if scope.cancelled_caught:
                text = f"{at} took longer than {self._seconds:g} s (half of drain_timeout_seconds) and is cancelled"
                self._failed(moment, text, change, "TimeoutError")
        finally:
            self._under_way[change.partition] -= 1
            self._ended.notify()

    def _is_repeated(self, change: PartitionChange) -> bool:
        """Check for a second warning of one revoke: by the group and by a stop at the same time."""
        before, self._warned[change.partition] = self._warned.get(change.partition), change.epoch
        return before == change.epoch

    def _begin(self, moment: str, function: Function, change: PartitionChange) -> Awaitable[object] | None:
        try:
            answer = function(change)
        except (Exception, asyncio.CancelledError) as error:  # a plain call is not cancelled: it has raised that itself
            self._raised(moment, function, change, error)
            return None
        return answer if inspect.isawaitable(answer) else None

    async def _end(self, moment: str, function: Function, change: PartitionChange, answer: Awaitable[object]) -> None:
        try:
            await answer
        except Exception as error:
            self._raised(moment, function, change, error)
        except asyncio.CancelledError as error:
            if self._member.cancellation.is_real:
                raise  # this call is cancelled, and not something that it awaited
            self._raised(moment, function, change, error)

    def _raised(self, moment: str, function: Function, change: PartitionChange, error: BaseException) -> None:
        # Passed on, a cancellation would end what calls this, a take-over or a barrier, without a word.
        found = cancelled_inside(error)
        self._failed(moment, f"{_named(function)} failed", change, repr(found), found)

    def _failed(
        self, moment: str, text: str, change: PartitionChange, error: str, cause: Exception | None = None
    ) -> None:
        topic = self._member.config.topic
        _log.warning("%s[%d]: %s: %s; all goes on", topic, change.partition, moment, text, exc_info=cause)
        self._member.measure(CallbackFailed(moment, change.partition, error))


def _named(function: object) -> str:
    function = getattr(function, "func", function)  # a partial, with the source
    return getattr(function, "__qualname__", None) or repr(function)
