"""The running event source: starts everything, receives the group's events, and stops.

The group's events are handled in their order: one queue, one task. Their consequences for partitions are in
``ownership.partitions`` and ``ownership.handover``.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, NoReturn

import anyio
from anyio.abc import TaskGroup

from streams.core.cron import AnySchedule
from streams.core.router import Route, Router
from streams.core.transaction import Transaction, Waiter
from streams.errors import EventFailure, StreamsError, TopicReplaced
from streams.kafka.wire.group_bytes import ranges
from streams.metrics import Measurement, MembershipChanged
from streams.model.group import Assigned, Fatal, GroupEvent, Lost, Revoked, TakeOver, transactional_id
from streams.model.topics import InputSpec, SentTo
from streams.runtime.ad_hoc_interjections import AdHocInterjections
from streams.runtime.async_work.async_stage import Stages
from streams.runtime.bridge import Inlet
from streams.runtime.keeping.keeper import StateKeeper
from streams.runtime.keeping.on_disk import refuse_without_folder
from streams.runtime.ownership.following import FollowedSource
from streams.runtime.ownership.handover import Handover
from streams.runtime.ownership.look_up import LookUps
from streams.runtime.ownership.loop_purge import LoopPurge
from streams.runtime.ownership.partition_callbacks import NO_FUNCTIONS, Functions
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.ownership.range_reader import RangeReader
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.ownership.takeover import TakeOvers
from streams.runtime.ownership.topic_watch import TopicWatch
from streams.runtime.partition.delivery import typed
from streams.runtime.partition.failures import Cancellation, no_foreign_cancellation, trace_of
from streams.runtime.partition.handler_threads import HandlerThreads
from streams.runtime.partition.interjections import Proof
from streams.runtime.partition.state import Partition
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.ports import Blocking, Connections, Input, SourceLog
from streams.runtime.read_proofs import ReadProofs
from streams.runtime.reading.lookups import NO_LOOKUPS, Lookups
from streams.runtime.reading.schema_wait import SchemaWaits
from streams.runtime.signal import Signal
from streams.runtime.status import Status
from streams.runtime.system import MACHINE, Environment
from streams.runtime.transactions.hung_calls import HungCalls
from streams.runtime.transactions.measuring import measurements
from streams.runtime.transactions.muted_pool import pool_of
from streams.runtime.transactions.producer_slots import Slots
from streams.runtime.transactions.recovery import Recovery
from streams.settings.config import EventSourceConfig

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""Leaving the group at the end takes so many seconds, at most."""

JOBS_SECONDS = 1.0
"""Cancelled jobs have so many seconds to tidy up at the end. Then they are left to themselves."""


