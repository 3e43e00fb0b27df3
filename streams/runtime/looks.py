"""Interjections that only looked: they are answered when it is proven that what they saw was the truth.

What changes nothing commits nothing, so no fence would refuse it: a member that was evicted while it was cut off, or
frozen, would answer from a state that its successor has changed meanwhile. The proof is one of three, each of them of a
moment *after* the look, at which the partition was still ours:

* the commit of a transaction whose offsets are sent after the look, if one is unsettled: the group fences it;
* else the group's answer to a heartbeat that was sent after the look: one for all looks that wait;
* else, where the group does not say so (the broker's own protocol, a generation that ends, an outage), an empty
  transaction, which sends the watermark again (rule R1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.core.transaction import TransactionState, Waiter
from streams.errors import StreamsError
from streams.runtime.failures import TakenBack
from streams.runtime.signal import Broadcast, Signal

if TYPE_CHECKING:
    from streams.runtime.lifecycle import Engine
    from streams.runtime.partition_worker import PartitionWorker


class Looks:
    """Those of one run that wait for their proof. On the loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = engine.connections.worker("kes-looks")
        self._waiting: list[tuple[PartitionWorker, Waiter]] = []
        self._asking: list[tuple[PartitionWorker, Waiter]] = []  # their heartbeat is under way
        self._came, self._told = Signal(), Broadcast()

    def answer(self, worker: PartitionWorker, waiter: Waiter) -> None:
        """An interjection has looked at this partition and changed nothing: tell its waiter when that is proven."""
        last = self._engine.pool.last_with(worker.partition)
        if not worker.state.admits:
            waiter(TakenBack())
        elif last is None or last.state is TransactionState.COMMITTING:  # it may have met the fence before the look
            self._waiting.append((worker, waiter))
            self._came.notify()
        else:
            last.wait(worker.partition, waiter)

    async def wait_answered(self, worker: PartitionWorker) -> None:
        """Wait until no look at this partition asks for its proof any more: the last transaction comes after them."""
        while any(asking is worker for asking, _ in self._asking + self._waiting):
            await self._told.wait()

    async def run(self) -> None:
        """Ask for proofs until cancelled. Whoever waits then hears that it was in vain."""
        try:
            while True:
                while not self._waiting:
                    await self._came.wait()
                self._asking, self._waiting = self._waiting, []
                proven = await self._is_proven()
                while self._asking:
                    self._tell(*self._asking.pop(), proven)
                self._told.notify()
        finally:
            for _, waiter in self._asking + self._waiting:
                waiter(TakenBack())

    def close(self) -> None:
        """Let the thread go."""
        self._thread.abandon()

    async def _is_proven(self) -> bool:
        engine, snapshot, sent = self._engine, self._engine.membership.snapshot, self._engine.now()
        if snapshot.generation < 0 or snapshot.incarnation != engine.incarnation:
            return False
        # The broker's session timer starts when it receives the heartbeat, so later than ``sent``: until sent + session
        # nobody else is given what is ours. Half of that, on a clock that goes on while the process stands still, and
        # looked at when the answer is here: if it was frozen meanwhile, the proof is too old.
        patience = engine.config.session_timeout_seconds / 2
        try:
            known = await self._thread.call(
                engine.takeover_client.is_member, snapshot.member_id, snapshot.generation, sent + patience
            )
        except StreamsError:
            return False
        return known and engine.is_current and engine.now() < sent + patience

    def _tell(self, worker: PartitionWorker, waiter: Waiter, proven: bool) -> None:
        pool, partition = self._engine.pool, worker.partition
        last = pool.last_with(partition)
        if not worker.state.admits:
            waiter(TakenBack())
        elif not proven:
            pool.admit(partition, worker.watermark, [], [], waiter)
        elif last is None:
            waiter(None)
        else:  # what it saw may be on its way still
            last.wait(partition, waiter)
