"""The safeguards of warm moves (protocol, section 8), as in ``safeguards.py``, and what several of them need."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from streams.core import claims
from streams.core.group_member import Holdings
from streams.core.partition import PartitionState
from streams.core.transaction import Cut
from streams.model.group import Order
from streams.runtime.changelog import RELEASE_KEY, ReleaseMarker
from streams.runtime.engine import Engine
from streams.runtime.ownership import takeover
from streams.runtime.ownership.handover import Handover
from streams.runtime.ownership.look_up import LookUps
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.ownership.replicas import Replica, Replicas
from streams.runtime.ownership.takeover import TakeOvers
from streams.runtime.partition.worker import PartitionWorker
from streams.testing.simulation.broker import Broker, LogEntry

from .safeguards import Patch, instead, missed

Fits = Callable[[Replica], bool]


def _misread(copies: Replicas, take: Any, partition: int, when: Fits, read: Callable[[ReleaseMarker], Any]) -> Any:
    """Receivers see other markers than there are."""

    def fits(copy: Replica) -> bool:
        seen = copy.marker
        copy.marker = None if seen is None else read(seen)
        try:
            return when(copy)
        finally:
            copy.marker = seen

    return take(copies, partition, fits)


def _always(_: Replica) -> bool:
    return True


@instead(Replicas, "take", "marker: to", "struck_moves", "moves", seed=12)
def markers_are_for_everybody(original: Any, self: Replicas, partition: int, when: Fits = _always) -> Any:
    member = self._member.membership.group_metadata.member_id
    return _misread(self, original, partition, when, lambda seen: ReleaseMarker(member, seen.generation))


@instead(Replicas, "take", "marker: a member id", "struck_moves", "evictions", seed=12)
def markers_are_for_the_instance(original: Any, self: Replicas, partition: int, when: Fits = _always) -> Any:
    """Whoever has the same name is meant too: the successor of a receiver that was thrown out."""
    engine: Any = self._member
    instances, member = engine.connections.process.world.instances, engine.membership.group_metadata.member_id

    def for_my_name(seen: ReleaseMarker) -> ReleaseMarker:
        return ReleaseMarker(member, seen.generation) if instances.get(seen.to) == instances.get(member) else seen

    return _misread(self, original, partition, when, for_my_name)


@instead(Replicas, "take", "marker: generation", "pendulum", seed=576)
def old_markers_count_too(original: Any, self: Replicas, partition: int, when: Fits = _always) -> Any:
    return _misread(self, original, partition, when, lambda seen: ReleaseMarker(seen.to, 1 << 60))


@instead(claims, "_assign", "transit", "struck_moves", seed=18)
def plans_forget_who_expects_what(original: Any, read: Any, partition: int, owner: Any, expecting: Any) -> Any:
    return original(read, partition, owner, None)


@instead(Holdings, "handed_over", "withdrawn", "unclear_moves", "evictions")
def withdrawn_orders_count_when_carried_out(self: Holdings, partition: int, order: Order) -> None:
    self.owned -= {partition}
    self.releasing = {number: other for number, other in self.releasing.items() if number != partition}


def _released(self: Partitions, worker: PartitionWorker) -> bool:
    if worker.state is not PartitionState.RELEASING:
        return False
    worker.state = worker.state.to(PartitionState.RELEASED)
    self._forget(worker, "moved")
    return True


@instead(Partitions, "release", "donor", "moves", "unclear_moves")
async def donors_go_on_after_the_marker(self: Partitions, worker: PartitionWorker, order: Order) -> bool:
    self._member.pool.admit_release(worker.partition, worker.watermark, ReleaseMarker(order.to, order.generation))
    await self._member.pool.wait_settled(worker.partition)
    if worker.state is not PartitionState.ACTIVE:
        return False
    self._close_intake(worker, PartitionState.RELEASING)
    await self._finish(worker, 0.0)
    return _released(self, worker)


@instead(Partitions, "release", "donor", "struck_moves", "unclear_moves", seed=8)
async def handed_over_before_it_is_committed(self: Partitions, worker: PartitionWorker, order: Order) -> bool:
    self._close_intake(worker, PartitionState.RELEASING)
    await self._finish(worker, 0.0)
    if worker.state is PartitionState.RELEASING:
        self._member.pool.admit_release(worker.partition, worker.watermark, ReleaseMarker(order.to, order.generation))
    return _released(self, worker)


@instead(Broker, "produce", "donor", "unclear_moves", seed=51)
def markers_are_not_part_of_the_transaction(
    original: Any, self: Broker, name: str, epoch: int, topic: str, partition: int, entry: LogEntry
) -> bool:
    if entry.key == RELEASE_KEY:
        self.append(topic, partition, entry.key, entry.value, entry.headers)
        return True
    done: bool = original(self, name, epoch, topic, partition, entry)
    return done


@instead(LookUps, "_look_up_one", "donor", "overtaken", seed=33)
async def foreign_records_answer_a_look_up(original: Any, self: LookUps, partition: int, cut: Cut, serial: int) -> bool:
    """The receiver's offsets are taken for a proof that the donor's last transaction is not there."""
    plain = Cut()
    plain.offset = cut.offset
    answer: bool = await original(self, partition, plain, serial)
    return answer


@missed("copies", "evictions", "slow_restores", seed=58)
def standbys_are_promoted_as_they_are(patch: Patch) -> None:
    def reaches(self: Replicas, partition: int, goal: int) -> bool:
        copy = self._copies.get(partition)
        return copy is not None and (copy.caught_up or copy.position >= goal)

    start = TakeOvers._start

    def at_once(self: TakeOvers, worker: Any, found: Any, changelog: Any, *rest: Any) -> Any:
        return start(self, worker, found, (changelog[1], changelog[1]), *rest)

    patch.setattr(Replicas, "reaches", reaches)
    patch.setattr(TakeOvers, "_start", at_once)


@instead(Replicas, "_received", "copies", "everything", "refused_under_way", seed=234)
def the_tails_epoch_is_not_looked_at(original: Any, self: Replicas, partition: int, epoch: int, *read: Any) -> None:
    copy = self._copies.get(partition)
    original(self, partition, -1 if copy is None else copy.epoch, *read)


@instead(Partitions, "_void", "copies", "forgets", "evictions")
def lost_stores_are_kept_as_copies(original: Any, self: Partitions, worker: PartitionWorker) -> None:
    """They hold what was never committed."""
    store, record, timers = worker.store, worker.offset_record, worker.timers.contents()
    is_kept = worker.state is PartitionState.ACTIVE and store is not None
    if is_kept:
        worker.store = None
    original(self, worker)
    if is_kept:
        engine: Any = self._member
        end = engine.connections.process.broker.log(engine.config.changelog, worker.partition).stable
        engine.replicas.adopt(worker.partition, store, record, timers, end, engine.wall_ms())


@instead(Handover, "_was_handed_over", "copies", "moves", "struck_moves", seed=128)
def cancelled_events_leave_their_traces_in_copies(
    original: Any, self: Handover, worker: Any, order: Order, *rest: Any
) -> None:
    scope, worker.scope = worker.scope, SimpleNamespace(cancel_called=False)
    try:
        original(self, worker, order, *rest)
    finally:
        worker.scope = scope


@instead(Replicas, "adopt", "copies", "moves", "standbys", "rolling", seed=109)
def spare_copies_begin_where_the_receiver_is(
    original: Any, self: Replicas, partition: int, store: Any, offset: Any, timers: Any, position: int, *rest: Any
) -> None:
    """What it wrote until then is missed."""
    engine: Any = self._member
    log = engine.connections.process.broker.log(engine.config.changelog, partition)
    original(self, partition, store, offset, timers, log.stable, *rest)


@missed("take-over", "evictions", "struck_moves", "forgets", seed=128)
def copies_that_others_write_to_are_judged(patch: Patch) -> None:
    patch.setattr(takeover, "_fits", lambda copy, changelog: copy.position >= takeover._goal(changelog))
    patch.setattr(Engine, "is_current", property(lambda self: True))
