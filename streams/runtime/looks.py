"""Interjections that only looked: they are answered when the state that they saw is proven current.

An interjection without changes commits nothing, so no fence would refuse it: a member that was evicted while it was cut
off, or frozen, would answer from a state that its successor has changed meanwhile. The proof is one of three, each of
them of a moment *after* the look, at which the partition was still ours:

* the commit of a transaction whose offsets are sent after the look, if one is unsettled: the group fences it;
* else the group's answer to a heartbeat that was sent after the look: one for all looks that wait;
* else, where the group's answer proves nothing (the broker's own protocol, a generation that ends, an outage), an empty
  transaction, which sends the watermark again (rule R1).
"""

from __future__ import annotations

from streams.core.transaction import UNSENT, Waiter
from streams.errors import StreamsError
from streams.runtime.member import Member
from streams.runtime.partition.failures import TakenBack
from streams.runtime.partition.state import Partition
from streams.runtime.signal import Broadcast, Signal


class Looks:
    """The looks of one run that wait for their proof. On the loop."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._thread = member.thread("kes-looks")
        self._waiting: list[tuple[Partition, Waiter]] = []
        self._asking: list[tuple[Partition, Waiter]] = []  # their heartbeat is under way
        self._came, self._answered = Signal(), Broadcast()

    def answer(self, worker: Partition, waiter: Waiter) -> None:
        """Call the waiter of an interjection that has looked at this partition and changed nothing, once that is
        proven."""
        last = self._member.pool.last_with(worker.partition)
        if not worker.state.admits:
            waiter(TakenBack())
        elif last is None or last.state not in UNSENT:  # it may have met the fence before the look
            self._waiting.append((worker, waiter))
            self._came.notify()
        else:
            last.wait(worker.partition, waiter)

    async def wait_answered(self, worker: Partition) -> None:
        """Wait until no look at this partition waits for its proof any more: the last transaction comes after them."""
        while any(asking is worker for asking, _ in self._asking + self._waiting):
            await self._answered.wait()

    async def run(self) -> None:
        """Prove looks until cancelled; then the waiting ones fail with ``TakenBack``."""
        try:
            while True:
                while not self._waiting:
                    await self._came.wait()
                self._asking, self._waiting = self._waiting, []
                proven = await self._is_proven()
                while self._asking:
                    self._answer(*self._asking.pop(), proven)
                self._answered.notify()
        finally:
            for _, waiter in self._asking + self._waiting:
                waiter(TakenBack())

    async def _is_proven(self) -> bool:
        member, snapshot, sent = self._member, self._member.membership.snapshot, self._member.now()
        if snapshot.generation < 0 or snapshot.incarnation != member.incarnation:
            return False
        # The broker's session timer starts when it receives the heartbeat, so later than ``sent``: until sent + session
        # no other member is given our partitions. Half of that, on a clock that goes on while the process stands still,
        # and looked at when the answer is here: if it was frozen meanwhile, the proof is too old.
        patience = member.config.session_timeout_seconds / 2
        try:
            known = await self._thread.call(
                member.takeover_client.is_member, snapshot.member_id, snapshot.generation, sent + patience
            )
        except StreamsError:
            return False
        return known and member.is_current and member.now() < sent + patience

    def _answer(self, worker: Partition, waiter: Waiter, proven: bool) -> None:
        pool, partition = self._member.pool, worker.partition
        last = pool.last_with(partition)
        if not worker.state.admits:
            waiter(TakenBack())
        elif not proven:
            pool.admit(partition, worker.watermark, [], [], waiter)
        elif last is None:
            waiter(None)
        else:  # the state that it saw may not be committed yet
            last.wait(partition, waiter)
