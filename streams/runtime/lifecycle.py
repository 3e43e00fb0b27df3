"""The running event source: starts everything, hears the group, brings partitions and takes them away, and stops.

The order of events is the order in which the group spoke: one queue, one task. What takes time (take-overs, barriers,
restarts) runs beside it and looks at a partition's state whenever it comes back from an await: the state decides, not
the order in which tasks happen to wake up.
"""

from __future__ import annotations

import logging
import os
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from streams.config import EventSourceConfig
from streams.core.partition import PartitionState
from streams.core.recovery import Patience
from streams.core.router import Route, Router
from streams.core.schedule import Schedule
from streams.core.transaction import Transaction
from streams.errors import MembershipLost, RecordRefused, StreamsError
from streams.group import Assigned, Fatal, GroupEvent, Lost, Revoked
from streams.metrics import Measurement, MembershipChanged
from streams.outcomes import ErrorResponse
from streams.records import IncomingRecord
from streams.runtime.bridge import Inlet
from streams.runtime.failures import EventFailure, RestartNeeded
from streams.runtime.handler_threads import HandlerThreads
from streams.runtime.partition_worker import PartitionWorker
from streams.runtime.poller import size_of
from streams.runtime.ports import Connections
from streams.runtime.recovery import Recovery
from streams.runtime.signal import Signal
from streams.runtime.slot import Slot
from streams.runtime.slots import Slots
from streams.runtime.takeover import TakeOvers
from streams.runtime.transaction_pool import TransactionPool
from streams.runtime.watchdog import Watchdog

_log = logging.getLogger(__name__)

_S = PartitionState
CLOSE_SECONDS = 5.0
"""For leaving the group at the end."""


