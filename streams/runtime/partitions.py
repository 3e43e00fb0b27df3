"""The partitions of one member: brought to work, given up, made void, restarted.

What takes time (take-overs, barriers, restarts) runs beside the rest and looks at a partition's state whenever it comes
back from an await: the state decides, not the order in which tasks happen to wake up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

import anyio

from streams.core.partition import PartitionState
from streams.errors import EventFailure, MembershipLost, RecordRefused, StreamsError
from streams.group import Order
from streams.outcomes import ErrorResponse
from streams.runtime.batch_handlers import TOGETHER
from streams.runtime.changelog import ReleaseMarker
from streams.runtime.copies import StateCopy
from streams.runtime.failures import RestartNeeded
from streams.runtime.partition_worker import PartitionWorker
from streams.runtime.ports import Batch
from streams.runtime.signal import Broadcast

if TYPE_CHECKING:
    from streams.runtime.lifecycle import Engine

_log = logging.getLogger(__name__)

GATHER_SECONDS = 0.02
"""For those that restart together to be ready for one take-over, with one round of questions."""

_S = PartitionState
Failures = dict[int, tuple[int, BaseException]]
"""Offset -> attempts so far, and the last error: events that are known to fail."""


class Partitions:
    """The workers by partition, and every way into and out of work. On the loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.workers: dict[int, PartitionWorker] = {}
        self.changed = Broadcast()
        """Some partition is in another state now, or gone."""
        self._epoch = 0
        self._fresh: list[PartitionWorker] = []  # of restarts that are about to take over

    @property
    def restoring(self) -> frozenset[int]:
        """Those that will work once their state is here."""
        coming = (_S.RESTORING, _S.RESTARTING)
        return frozenset(partition for partition, worker in self.workers.items() if worker.state in coming)

    # -- into work -----------------------------------------------------------------------------------------------------

    def bring_up(self, partitions: Collection[int]) -> None:
        """Take these over: restore, then work. Those that are here already are left alone."""
        workers = []
        for partition in sorted(set(partitions) - self.workers.keys()):
            worker = self.workers[partition] = self._new_worker(partition)
            workers.append(worker)
        if workers:
            self._engine.spawn(partial(self._engine.takeovers.take_over, workers))

    def start_from(self, copy: StateCopy) -> None:
        """Work on a partition whose copy is complete: its donor said so."""
        worker = self.workers[copy.partition] = self._new_worker(copy.partition)
        worker.adopt(copy)
        assert copy.offset_record is not None
        worker.ids = copy.offset_record.ids  # the donor has checked them
        self.activate(worker, copy.offset_record.offset)

    def activate(self, worker: PartitionWorker, offset: int) -> None:
        """Its store is complete up to ``offset``: start working."""
        worker.state = worker.state.to(_S.ACTIVE)
        worker.watermark = offset
        worker.attempts.expect(worker.attempts.known(), offset)
        self._engine.spawn(partial(self._work, worker))
        self._engine.input.add(worker.partition, offset, worker.epoch)
        self._callback(self._engine.config.on_partition_activated, worker.partition)
        self.changed.notify()

    def deliver(self, batch: Batch) -> None:
        """Records from the input."""
        if not batch.records:  # the poll thread has no room although nobody's queue is full
            most = max(
                (w.inbox for w in self.workers.values()),
                key=lambda inbox: inbox.counted_size or inbox.counted,
                default=None,
            )
            if most is not None and (most.counted or most.counted_size):
                most.hold()
            else:  # all was handled while the question was on its way; nobody would resume an empty queue
                self._engine.input.handled(0, 0)
        for partition, records in batch.records.items():
            worker = self.workers.get(partition)
            if worker is None or worker.state is not _S.ACTIVE or batch.epochs.get(partition) != worker.epoch:
                self._engine.input.handled(len(records), batch.sizes[partition])
            else:
                worker.inbox.add(records, batch.sizes[partition])
        self._bound_memory()

    def _bound_memory(self) -> None:
        """Paused partitions keep what they hold, so with many slow ones the sum matters, too. Beyond half of the bound
        the other half is shared: a partition that holds its share is paused, one that holds less goes on."""
        rest = self._engine.config.max_queued_bytes_total // 2
        inboxes = [worker.inbox for worker in self.workers.values()]
        if sum([inbox.size for inbox in inboxes]) > rest:
            for inbox in inboxes:
                if inbox.records and inbox.size * len(inboxes) >= rest:
                    inbox.hold()

    def _new_worker(self, partition: int) -> PartitionWorker:
        self._epoch += 1
        return PartitionWorker(self._engine, partition, self._epoch)

    async def _work(self, worker: PartitionWorker) -> None:
        try:
            with worker.scope:
                await worker.run()
        except RestartNeeded as need:
            known = worker.attempts.known()
            if need.attempts:
                known[need.offset] = (need.attempts, need.error)
            self._begin_restart(worker, known, settle=True)
        except Exception as error:
            if worker.state.admits:
                self._engine.fail(error, drain=isinstance(error, EventFailure))
            else:
                _log.info("%s: an event failed after the partition was given up: %r", worker.topic_partition, error)
        finally:
            worker.finished.set()

    # -- out of work ---------------------------------------------------------------------------------------------------

    async def give_up(self, worker: PartitionWorker) -> None:
        """The barrier: let the running event end, commit what is complete, let the store go."""
        while worker.replaced_by is not None:  # by a restart
            worker = worker.replaced_by
        if worker.state is _S.DRAINING:  # by stop, and now by the group too
            await worker.gone.wait()
        if worker.state in (_S.RELEASED, _S.VOID):
            return
        restoring = worker.state is _S.RESTORING
        self._close_intake(worker, _S.DRAINING)
        if not restoring:
            await self._finish(worker)
            await self._engine.pool.wait_settled(worker.partition)
        if worker.state is not _S.DRAINING:
            return
        worker.state = worker.state.to(_S.RELEASED)
        worker.drop_store()
        self._forget(worker)

    async def release(self, worker: PartitionWorker, order: Order) -> bool:
        """Hand an active partition over: the last transaction here carries the marker. ``False``: it did not come to
        that (an event of it was refused, it was lost, or taken away meanwhile). Otherwise nothing is done any more for
        this partition, and its store is left with ``worker``."""
        self._close_intake(worker, _S.RELEASING)
        await self._finish(worker)
        if not _is_releasing(worker):
            return False
        marker = ReleaseMarker(order.to, order.generation)
        self._engine.pool.admit_release(worker.partition, worker.watermark, marker)
        await self._engine.pool.wait_settled(worker.partition)
        if not _is_releasing(worker):
            return False
        worker.state = worker.state.to(_S.RELEASED)
        self._forget(worker)
        return True

    def void_all(self, reason: str) -> None:
        """Nothing that is owned may be touched any more (rule R5)."""
        pool = self._engine.pool
        if not self.workers and not pool.unsettled:
            return
        pool.drop_everything(MembershipLost(reason))
        for worker in list(self.workers.values()):
            self._void(worker)

    def drop_stores(self) -> None:
        """At the very end, whatever state they are in."""
        for worker in self.workers.values():
            worker.drop_store()
        self.workers.clear()

    def _close_intake(self, worker: PartitionWorker, state: PartitionState) -> None:
        working = worker.state is not _S.RESTORING
        worker.state = worker.state.to(state)
        worker.close_intake()
        if working:
            self._engine.input.remove([worker.partition])
        self.changed.notify()

    async def _finish(self, worker: PartitionWorker) -> None:
        """Wait for the running event, and for the proofs of what looked; cancel the event when it takes too long."""
        with anyio.move_on_after(self._engine.config.drain_timeout_seconds):
            await worker.finished.wait()
        if not worker.finished.is_set():
            _log.warning("%s: the running event is cancelled, it took too long", worker.topic_partition)
            worker.scope.cancel()
            await worker.finished.wait()
        await self._engine.looks.wait_answered(worker)

    def _void(self, worker: PartitionWorker) -> None:
        self._close_intake(worker, _S.VOID)
        worker.scope.cancel()
        worker.drop_store()
        self._forget(worker)

    def _forget(self, worker: PartitionWorker) -> None:
        worker.gone.set()
        if self.workers.get(worker.partition) is worker:
            del self.workers[worker.partition]
            self._engine.copies.unhold(worker.partition)
            self._callback(self._engine.config.on_partition_revoked, worker.partition)
        self.changed.notify()

    # -- starting again ------------------------------------------------------------------------------------------------

    def refused(self, partition: int, origin: int, error: RecordRefused) -> None:
        """An event's records will never be taken. Its effects are out of the pool already."""
        engine, worker = self._engine, self.workers.get(partition)
        if worker is None or not worker.state.admits:
            return
        if worker.state is _S.DRAINING:
            self._void(worker)  # what it may still complete would leave a gap; the next owner meets the event again
            return
        known = worker.attempts.known()
        if origin >= TOGETHER:  # whose record it is comes out when they are handled one by one
            worker.attempts.apart(origin - TOGETHER, error)
            known = worker.attempts.known()
        elif origin != -1:
            known[origin] = (1, error)
        elif engine.config.error_policy.then is ErrorResponse.FAIL_CONSUMER:
            self._void(worker)
            engine.fail(EventFailure(f"{worker.topic_partition}: what an interjection sends is refused: {error}"))
            return
        else:
            _log.error("%s: what an interjection sends is refused: %s", worker.topic_partition, error)
        self._begin_restart(worker, known, settle=False)

    def dropped(self) -> None:
        """The broker did not know this member, so what was admitted is gone. If the membership is lost, that voids
        everything; if not (the coordinator forgot us for a moment), the stores must not stay ahead of their
        changelogs."""
        for worker in list(self.workers.values()):
            if worker.state in (_S.ACTIVE, _S.RELEASING):
                self._begin_restart(worker, {}, settle=False)
            elif worker.state is _S.DRAINING:
                self._void(worker)

    def _begin_restart(self, worker: PartitionWorker, known: Failures, *, settle: bool) -> None:
        if worker.state not in (_S.ACTIVE, _S.RELEASING):
            return
        worker.scope.cancel()
        self._close_intake(worker, _S.RESTARTING)
        self._engine.spawn(lambda: self._restart(worker, known, settle))

    async def _restart(self, worker: PartitionWorker, known: Failures, settle: bool) -> None:
        """Drop the state and restore it from the changelog, then go on; ``known`` failures are not tried again."""
        _log.warning("%s: its state is dropped and restored from the changelog", worker.topic_partition)
        await worker.finished.wait()
        if settle:
            await self._engine.pool.wait_settled(worker.partition)
        if worker.state is not _S.RESTARTING:
            return
        worker.drop_store()
        fresh = self._new_worker(worker.partition)
        worker.state = worker.state.to(_S.VOID)
        self.workers[worker.partition] = worker.replaced_by = fresh
        fresh.attempts.known_failures = known
        fresh.started_at = worker.started_at
        fresh.is_restart = True
        fresh.inbox.inherit(worker.inbox)
        self._fresh.append(fresh)
        if len(self._fresh) > 1:
            return  # the first one takes all of them over
        await anyio.sleep(GATHER_SECONDS)
        together, self._fresh = self._fresh, []
        await self._engine.takeovers.take_over(together)

    def _callback(self, function: Callable[[int], None] | None, partition: int) -> None:
        if function is not None:
            try:
                function(partition)
            except Exception as error:
                self._engine.fail(StreamsError(f"a callback for partition {partition} failed: {error!r}"))


def _is_releasing(worker: PartitionWorker) -> bool:
    """Whether it is still being handed over: anything may have happened during an await."""
    return worker.state is _S.RELEASING