class Engine:
    """One run of an event source, on one event loop. Made new for each run."""

    fires_timers = True
    handover: Handover
    takeovers: TakeOvers

    def __init__(
        self,
        config: EventSourceConfig,
        router: Router,
        schedules: Sequence[tuple[AnySchedule, Route]],
        store_factory: Callable[..., Any],
        connections: Connections,
        *,
        message_limit: int,
        now: Callable[[], float],
        environment: Environment = MACHINE,
        topics: SentTo | None = None,
        inputs: Sequence[InputSpec] = (),
        lookups: Lookups = NO_LOOKUPS,
        callbacks: Functions = NO_FUNCTIONS,
    ) -> None:
        """``topics``: the only ones that are sent to; ``None``: any. ``inputs``: what is read beside the own topic;
        ``lookups``: what is looked into, which has been started."""
        self.config, self.lookups, self.router = config, lookups, router
        self.schedules, self.connections = schedules, connections
        self.message_limit, self.now, self.environment = message_limit, now, environment
        self.rng = environment.rng()
        self.writer = uuid.UUID(int=self.rng.getrandbits(128)).hex
        self.incarnation, self.cancellation = 0, Cancellation()
        self.members: Collection[str] = (config.instance_id,)
        self.failure: BaseException | None = None
        self.committed_transactions = self.committed_events = 0
        self.accepting = True  # partitions may still come here: until the last barrier begins
        self.workers: dict[int, PartitionWorker] = {}  # those that are here; ``partitions`` changes it
        self._watchdog = environment.watchdog(config.timeouts.rebalance_timeout_seconds)
        self._events: deque[GroupEvent] = deque()
        self._news, self._stop, self._tasks = Signal(), anyio.Event(), anyio.create_task_group()
        self._drain, self._has_joined = True, False
        self._threads: list[Blocking] = []

        self.hung_calls = HungCalls(self.measure, self.fail)
        ids = [transactional_id(config.group_id, config.instance_id, number) for number in range(config.pool.pool_size)]
        self.keeper: StateKeeper | None = None
        if config.state.folder:  # first of all: a folder that cannot be used is refused before anything is connected
            self.keeper = StateKeeper(
                config,
                lambda: self.thread("kes-keeper"),
                lambda: self.takeover_client,
                connections.topics,
                now=now,
                wall_ms=self.wall_ms,
            )
            self.keeper.has_ids = router.once_bounds is not None
        else:
            refuse_without_folder(store_factory)
        self.slots = Slots([connections.slot(name) for name in ids], [config.changelog])
        # These come before ``input``: with several inputs the consumer of the source has to report ends, too.
        readers = connections.further_inputs([spec.topic for spec in inputs]) if inputs else []
        self.further_inputs = tuple(zip(inputs, readers, strict=True))
        self.input = connections.input()
        self.inputs: list[Input] = [self.input, *readers]
        self.membership, self.takeover_client = connections.group(self._watchdog.alive)
        self._elsewhere = connections.source_log() if config.source_is_elsewhere else None
        self.source_log: TakeOver | SourceLog = self._elsewhere or self.takeover_client
        self.control = self.thread("kes-control")
        self.handler_threads = HandlerThreads(connections.worker)
        self.stages = Stages(self)
        self.pool = pool_of(config.shadow_of, inputs)(
            config,
            self.slots,
            partial(connections.records, topics),
            writer=self.writer,
            now=now,
            group_metadata=lambda: self.membership.group_metadata,
            further_fields=lookups.beside(self.writer, lambda number, at: self.workers[number].further_fields(at)),
            settled=self._settled,
            further_inputs=[spec.topic for spec in inputs],
            moved_to=lambda partition, offset: self.workers[partition].moved_to(offset),
        )
        self.read_proofs = ReadProofs(self)
        # The lambdas are needed because these rooms use each other, and the later one is not made yet.
        self.replicas = Replicas(self, store_factory, lambda partition: self.handover.replica_changed(partition))
        self.topic_watch, self.following = TopicWatch(self, self.replicas), FollowedSource(self)
        proofs, read = self.read_proofs, RangeReader(connections, self.hung_calls).read
        self.partitions = Partitions(self, self.replicas, proofs, lambda new: self.takeovers.take_over(new), callbacks)
        self.takeovers = TakeOvers(self, self.partitions, self.replicas, self.topic_watch, read)
        self.look_ups = LookUps(self, self.takeovers.stalls, read)
        self.handover = Handover(self, self.partitions, self.replicas)
        self.status = Status(self, self.replicas, self.handover)
        self.schema_waits = SchemaWaits(self)
        self.ad_hoc = AdHocInterjections(config, router, self.workers)

    @property
    def is_current(self) -> bool:
        """Check whether the group's last event still holds, as far as the membership knows."""
        return self.membership.group_metadata.incarnation == self.incarnation

    @property
    def is_draining(self) -> bool:
        """Check whether it stops in good order, with time to commit and to hand over."""
        return self._drain and self.failure is None

    # -- start and stop ------------------------------------------------------------------------------------------------

    async def run(self, started: Callable[[], None]) -> None:
        """Run until stopped. Raises the error that stopped it; none after ``stop``."""
        self.cancellation.begin()
        try:
            async with self._tasks:
                try:
                    self._begin()
                    started()
                    await self._stop.wait()
                    await self._drain_all()
                finally:  # also when it is cancelled, or one of its tasks failed
                    await self._leave()
        finally:
            try:
                await self._end_jobs()
            finally:  # also when it is cancelled once more
                try:
                    await self._disconnect()
                finally:
                    for thread in self._threads:  # last: to disconnect takes some of them
                        thread.abandon()
        if self.failure is not None:
            raise self.failure

    def stop(self, *, drain: bool = True) -> None:
        """Begin to stop; with ``drain``, after the running events are committed. A second call without it takes the
        drain back."""
        self._drain = self._drain and drain
        self._stop.set()

    def fail(self, error: BaseException, *, drain: bool = True) -> None:
        """Stop because of an error; ``run`` raises the first one. Nothing is drained into a topic that was replaced."""
        if self.failure is None:
            self.failure = error
            cause = error.__cause__ if isinstance(error, EventFailure) else None
            traced = None if cause is None else trace_of(cause)
            _log.error("the event source of group %s stops: %s", self.config.group_id, error, exc_info=traced)
        self.stop(drain=drain and not isinstance(error, TopicReplaced))

    def exit_now(self, text: str) -> NoReturn:
        """End the process on the spot: the user's policy requires it."""
        _log.critical("%s", text)
        logging.shutdown()
        # The log was closed before, since ``os._exit`` flushes nothing.
        self.environment.exit(70)

    def _begin(self) -> None:
        partitions, types = self.partitions, self.router.types
        topics = [self.config.topic, *(spec.topic for spec, _ in self.further_inputs)]
        recovery = Recovery(
            self.pool, self.config, topics, self.now, self.look_ups.look_up, partitions.refused, partitions.dropped
        )
        # Nothing is committed without these two, so after an error of theirs nothing can be drained.
        self.spawn(self.slots.run, drain=False)
        self.spawn(lambda: self.pool.run(recovery), drain=False)
        watch = partial(self._watchdog.run, self.takeovers.blocked)
        for task in (self._receive_events, watch, self.handover.run, self.status.run, self.read_proofs.run):
            self.spawn(task)
        self.spawn(self.topic_watch.run, drain=False)
        if self.config.loop:
            self.spawn(LoopPurge(self).run, drain=False)
        if self.keeper is not None:
            self.spawn(partial(self.keeper.run, partitions, self.pool.hold, self.fail))
            if self.keeper.snapshots is not None:
                self.spawn(partial(self.keeper.snapshots.run, partitions))
        for number, port in enumerate(self.inputs):
            deliver = partial(partitions.deliver_further, number) if number else typed(partitions.deliver, types)
            deliver = self.schema_waits.before(number, port, deliver)
            gone = partitions.position_gone if number and self.further_inputs[number - 1][0].is_own else None
            port.start(deliver, partial(partitions.make_room, number), self.reading_failed, gone)
        self.replicas.start()
        inlet = Inlet(self._received)
        self.handover.report()  # the first plan is to know what is on disk
        self.membership.start(inlet.put)

    def spawn(self, task: Callable[[], Awaitable[None]], *, drain: bool = True) -> None:
        """Run a task beside the others until it ends; an error of it stops the source."""

        async def guarded() -> None:
            try:
                await no_foreign_cancellation(task, self.cancellation)
            except Exception as error:
                self.fail(error, drain=drain)

        self._tasks.start_soon(guarded)

    async def _drain_all(self) -> None:
        if self.is_draining:
            # Partitions move first, as long as others can take them warm. Those that are left are given up.
            await self.handover.leave()
        self.accepting = False
        if self._drain:
            async with anyio.create_task_group() as giving_up:
                for worker in list(self.workers.values()):
                    giving_up.start_soon(self.partitions.give_up, worker)
                giving_up.start_soon(self._until_no_drain, giving_up)

    async def _leave(self) -> None:
        self.accepting = False
        for port in self.inputs:
            port.close()
        await self.partitions.end("the event source stops")
        # Nothing is left to do here, and a request to a client that is being closed would look like a failure.
        self._tasks.cancel_scope.cancel()
        leaving = self.connections.worker("kes-leave")  # the control thread may be waiting for an answer
        try:
            with anyio.move_on_after(CLOSE_SECONDS + 1, shield=True):
                await leaving.call(self._close_clients)
        finally:  # also when it is cancelled once more; the clients are closed all the same
            leaving.abandon()

    def _close_clients(self) -> None:
        """Close the clients. Blocks, on a thread that may have no waiter any more: so this is one call."""
        # The group is left first: others wait for its partitions.
        self.membership.close(CLOSE_SECONDS)
        self.status.withdraw()
        if self._elsewhere is not None:
            self._elsewhere.close()

    async def _until_no_drain(self, giving_up: TaskGroup) -> None:
        """Cut the drain short when it is taken back or cannot succeed any more."""
        # The running events have the time of a drain. Their transaction is committed behind them.
        deadline = (
            self.now() + self.config.timeouts.drain_timeout_seconds + 2 * self.config.timeouts.call_timeout_seconds
        )
        while self._drain and self.workers and self.now() < deadline:
            await anyio.sleep(0.01)
        if self.workers:
            _log.warning("the drain is cut short; the next owner does again what is not committed")
        giving_up.cancel_scope.cancel()

    async def _end_jobs(self) -> None:
        tasks = self.stages.close()
        if tasks:
            with anyio.move_on_after(JOBS_SECONDS, shield=True):
                await asyncio.wait(tasks)

    async def _disconnect(self) -> None:
        self._watchdog.stop()
        self.partitions.drop_stores()
        self.ad_hoc.close()
        self.replicas.close()
        self.status.close()
        self.handler_threads.close()
        if self.keeper is not None:  # the group has its answer; what is not written is read from the changelog again
            with anyio.move_on_after(self.config.timeouts.drain_timeout_seconds, shield=True):
                await self.keeper.close()

    # -- the group's events --------------------------------------------------------------------------------------------

    def _received(self, event: GroupEvent) -> None:
        self._events.append(event)
        self._news.notify()

    async def _receive_events(self) -> None:
        while True:
            while self._events:
                event = self._events.popleft()
                match event:
                    case Lost():
                        self._on_lost(event)
                    case Fatal():
                        self.partitions.void_all("the group refuses this member")
                        self.fail(event.error, drain=False)
                    case Assigned() if event.incarnation >= self.incarnation:
                        self._on_assigned(event)
                    case Revoked() if event.incarnation == self.incarnation:
                        self._on_revoked(event)
                    case _:
                        _log.debug("sent before the membership was lost, void now: %r", event)
            await self._news.wait()

    def _on_assigned(self, event: Assigned) -> None:
        self.incarnation = self.pool.incarnation = event.incarnation
        self.slots.name_is_ours(True)
        cause = self.status.rebalanced(event, self.members)
        self.members = event.assignment.members
        owned, added = len(event.owned), len(event.added)
        self.measure(MembershipChanged(event.generation, owned, added, lost=False, cause=cause))
        if not self._has_joined:
            self._has_joined = True
            _log.info("joined: %s", self._described(event))
        _log.info("generation %d: %d partitions, %d of them new (%s)", event.generation, owned, added, cause)
        if self.accepting:
            self.handover.assigned(event)

    def _described(self, event: Assigned) -> str:
        config = self.config
        brokers = config.bootstrap_servers
        if config.source_is_elsewhere:
            brokers += f" (topic {config.topic} on {config.source_bootstrap_servers})"
        return (
            f"group {config.group_id} as {config.instance_id}, topic {config.topic}, brokers {brokers}, "
            f"partitions {ranges(event.owned)} of {config.num_partitions}"
        )

    def _on_lost(self, event: Lost) -> None:
        _log.warning("the membership is lost (%s): everything owned is void, joining again", event.reason)
        self.measure(MembershipChanged(-1, 0, 0, lost=True, cause=event.reason))
        self.slots.name_is_ours(False)
        # All that is owned goes before anything of the next membership is looked at (protocol, 8a).
        self.handover.lost()
        self.partitions.void_all(event.reason)
        self.incarnation = event.incarnation

    def _on_revoked(self, event: Revoked) -> None:
        self.handover.revoked(event.partitions)
        # These, and not those that a later plan may bring: it may arrive before the task begins.
        workers = [self.workers[partition] for partition in event.partitions if partition in self.workers]
        self.spawn(partial(self._revoke, event, workers))

    async def _revoke(self, event: Revoked, workers: list[PartitionWorker]) -> None:
        async with anyio.create_task_group() as giving_up:
            for worker in workers:
                giving_up.start_soon(self.partitions.give_up, worker)
        # A membership that was lost during the barrier is owed no answer.
        if event.incarnation == self.incarnation:
            self.membership.released(event.partitions, event.incarnation, event.generation)
            self.handover.bring_up_again(event.partitions)

    def reading_failed(self, error: Exception) -> None:
        """Stop the source: it, or a copy that is waited for, cannot be read any more. A topic that was replaced is
        named as the cause."""

        async def raise_cause() -> None:
            await self.topic_watch.check()
            raise error

        self.spawn(raise_cause)

    # -- small services ------------------------------------------------------------------------------------------------

    def thread(self, name: str) -> Blocking:
        """Start a thread for blocking calls, which ends with the run."""
        self._threads.append(self.connections.worker(name))
        return self._threads[-1]

    def measure(self, measurement: Measurement) -> None:
        """Give a measurement to the user's handler; an error of the handler is only logged."""
        if self.config.metrics_handler is not None:
            try:
                self.config.metrics_handler(measurement)
            except (Exception, asyncio.CancelledError):  # which would end the task that measures, without a word
                _log.exception("the metrics handler failed")

    def prove_read(self, partition: Partition, waiter: Waiter, proof: Proof) -> None:
        self.read_proofs.answer(partition, waiter, proof)

    async def in_process(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self.connections.in_process(function, *args)

    def wall_ms(self) -> int:
        return int(self.environment.wall_seconds() * 1000)

    def _settled(self, txn: Transaction, committed: bool) -> None:
        if committed:
            self.committed_transactions += 1
            self.committed_events += txn.events
            self.partitions.committed(txn.cuts)
            if self.keeper is not None:
                self.keeper.settled(txn.cuts, self.partitions.kept, self.now() - txn.sealed_at)
        if self.config.metrics_handler is not None:
            for one in measurements(txn, self.router, self.config.changelog, self.now(), committed=committed):
                self.measure(one)

    def revoke_store(self, store: Any, partition: int) -> None:
        """Free a store. If its ``revoked`` fails, the source stops, after the other stores are freed."""
        try:
            store.revoked()
        except (Exception, asyncio.CancelledError) as error:
            failure = StreamsError(f"{self.config.topic}[{partition}]: the store's revoked() failed: {error!r}")
            failure.__cause__ = error
            self.fail(failure)