class Engine:
    """One run of an event source, on one event loop. Made new for each run."""

    def __init__(
        self,
        config: EventSourceConfig,
        router: Router,
        schedules: Sequence[tuple[Schedule, Route]],
        store_factory: Callable[..., Any],
        connections: Connections,
        *,
        message_limit: int,
        now: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        self.config = config
        self.router = router
        self.schedules = schedules
        self.store_factory = store_factory
        self.connections = connections
        self.message_limit = message_limit
        self.now = now
        self.rng = rng or random.Random()
        self.writer = uuid.UUID(int=self.rng.getrandbits(128)).hex
        self.workers: dict[int, PartitionWorker] = {}
        self.incarnation = 0
        self.members: Collection[str] = (config.instance_id,)
        self.failure: BaseException | None = None
        self.committed_transactions = 0
        self.committed_events = 0
        self._watchdog = Watchdog(config.rebalance_timeout_seconds)
        self._events: deque[GroupEvent] = deque()
        self._heard = Signal()
        self._stop = anyio.Event()
        self._drain = True
        self._epoch = 0
        self.handler_threads = HandlerThreads(connections.worker)
        self._tasks: TaskGroup

    # -- start and stop ------------------------------------------------------------------------------------------------

    async def run(self, started: Callable[[], None]) -> None:
        """Run until stopped. Raises what made it stop, if that was not ``stop``."""
        self._connect()
        try:
            async with anyio.create_task_group() as self._tasks:
                try:
                    self._begin()
                    started()
                    await self._stop.wait()
                    await self._drain_all()
                finally:  # also when it is cancelled, or one of its tasks failed
                    await self._leave()
                    self._tasks.cancel_scope.cancel()
        finally:
            self._disconnect()
        if self.failure is not None:
            raise self.failure

    def stop(self, *, drain: bool = True) -> None:
        """Ask it to stop; with ``drain``, after what is running is committed. Asking again without takes the drain
        back."""
        self._drain = self._drain and drain
        self._stop.set()

    def fail(self, error: BaseException, *, drain: bool = True) -> None:
        """Stop because of an error; the first one is raised by ``run``."""
        if self.failure is None:
            self.failure = error
            _log.error("the event source of group %s stops: %s", self.config.group_id, error)
        self.stop(drain=drain)

    def exit_now(self, text: str) -> None:
        """The user's policy asked for the process to end on the spot."""
        _log.critical("%s", text)
        logging.shutdown()
        os._exit(70)

    def _connect(self) -> None:
        config, connections = self.config, self.connections
        ids = [f"{config.group_id}.{config.instance_id}.{number}" for number in range(config.pool.pool_size)]
        slots = [Slot(name, connections, config.call_timeout_seconds) for name in ids]
        self.slots = Slots(slots, [config.changelog])
        self.control = connections.worker("kes-control")
        self.input = connections.input()
        self.membership, self.takeover_client = connections.group(self._watchdog.alive)
        self.pool = TransactionPool(
            config,
            self.slots,
            writer=self.writer,
            now=self.now,
            snapshot=lambda: self.membership.snapshot,
            settled=self._settled,
        )
        self.takeovers = TakeOvers(self)

    def _begin(self) -> None:
        patience = Patience(seconds=self.config.recovery_timeout_seconds)
        recovery = Recovery(self.pool, patience, self.now, self.takeovers.look_up, self._refused, self._dropped)
        self._spawn(self.slots.run, drain=False)
        self._spawn(lambda: self.pool.run(recovery), drain=False)
        self._spawn(self._hear)
        self._spawn(self._watchdog.run)
        self.input.start(self._deliver, self.fail)
        inlet = Inlet(self._said)
        self.membership.start(inlet.put)

    def _spawn(self, task: Callable[[], Any], *, drain: bool = True) -> None:
        async def guarded() -> None:
            try:
                await task()
            except Exception as error:
                self.fail(error, drain=drain)

        self._tasks.start_soon(guarded)

    async def _drain_all(self) -> None:
        if self._drain:
            async with anyio.create_task_group() as giving_up:
                for worker in list(self.workers.values()):
                    giving_up.start_soon(self._give_up, worker)
                giving_up.start_soon(self._until_no_drain, giving_up)

    async def _leave(self) -> None:
        self.input.close()
        self._void_all("the event source stops")
        leaving = self.connections.worker("kes-leave")  # the control thread may be waiting for an answer
        with anyio.move_on_after(CLOSE_SECONDS + 1, shield=True):
            await leaving.call(self.membership.close, CLOSE_SECONDS)
        leaving.abandon()

    async def _until_no_drain(self, giving_up: TaskGroup) -> None:
        """Cuts the drain short when it is taken back or can not succeed any more."""
        deadline = self.now() + self.config.drain_timeout_seconds + 2 * self.config.call_timeout_seconds
        while self._drain and self.workers and self.now() < deadline:
            await anyio.sleep(0.01)
        if self.workers:
            _log.warning("the drain is cut short; what is not committed will be done again by the next owner")
        giving_up.cancel_scope.cancel()

    def _disconnect(self) -> None:
        self._watchdog.stop()
        for worker in self.workers.values():
            worker.drop_store()
        self.workers.clear()
        self.handler_threads.close()
        self.control.abandon()

    # -- what the group says -------------------------------------------------------------------------------------------

    def _said(self, event: GroupEvent) -> None:
        self._events.append(event)
        self._heard.notify()

    async def _hear(self) -> None:
        while True:
            while self._events:
                event = self._events.popleft()
                match event:
                    case Lost():
                        self._on_lost(event)
                    case Fatal():
                        self._void_all("the group refuses this member")
                        self.fail(event.error, drain=False)
                    case Assigned() if event.incarnation >= self.incarnation:
                        self._on_assigned(event)
                    case Revoked() if event.incarnation == self.incarnation:
                        self._spawn(partial(self._revoke, event))
                    case _:
                        _log.debug("said before the membership was lost, void now: %r", event)
            await self._heard.wait()

    def _on_assigned(self, event: Assigned) -> None:
        self.incarnation = self.pool.incarnation = event.incarnation
        self.members = event.assignment.members
        self.measure(MembershipChanged(event.generation, len(event.owned), len(event.added), lost=False))
        if self._stop.is_set():
            return
        workers = []
        for partition in sorted(event.owned - self.workers.keys()):
            worker = self.workers[partition] = self._new_worker(partition)
            workers.append(worker)
        _log.info("generation %d: %d partitions, %d of them new", event.generation, len(event.owned), len(workers))
        if workers:
            self._spawn(partial(self.takeovers.take_over, workers))

    def _on_lost(self, event: Lost) -> None:
        _log.warning("the membership is lost (%s): everything owned is void, joining again", event.reason)
        self.measure(MembershipChanged(-1, 0, 0, lost=True))
        self._void_all(event.reason)
        self.incarnation = event.incarnation

    async def _revoke(self, event: Revoked) -> None:
        workers = [self.workers[partition] for partition in event.partitions if partition in self.workers]
        async with anyio.create_task_group() as giving_up:
            for worker in workers:
                giving_up.start_soon(self._give_up, worker)
        if event.incarnation == self.incarnation:
            self.membership.released(event.partitions)

    # -- partitions ----------------------------------------------------------------------------------------------------

    def _new_worker(self, partition: int) -> PartitionWorker:
        self._epoch += 1
        return PartitionWorker(self, partition, self._epoch)

    def activate(self, worker: PartitionWorker, offset: int) -> None:
        """Its store is complete up to ``offset``: start working."""
        worker.state = worker.state.to(_S.ACTIVE)
        worker.watermark = offset
        worker.known_failures = {met: known for met, known in worker.known_failures.items() if met >= offset}
        self._tasks.start_soon(self._work, worker)
        self.input.add(worker.partition, offset, worker.epoch)
        self._callback(self.config.on_partition_activated, worker.partition)

    async def _work(self, worker: PartitionWorker) -> None:
        try:
            with worker.scope:
                await worker.run()
        except RestartNeeded as need:
            known = worker.met_failures | worker.known_failures
            if need.attempts:
                known[need.offset] = (need.attempts, need.error)
            self._begin_restart(worker, known, settle=True)
        except Exception as error:
            if worker.state.admits:
                self.fail(error, drain=isinstance(error, EventFailure))
            else:
                _log.info("%s: an event failed after the partition was given up: %r", worker.topic_partition, error)
        finally:
            worker.finished.set()

    async def _give_up(self, worker: PartitionWorker) -> None:
        """The barrier: let the running event end, commit what is complete, let the store go."""
        worker = self.workers.get(worker.partition, worker)  # a restart may have put another one in its place meanwhile
        if worker.state is _S.DRAINING:  # by stop, and now by the group too
            await worker.gone.wait()
        if worker.state in (_S.RELEASED, _S.VOID):
            return
        restoring = worker.state is _S.RESTORING
        worker.state = worker.state.to(_S.DRAINING)
        worker.close_intake()
        if not restoring:
            self.input.remove([worker.partition])
            with anyio.move_on_after(self.config.drain_timeout_seconds):
                await worker.finished.wait()
            if not worker.finished.is_set():
                _log.warning("%s: the running event is cancelled, it took too long", worker.topic_partition)
                worker.scope.cancel()
                await worker.finished.wait()
            await self.pool.wait_settled(worker.partition)
        if worker.state is not _S.DRAINING:
            return
        worker.state = worker.state.to(_S.RELEASED)
        if not restoring:
            worker.drop_store()  # one that is being restored belongs to the restoring thread, which drops it
        self._forget(worker)

    def _void_all(self, reason: str) -> None:
        """Nothing that is owned may be touched any more (rule R5)."""
        if not self.workers and not self.pool.unsettled:
            return
        self.pool.drop_everything(MembershipLost(reason))
        for worker in list(self.workers.values()):
            self._void(worker)

    def _void(self, worker: PartitionWorker) -> None:
        restoring = worker.state is _S.RESTORING
        worker.state = worker.state.to(_S.VOID)
        worker.close_intake()
        worker.scope.cancel()
        if not restoring:
            self.input.remove([worker.partition])
            worker.drop_store()
        self._forget(worker)

    def _forget(self, worker: PartitionWorker) -> None:
        worker.gone.set()
        if self.workers.get(worker.partition) is worker:
            del self.workers[worker.partition]
            self._callback(self.config.on_partition_revoked, worker.partition)

    def _refused(self, partition: int, origin: int, error: RecordRefused) -> None:
        """An event's records will never be taken. Its effects are out of the pool already."""
        worker = self.workers.get(partition)
        if worker is None or not worker.state.admits:
            return
        if worker.state is _S.DRAINING:
            self._void(worker)  # what it may still complete would leave a gap; the next owner meets the event again
            return
        if origin in worker.dead_lettered:
            self.fail(EventFailure(f"{worker.topic_partition}@{origin}: its dead letter is refused: {error}"))
            return
        known = worker.met_failures | worker.known_failures
        if origin >= 0:
            known[origin] = (1, error)
        elif self.config.error_policy.then is ErrorResponse.FAIL_CONSUMER:
            self.fail(EventFailure(f"{worker.topic_partition}: what an interjection sends is refused: {error}"))
            return
        else:
            _log.error("%s: what an interjection sends is refused: %s", worker.topic_partition, error)
        self._begin_restart(worker, known, settle=False)

    def _dropped(self) -> None:
        """The broker did not know this member, so what was admitted is gone. If the membership is lost, that voids
        everything; if not (the coordinator forgot us for a moment), the stores must not stay ahead of their
        changelogs."""
        for worker in list(self.workers.values()):
            if worker.state is _S.ACTIVE:
                self._begin_restart(worker, {}, settle=False)
            elif worker.state is _S.DRAINING:
                self._void(worker)

    def _begin_restart(
        self, worker: PartitionWorker, known: dict[int, tuple[int, BaseException]], *, settle: bool
    ) -> None:
        if worker.state is not _S.ACTIVE:
            return
        worker.state = worker.state.to(_S.RESTARTING)
        worker.scope.cancel()
        worker.close_intake()
        self.input.remove([worker.partition])
        self._spawn(lambda: self._restart(worker, known, settle))

    async def _restart(
        self, worker: PartitionWorker, known: dict[int, tuple[int, BaseException]], settle: bool
    ) -> None:
        """Drop the state and restore it from the changelog, then go on; ``known`` failures are not tried again."""
        _log.warning("%s: its state is dropped and restored from the changelog", worker.topic_partition)
        await worker.finished.wait()
        if settle:
            await self.pool.wait_settled(worker.partition)
        if worker.state is not _S.RESTARTING:
            return
        worker.drop_store()
        fresh = self._new_worker(worker.partition)  # if the factory fails, the old one is there to give up
        worker.state = worker.state.to(_S.VOID)
        self.workers[worker.partition] = fresh
        fresh.known_failures = known
        fresh.started_at = worker.started_at
        await self.takeovers.take_over([fresh])

    def _deliver(self, batch: tuple[dict[int, list[IncomingRecord]], dict[int, int]]) -> None:
        by_partition, epochs = batch
        if not by_partition:  # the poll thread has no room although nobody's queue is full
            most = max(
                (w.inbox for w in self.workers.values()),
                key=lambda inbox: inbox.counted_size or inbox.counted,
                default=None,
            )
            if most is not None and (most.counted or most.counted_size):
                most.hold()
            else:  # all was handled while the question was on its way; nobody would resume an empty queue
                self.input.handled(0, 0)
        for partition, records in by_partition.items():
            worker = self.workers.get(partition)
            if worker is None or worker.state is not _S.ACTIVE or epochs.get(partition) != worker.epoch:
                self.input.handled(len(records), size_of(records))
            else:
                worker.inbox.add(records)

    # -- small services ------------------------------------------------------------------------------------------------

    def measure(self, measurement: Measurement) -> None:
        """Give a measurement to the user's handler; what that raises is its own problem."""
        if self.config.metrics_handler is not None:
            try:
                self.config.metrics_handler(measurement)
            except Exception:
                _log.exception("the metrics handler failed")

    def wall_ms(self) -> int:
        """Milliseconds since the epoch."""
        return int(time.time() * 1000)

    def _settled(self, txn: Transaction, committed: bool) -> None:
        if committed:
            self.committed_transactions += 1
            self.committed_events += txn.events
        if self.config.metrics_handler is not None:
            self.measure(self.pool.measure(txn, committed))

    def _callback(self, function: Callable[[int], None] | None, partition: int) -> None:
        if function is not None:
            try:
                function(partition)
            except Exception as error:
                self.fail(StreamsError(f"a callback for partition {partition} failed: {error!r}"))
