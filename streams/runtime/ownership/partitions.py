"""The partitions of one member: brought to work, given up, made void, restarted.

Long work (take-overs, barriers, restarts) runs beside the rest and looks at a partition's state whenever it comes back
from an await: the state decides, not the order in which tasks happen to wake up.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

import anyio

from streams.core.known_failures import KnownFailures
from streams.core.origin import Origin, batch_end, in_input, is_batch, is_interjection
from streams.core.partition import PartitionState
from streams.core.policy import Decision, Failure
from streams.core.position import Position, offsets_of, position_of
from streams.core.transaction import Cut
from streams.errors import EventFailure, MembershipLost, RecordRefused
from streams.model.group import Order
from streams.records import shown_key
from streams.runtime.keeping.kept_partition import KeptPartition
from streams.runtime.member import WorkingMember
from streams.runtime.ownership.partition_callbacks import Functions, PartitionCallbacks
from streams.runtime.ownership.replica import Replica
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.partition.delivery import DeliveryBudget
from streams.runtime.partition.failures import RestartNeeded, no_foreign_cancellation
from streams.runtime.partition.judging import of_interjection
from streams.runtime.partition.muted_worker import MutedWorker
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.ports import Polled
from streams.runtime.read_proofs import ReadProofs
from streams.runtime.signal import Broadcast
from streams.sak.murmur2 import partition_of

_log = logging.getLogger(__name__)

GATHER_SECONDS = 0.02
"""Partitions that restart together have so many seconds to get ready for one take-over, with one round of requests. A
single one does not wait: that was a third of the price of a refused event."""

PLACEMENT_SAMPLE = 1_000
"""So many keys are checked for their partition, one per batch of records. They are enough: a partitioner is right for
all keys or for few."""

_S = PartitionState


class Partitions:
    """The workers by partition, and every way into and out of work. On the loop."""

    def __init__(
        self,
        member: WorkingMember,
        replicas: Replicas,
        read_proofs: ReadProofs,
        take_over: Callable[[Collection[PartitionWorker]], Awaitable[None]],
        callbacks: Functions,
    ) -> None:
        """``take_over`` restores these workers and calls ``activate`` for each of them (``TakeOvers.take_over``)."""
        self._member = member
        self._replicas = replicas
        self._read_proofs = read_proofs
        self._take_over = take_over
        self._callbacks = PartitionCallbacks(member, callbacks)
        self.workers = member.workers
        self.changed = Broadcast()
        """Some partition is in another state now, or gone."""
        self.restored: dict[int, tuple[int, float]] = {}  # taken over: records of the changelog, and seconds
        self._epoch = 0
        self._budget = DeliveryBudget(member.now)
        self._most_queued = 0  # bytes of all queues, if nothing was handled since they were looked at
        self._placement_sample = PLACEMENT_SAMPLE
        self._warned_tables: set[str] = set()
        self._fresh: list[PartitionWorker] = []  # of restarts that are about to take over

    @property
    def restoring(self) -> frozenset[int]:
        """Return the partitions that will work once their state is here."""
        coming = (_S.RESTORING, _S.RESTARTING)
        return frozenset(partition for partition, worker in self.workers.items() if worker.state in coming)

    # -- into work -----------------------------------------------------------------------------------------------------

    def bring_up(self, partitions: Collection[int]) -> None:
        """Take these partitions over: restore, then work. Those that are here already are left alone."""
        workers = []
        for partition in sorted(set(partitions) - self.workers.keys()):
            # The worker is entered here, and not in the task: a plan that comes before the task runs must find it.
            worker = self.workers[partition] = self._new_worker(partition)
            workers.append(worker)
        if workers:
            self._member.spawn(partial(self._callbacks.assigned, workers, self._take_over))

    def start_from(self, copy: Replica) -> None:
        """Work on a partition whose copy is complete, by its donor's marker."""
        worker = self.workers[copy.partition] = self._new_worker(copy.partition)
        self._callbacks.moved_here(worker)
        worker.adopt(copy)
        worker.jobs.are_handed_over = True
        record = copy.offset_record
        assert record is not None
        further = self.further_topics
        worker.ids = record.ids  # the donor has checked them
        worker.input_ids = record.input_ids(further, copy.partition)
        known = [record.position_in(topic, copy.partition) for topic in further]
        self.activate(worker, position_of([record.offset, *(at[0] for at in known if at is not None)]), "moved")

    @property
    def further_topics(self) -> list[str]:
        """Return the inputs beside the source's own topic."""
        return [spec.topic for spec, _ in self._member.further_inputs]

    def activate(self, worker: PartitionWorker, position: Position, reason: str = "assigned") -> None:
        """Start to work on a partition whose store is complete up to ``position``."""
        worker.state = worker.state.to(_S.ACTIVE)
        worker.start_at(position)
        if (known := worker.offset_record) is not None:
            number = worker.partition
            worker.joined.warn(self._warned_tables, lambda name: known.position_in(name, number) is not None)
        self._member.spawn(partial(self._work, worker))
        for port, offset in zip(self._member.inputs, offsets_of(position), strict=True):
            port.add(worker.partition, offset, worker.epoch)
        self._callbacks.activated(worker, "restarted" if worker.is_restart else reason)
        self.changed.notify()

    def renew_offset(self, partition: int) -> None:
        """Send the offset record of a partition again, if it works: a transaction without events."""
        worker = self.workers.get(partition)
        if worker is not None and worker.state is _S.ACTIVE and not worker.is_closing:
            self._member.pool.admit(partition, worker.watermark, [], [])

    def deliver(self, batch: Polled) -> None:
        """Give the records of a batch to their partitions' workers, which may handle some at once."""
        if self._member.further_inputs:
            self.deliver_further(0, batch)
            return
        left = self._budget.begin()
        for partition, records in batch.records.items():
            worker = self.workers.get(partition)
            # These records were read for an earlier start of the partition: they come again from its new position, and
            # would count twice. They count as handled, or the poll thread would wait for their room without end.
            if worker is None or worker.state is not _S.ACTIVE or batch.epochs.get(partition) != worker.epoch:
                self._member.input.handled(len(records), batch.sizes[partition])
            else:
                left -= worker.delivery.take(records, batch.sizes[partition], left)
        self._budget.end(left)
        self._bound_memory(batch)
        if self._placement_sample:
            self._check_placement(batch)

    def deliver_further(self, input_number: int, batch: Polled) -> None:
        """Queue the records of the input with this number, one of several, and note which partitions are at its end."""
        member = self._member
        spec, now = member.further_inputs[input_number - 1][0] if input_number else None, member.now()
        for partition, records in batch.records.items():
            worker = self.workers.get(partition)
            if worker is None or worker.state is not _S.ACTIVE or batch.epochs.get(partition) != worker.epoch:
                member.inputs[input_number].handled(len(records), batch.sizes[partition])
                continue
            assert worker.inputs is not None
            found = records if spec is None else spec.received(records)
            worker.inputs.add(input_number, found, batch.sizes[partition], now, at_end=partition in batch.at_end)
        self._bound_memory(batch)
        if self._placement_sample:
            self._check_placement(batch)

    def _check_placement(self, batch: Polled) -> None:
        """Warn once of a key that another partitioner has placed: it has a state of its own there."""
        config = self._member.config
        record = next((record for records in batch.records.values() for record in records[:1]), None)
        if record is None or record.key is None:
            return
        self._placement_sample -= 1
        due = partition_of(record.key, config.num_partitions)
        if due != record.partition:
            self._placement_sample = 0
            _log.warning(
                "%s: the key %s belongs to partition %d of %d (murmur2): a producer of %s uses another partitioner. A "
                "key in two partitions has two states, one in each. Send with streams.EventProducer, or with "
                "partitioner=murmur2_random in clients of librdkafka. Nothing is wrong if each key is always sent to "
                "the same partition, on purpose; or if partitions were added to the topic",
                record.where,
                shown_key(record.key),
                due,
                config.num_partitions,
                record.topic,
            )

    def make_room(self, input_number: int) -> None:
        """Pause the partition that has most records of an input: its poll thread has no room, although no queue is
        full."""
        inboxes = (worker.inboxes[input_number] for worker in self.workers.values())
        most = max(inboxes, key=lambda inbox: inbox.counted_size or inbox.counted, default=None)
        if most is not None and (most.counted or most.counted_size):  # an empty queue would never be resumed
            most.hold()

    def _bound_memory(self, batch: Polled) -> None:
        """Bound the sum of all queues. Paused partitions keep their records, so with many slow ones the sum matters,
        too. Beyond half of the bound the other half is shared: a partition that holds its share is paused, one that
        holds less goes on."""
        rest = self._member.config.queues.max_queued_bytes_total // 2
        self._most_queued += sum(batch.sizes.values())
        if self._most_queued <= rest:  # whatever was handled meanwhile: no look at each queue for a handful of records
            return
        inboxes = [inbox for worker in self.workers.values() for inbox in worker.inboxes]
        self._most_queued = sum([inbox.size for inbox in inboxes])
        if self._most_queued > rest:
            for inbox in inboxes:
                if inbox.records and inbox.size * len(inboxes) >= rest:
                    inbox.hold()

    def _new_worker(self, partition: int) -> PartitionWorker:
        self._epoch += 1
        kind = MutedWorker if self._member.config.shadow_of else PartitionWorker
        return kind(self._member, partition, self._epoch)

    async def _work(self, worker: PartitionWorker) -> None:
        try:
            with worker.scope:
                await no_foreign_cancellation(worker.run, self._member.cancellation)
        except RestartNeeded as need:
            if need.failure.attempts:
                worker.failures.add(in_input(worker.input_number, need.origin), need.failure)
            self._begin_restart(worker, worker.failures, settle=True)
        except Exception as error:
            if worker.state.admits:
                self._member.fail(error, drain=isinstance(error, EventFailure))
            else:
                _log.info("%s: an event failed after the partition was given up: %r", worker.topic_partition, error)
        finally:
            worker.finished.set()

    # -- out of work ---------------------------------------------------------------------------------------------------

    async def give_up(self, worker: PartitionWorker) -> None:
        """Run the barrier: let the running event end, commit what is complete, free the store."""
        reason = "revoked" if self._member.accepting else "stopped"
        await worker.jobs.drain(is_move=self._member.accepting)
        spent = await self._callbacks.will_revoke(worker, reason)
        while worker.replaced_by is not None:  # by a restart
            worker = worker.replaced_by
        if worker.state is _S.DRAINING:
            # A stop drains it, and now the group wants it, too. The group must not be answered before that drain has
            # ended: its last transaction may still be committed.
            await worker.gone.wait()
        if worker.state in (_S.RELEASED, _S.VOID):
            return
        restoring = worker.state is _S.RESTORING
        self._close_intake(worker, _S.DRAINING)
        if not restoring:
            await self._finish(worker, spent)
            # This comes before the answer to the group: the next owner reads the changelog then, and misses what
            # commits later.
            await self._member.pool.wait_settled(worker.partition)
        if worker.state is not _S.DRAINING:
            return
        worker.state = worker.state.to(_S.RELEASED)
        worker.drop_store()
        self._forget(worker, reason)

    async def release(self, worker: PartitionWorker, order: Order) -> bool:
        """Hand an active partition over: the last transaction here carries the marker. ``False``: it was not handed
        over (an event of it was refused, it was lost, or taken away meanwhile). Otherwise no work is done for this
        partition any more, and its store is left with ``worker``."""
        # Before the marker: no job is to run here and there.
        await worker.jobs.drain(is_move=True)
        spent = await self._callbacks.will_revoke(worker, "moved")
        if worker.state is not _S.ACTIVE:  # anything may have happened meanwhile
            return False
        self._close_intake(worker, _S.RELEASING)
        await self._finish(worker, spent)
        if not _is_releasing(worker):
            return False
        # The marker comes only now: the receiver starts behind it. An event that is admitted later would be handled on
        # both sides.
        marker = worker.release_marker(order.to, order.generation)
        self._member.pool.admit_release(worker.partition, worker.watermark, marker)
        # The partition is ours until the marker is committed. If its transaction is aborted, or one of its events
        # refused, the work goes on here.
        await self._member.pool.wait_settled(worker.partition)
        if not _is_releasing(worker):
            return False
        worker.state = worker.state.to(_S.RELEASED)
        self._forget(worker, "moved")
        return True

    def committed(self, cuts: Mapping[int, Cut]) -> None:
        """Note how far the partitions of a transaction are committed."""
        for number, cut in cuts.items():
            worker = self.workers.get(number)
            if worker is not None:
                worker.committed = cut.offset
                if worker.timers.jobs.unsettled:
                    worker.jobs.settled(cut.changes)

    def void_all(self, reason: str) -> None:
        """Make all partitions void: nothing owned may be touched any more (rule R5)."""
        pool = self._member.pool
        if not self.workers and not pool.unsettled:
            return
        pool.drop_everything(MembershipLost(reason))
        for worker in list(self.workers.values()):
            self._void(worker)

    async def end(self, reason: str) -> None:
        """Make all partitions void at the end, and wait for the user's functions about that."""
        self.void_all(reason)
        await self._callbacks.wait_ended()

    def drop_stores(self) -> None:
        """Free all stores at the very end, in any state."""
        for worker in self.workers.values():
            worker.drop_store()
        self.workers.clear()

    def _close_intake(self, worker: PartitionWorker, state: PartitionState) -> None:
        worker.state = worker.state.to(state)
        worker.close_intake()
        self.changed.notify()

    async def _finish(self, worker: PartitionWorker, spent: float) -> None:
        """Wait for the running event and the proofs of looks; cancel the event after a drain's time less ``spent``."""
        with anyio.move_on_after(self._member.config.timeouts.drain_timeout_seconds - spent):
            await worker.finished.wait()
        if not worker.finished.is_set():
            _log.warning("%s: the running event is cancelled, it took too long", worker.topic_partition)
            worker.scope.cancel()
            await worker.finished.wait()
        await self._read_proofs.wait_answered(worker)

    def _void(self, worker: PartitionWorker) -> None:
        self._close_intake(worker, _S.VOID)
        worker.scope.cancel()
        worker.drop_store()
        self._forget(worker, "lost" if self._member.accepting else "stopped")

    def _forget(self, worker: PartitionWorker, reason: str) -> None:
        worker.gone.set()
        if self.workers.get(worker.partition) is worker:
            del self.workers[worker.partition]
            self._replicas.unhold(worker.partition)
            self._callbacks.revoked(worker, reason)
        self.changed.notify()

    # -- starting again ------------------------------------------------------------------------------------------------

    def refused(self, partition: int, origin: Origin, error: RecordRefused) -> None:
        """Restart the partition of an event whose records are refused for good. Its effects are out of the pool."""
        member, worker = self._member, self.workers.get(partition)
        if worker is None or not worker.state.admits:
            return
        if worker.state is _S.DRAINING:
            self._void(worker)  # later events would leave a gap; the next owner meets the event again
            return
        if is_batch(origin):  # the event to blame is found when they are handled one by one
            worker.split_batch(batch_end(origin), error)
        elif not is_interjection(origin):
            worker.failures.add(origin, Failure(1, error))
        else:
            decision, why = of_interjection(error, member.config.error_policy, "")
            text = f"{worker.topic_partition}: what an interjection sends is refused: {why}"
            if decision is Decision.EXIT:
                member.exit_now(f"{text}; {decision.value}")
            if decision is Decision.STOP:
                self._void(worker)
                member.fail(EventFailure(text))
                return
            _log.error("%s", text)
        self._begin_restart(worker, worker.failures, settle=False)

    def dropped(self) -> None:
        """Restart partitions whose admitted events are dropped, because the broker did not know this member. A lost
        membership voids everything; if it is not lost (the coordinator forgot us for a moment), the stores must not
        stay ahead of their changelogs."""
        for worker in list(self.workers.values()):
            if worker.state in (_S.ACTIVE, _S.RELEASING):
                self._begin_restart(worker, KnownFailures(), settle=False)
            elif worker.state is _S.DRAINING:
                self._void(worker)

    def position_gone(self, claimed: tuple[int, int]) -> None:
        """Restart a partition (number, epoch) whose next record in the loop is gone. Another member has handled and
        deleted it, and this one does not know yet that it was evicted. Otherwise the take-over names what is
        missing."""
        worker = self.workers.get(claimed[0])
        if worker is not None and worker.epoch == claimed[1]:
            self._begin_restart(worker, worker.failures, settle=True)

    def kept(self, partition: int) -> KeptPartition | None:
        """Return the way of a partition to the disk, if it is worked on here and kept there."""
        worker = self.workers.get(partition)
        return None if worker is None else worker.kept

    def begin_anew(self, kept: KeptPartition) -> None:
        """Restore a partition from its changelog again, because its folder cannot be used any more."""
        worker = self.workers.get(kept.partition)
        if worker is None or worker.kept is not kept:
            self._replicas.begin_anew(kept)
        elif worker.finished.is_set():  # its last transaction is under way, maybe with the marker that hands it over
            worker.drop_store()
        elif worker.state is _S.DRAINING:
            worker.scope.cancel()
        else:
            self._begin_restart(worker, worker.failures, settle=True)

    def _begin_restart(self, worker: PartitionWorker, known: KnownFailures, *, settle: bool) -> None:
        if worker.state not in (_S.ACTIVE, _S.RELEASING):
            return
        worker.scope.cancel()
        self._close_intake(worker, _S.RESTARTING)
        self._member.spawn(lambda: self._restart(worker, known, settle))

    async def _restart(self, worker: PartitionWorker, known: KnownFailures, settle: bool) -> None:
        """Drop the state and restore it from the changelog, then go on; ``known`` failures are not tried again."""
        _log.warning("%s: its state is dropped and restored from the changelog", worker.topic_partition)
        await worker.finished.wait()
        # Completed events are still in the pool. The state is restored from the changelog, so they have to be there
        # first.
        if settle:
            await self._member.pool.wait_settled(worker.partition)
        # A lost membership, or the end of the source, may have made the partition void during these waits.
        if worker.state is not _S.RESTARTING:
            return
        worker.drop_store()
        fresh = self._new_worker(worker.partition)
        worker.state = worker.state.to(_S.VOID)
        self.workers[worker.partition] = worker.replaced_by = fresh
        fresh.failures = KnownFailures(known.carried_over())
        # The offset where it began, and the interjections that wait, outlive the restart.
        fresh.started_at = worker.started_at
        fresh.is_restart = True
        fresh.inbox.inherit(worker.inbox)
        self._fresh.append(fresh)
        self.changed.notify()
        if len(self._fresh) > 1:
            return  # the first one takes all of them over
        with anyio.move_on_after(GATHER_SECONDS):
            while any(other.state is _S.RESTARTING for other in self.workers.values()):
                await self.changed.wait()
        together, self._fresh = self._fresh, []
        await self._take_over(together)


def _is_releasing(worker: PartitionWorker) -> bool:
    """Check that it is still being handed over: anything may have happened during an await."""
    return worker.state is _S.RELEASING
