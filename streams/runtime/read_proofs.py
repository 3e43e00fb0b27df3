"""Proofs of reads: an interjection that only read is answered when the state that it saw is proven current.

An interjection without changes commits nothing, so no fence would refuse it: a member that was evicted while it was cut
off, or frozen, would answer from a state that its successor has changed meanwhile. The proof is one of these, in this
order. Each but the lease is of a moment *after* the read, at which the partition was still ours:

* the commit of a transaction whose offsets are sent after the read, if one is unsettled: the group fences it;
* for queries, the *lease*: a heartbeat sent less than half a session ago was answered, and no rebalance had begun then.
  No other member may own the partition yet, unless the coordinator has lost its memory since. A static member has no
  lease: a process that joins under its name has its partitions at once;
* else the group's answer to a heartbeat that was sent after the read: one for all reads that wait;
* else, where the group's answer proves nothing (the broker's own protocol, a rebalance, an outage), and for queries
  that are to be confirmed, an empty transaction, which sends the watermark again (rule R1).

The read of a single key (``queries/points.py``) that nothing unsettled changes has seen what is committed, so the
lease alone proves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from streams.core.transaction import UNSENT, Waiter
from streams.errors import StreamsError
from streams.model.group import GroupMetadata
from streams.records import Change
from streams.runtime.member import Member
from streams.runtime.partition.failures import TakenBack
from streams.runtime.partition.interjections import Proof
from streams.runtime.partition.state import Partition
from streams.runtime.signal import Broadcast, Signal

_RENEW_SECONDS: Final = 0.1
"""Two heartbeats that are sent for the lease alone are so many seconds apart, at least."""


class ReadProofs:
    """The reads of one run that wait for their proof. On the loop."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._thread = member.thread("kes-read-proofs")
        self._waiting: list[tuple[Partition, Waiter]] = []
        self._asking: list[tuple[Partition, Waiter]] = []  # their heartbeat is under way
        self._came, self._answered = Signal(), Broadcast()
        self._is_wanted, self._requested_at = False, float("-inf")  # a heartbeat, though no read waits for it
        self._lease: tuple[GroupMetadata, float] | None = None  # the membership that was confirmed, and up to when
        settings = member.config.timeouts
        # Until so long after a heartbeat that found no rebalance, the group cannot have given our partitions away: by
        # the session, or because we do not come to a rebalance that began right behind it. Half of that is used.
        self._lease_seconds = min(settings.session_timeout_seconds, settings.rebalance_timeout_seconds) / 2

    def answer(self, worker: Partition, waiter: Waiter, proof: Proof) -> None:
        """Call the waiter of an interjection that has read this partition just now and changed nothing, once that
        is proven."""
        pool = self._member.pool
        last = pool.last_with(worker.partition)
        if not worker.state.admits:
            waiter(TakenBack())
        elif last is not None and last.state in UNSENT:  # any other may have met the fence before the read
            last.wait(worker.partition, waiter)
        elif proof is Proof.FENCE:
            pool.admit(worker.partition, worker.watermark, [], [], waiter)
        elif proof is Proof.LEASE and self.has_lease():
            self._when_committed(worker, waiter)
        else:
            self._waiting.append((worker, waiter))
            self._came.notify()

    def pending(self, partition: int) -> list[Mapping[bytes, Change]]:
        """Return the changes of this partition, by key, that are not known to be committed. The value of every other
        key is."""
        return [txn.cuts[partition].changes for txn in self._member.pool.unsettled if partition in txn.cuts]

    def renew(self) -> None:
        """Have a heartbeat sent, since there is no lease: a busy partition's reads wait for commits, and never need
        one."""
        if self._clock() - self._requested_at > _RENEW_SECONDS:
            self._is_wanted = True
            self._came.notify()

    async def wait_answered(self, worker: Partition) -> None:
        """Wait until no read of this partition waits for its proof any more: the last transaction comes after them."""
        while any(asking is worker for asking, _ in self._asking + self._waiting):
            await self._answered.wait()

    async def run(self) -> None:
        """Prove reads until cancelled; then the waiting ones fail with ``TakenBack``."""
        try:
            while True:
                while not (self._waiting or self._is_wanted):
                    await self._came.wait()
                self._is_wanted, self._requested_at = False, self._clock()
                self._asking, self._waiting = self._waiting, []
                proven = await self._is_proven()
                while self._asking:
                    self._answer(*self._asking.pop(), proven)
                self._answered.notify()
        finally:
            for _, waiter in self._asking + self._waiting:
                waiter(TakenBack())

    async def _is_proven(self) -> bool:
        member, metadata, sent = self._member, self._member.membership.group_metadata, self._clock()
        if metadata.generation < 0 or metadata.incarnation != member.incarnation:
            return False
        # The broker's session timer starts when it receives the heartbeat, so later than ``sent``. The clock goes on
        # while the process stands still and while the machine sleeps, and is looked at when the answer is here: if it
        # was frozen meanwhile, the proof is too old.
        deadline = member.now() + self._lease_seconds
        try:
            known = await self._thread.call(
                member.takeover_client.is_member, metadata.member_id, metadata.generation, deadline, True
            )
        except StreamsError:
            return False
        if known and not self._member.config.group.static_membership:
            self._lease = metadata, sent + self._lease_seconds
        return known and member.is_current and self._clock() < sent + self._lease_seconds

    def has_lease(self) -> bool:
        """Check the lease, on a clock that is read *after* the read. Another generation needs another heartbeat: with
        it a rebalance may have begun."""
        if self._lease is None:
            return False
        metadata, until = self._lease
        return self._member.membership.group_metadata is metadata and self._member.is_current and self._clock() < until

    def _clock(self) -> float:
        return self._member.environment.elapsed_seconds()

    def _answer(self, worker: Partition, waiter: Waiter, proven: bool) -> None:
        if not worker.state.admits:
            waiter(TakenBack())
        elif proven:
            self._when_committed(worker, waiter)
        else:
            self._member.pool.admit(worker.partition, worker.watermark, [], [], waiter)

    def _when_committed(self, worker: Partition, waiter: Waiter) -> None:
        """Answer once the state that was seen is committed."""
        last = self._member.pool.last_with(worker.partition)
        if last is None:
            waiter(None)
        else:
            last.wait(worker.partition, waiter)
