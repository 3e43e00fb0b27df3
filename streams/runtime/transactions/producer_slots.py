"""The slots of the pool, used in turn, and their replacement off the hot path.

A slot is free, in use by one transaction, or being replaced. Replacing is a task of its own that keeps trying, so a
task that needs the slot waits for its readiness and may be cancelled without harm.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import anyio
from anyio.abc import TaskGroup

from streams.errors import MembershipFatal, TransactionFailed
from streams.runtime.ports import TransactionSlot
from streams.runtime.signal import Signal

_log = logging.getLogger(__name__)

HOPELESS = frozenset(
    {
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        "CLUSTER_AUTHORIZATION_FAILED",
        "INVALID_TRANSACTION_TIMEOUT",
        "UNSUPPORTED_VERSION",
        "_AUTHENTICATION",
    }
)
"""The broker's answers to InitProducerId that are the same however often it is requested."""


SHAKEN_SECONDS: Final = 1.0
"""Seconds between two checks for free slots that lost a broker. A check sends nothing."""


class Slots:
    """The slots of one pool. All methods are called on the loop."""

    def __init__(self, slots: Sequence[TransactionSlot], topics: Sequence[str]) -> None:
        self._all = list(slots)
        self._topics = list(topics)
        self._free: deque[TransactionSlot] = deque()
        self._replacing: set[TransactionSlot] = set()
        self._changed = Signal()
        self._tasks: TaskGroup | None = None
        self._ours = anyio.Event()

    async def run(self) -> None:
        """Open all slots once the name is ours, and replace those that need it, until cancelled. Raises
        ``MembershipFatal`` if the broker will not have them at all."""
        try:
            async with anyio.create_task_group() as self._tasks:
                for slot in self._all:
                    self.replace(slot)
                while True:
                    await anyio.sleep(SHAKEN_SECONDS)
                    self._replace_shaken()
        finally:
            self._tasks = None
            for slot in self._all:
                slot.abandon()

    def _replace_shaken(self) -> None:
        """Open free slots again that lost a broker: their last markers may be missing, and readers wait for them."""
        for slot in [slot for slot in self._free if slot.is_shaken]:
            self._free.remove(slot)
            self.replace(slot)

    def name_is_ours(self, ours: bool) -> None:
        """Allow or forbid new producers: whether the group has let this instance in. Until then, and after a loss,
        another process may use its name and its transactional ids, and would be fenced. No producer is opened then."""
        if ours:
            self._ours.set()
        elif self._ours.is_set():
            self._ours = anyio.Event()

    def take(self) -> TransactionSlot | None:
        """Take the slot that was free for longest, or ``None``."""
        return self._free.popleft() if self._free else None

    async def _may_open(self) -> None:
        ours = None
        # Each loss makes another event. The name may be lost again between the wake-up and this task's turn.
        while ours is not self._ours:
            ours = self._ours
            await ours.wait()

    def give_back(self, slot: TransactionSlot) -> None:
        """Free a slot whose transaction has ended, for the next one, after the others; or open it again before."""
        # Under v1 an id that has aborted begins no transaction: some of its sequences are in the log, others are not.
        if not slot.is_open:
            self.replace(slot)
            return
        self._free.append(slot)
        self._changed.notify()

    def replace(self, slot: TransactionSlot) -> None:
        """Open a slot again, in the background; it becomes free when that is done."""
        if self._tasks is None or slot in self._replacing:
            return
        self._replacing.add(slot)
        self._tasks.start_soon(self._reopen, slot)

    async def wait_free(self, timeout_seconds: float) -> None:
        """Wait until ``take`` has something. Raises ``TransactionFailed`` after the timeout."""
        await self._wait(lambda: bool(self._free), timeout_seconds)

    async def wait_replaced(self, slot: TransactionSlot, timeout_seconds: float) -> None:
        """Wait until a replacement is done, so the slot's transaction is settled. Raises ``TransactionFailed``."""
        await self._wait(lambda: slot not in self._replacing, timeout_seconds)

    async def wait_all_replaced(self, timeout_seconds: float) -> None:
        """Wait until no replacement is under way. Raises ``TransactionFailed`` after the timeout."""
        await self._wait(lambda: not self._replacing, timeout_seconds)

    async def _wait(self, condition: Callable[[], bool], timeout_seconds: float) -> None:
        with anyio.move_on_after(timeout_seconds):
            while not condition():
                await self._changed.wait()
            return
        raise TransactionFailed(
            "init_transactions", "TIMED_OUT", "unknown", f"no producer became ready in {timeout_seconds:g} seconds"
        )

    async def _reopen(self, slot: TransactionSlot) -> None:
        pause, failures = 0.1, 0
        # After a loss the open transaction is aborted under its old epoch, so that the new owner of its partitions need
        # not wait for its time-out. A new epoch would fence a process that may have our name by now.
        if not self._ours.is_set():
            with contextlib.suppress(TransactionFailed):
                await slot.abort()
        while True:
            try:
                await slot.reopen(self._topics, may_open=self._may_open)
                break
            except TransactionFailed as failure:
                failures += 1
                if failure.code in HOPELESS:
                    raise MembershipFatal(
                        f"the broker refuses the transactional id {slot.transactional_id}: {failure}"
                    ) from failure
                _log.log(
                    logging.WARNING if failures == 1 else logging.DEBUG,
                    "%s is not ready yet, trying on: %s",
                    slot.transactional_id,
                    failure,
                )
            await anyio.sleep(pause)
            pause = min(pause * 2, 1.0)
        if failures:
            _log.info("%s is ready after %d failures", slot.transactional_id, failures)
        self._replacing.discard(slot)
        self._free.append(slot)
        self._changed.notify()
