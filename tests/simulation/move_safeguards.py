"""The safeguards of warm moves (protocol, section 8), each with a way to take it out, as in ``safeguards.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streams.core import claims
from streams.core.group_member import GroupMember
from streams.core.holdings import Holdings
from streams.core.partition import PartitionState
from streams.core.transaction import Cut
from streams.group import Order
from streams.records import Output
from streams.runtime.changelog import RELEASE_KEY, OffsetRecord, ReleaseMarker
from streams.runtime.engine import Engine
from streams.runtime.ownership.handover import Handover
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.ownership.replicas import FROM_START, Replica, Replicas
from streams.runtime.ownership.takeover import TakeOvers
from streams.runtime.partition.worker import PartitionWorker
from streams.testing.simulation import producer

from .safeguards import Patch, Safeguard

Fits = Callable[[Replica], bool]


def _read_markers(patch: Patch, read: Callable[[Replicas, ReleaseMarker], ReleaseMarker]) -> None:
    """Receivers see other markers than there are."""
    take = Replicas.take

    def misread(self: Replicas, partition: int, when: Fits = lambda _: True) -> Replica | None:
        def fits(copy: Replica) -> bool:
            seen = copy.marker
            copy.marker = None if seen is None else read(self, seen)
            try:
                return when(copy)
            finally:
                copy.marker = seen

        return take(self, partition, fits)

    patch.setattr(Replicas, "take", misread)


def markers_are_for_everybody(patch: Patch) -> None:
    def for_me(copies: Replicas, seen: ReleaseMarker) -> ReleaseMarker:
        return ReleaseMarker(copies._member.membership.snapshot.member_id, seen.generation)

    _read_markers(patch, for_me)


def markers_are_for_the_instance(patch: Patch) -> None:
    """Whoever has the same name is meant too: the successor of a receiver that was thrown out."""

    def for_my_name(copies: Replicas, seen: ReleaseMarker) -> ReleaseMarker:
        engine: Any = copies._member
        instances = engine.connections.process.world.instances
        member = engine.membership.snapshot.member_id
        return ReleaseMarker(member, seen.generation) if instances.get(seen.to) == instances.get(member) else seen

    _read_markers(patch, for_my_name)


def old_markers_count_too(patch: Patch) -> None:
    _read_markers(patch, lambda copies, seen: ReleaseMarker(seen.to, 1 << 60))


def plans_forget_who_expects_what(patch: Patch) -> None:
    place = claims._place
    patch.setattr(claims, "_place", lambda read, partition, owner, expecting: place(read, partition, owner, None))


def withdrawn_orders_count_when_carried_out(patch: Patch) -> None:
    def handed_over(self: Holdings, partition: int, order: Order) -> None:
        self.owned -= {partition}
        self.releasing = {number: other for number, other in self.releasing.items() if number != partition}

    patch.setattr(Holdings, "handed_over", handed_over)


def donors_go_on_after_the_marker(patch: Patch) -> None:
    async def release(self: Partitions, worker: PartitionWorker, order: Order) -> bool:
        self._member.pool.admit_release(worker.partition, worker.watermark, ReleaseMarker(order.to, order.generation))
        await self._member.pool.wait_settled(worker.partition)
        if worker.state is not PartitionState.ACTIVE:
            return False
        self._close_intake(worker, PartitionState.RELEASING)
        await self._finish(worker)
        if worker.state is not PartitionState.RELEASING:
            return False
        worker.state = worker.state.to(PartitionState.RELEASED)
        self._forget(worker)
        return True

    patch.setattr(Partitions, "release", release)


def markers_are_not_part_of_the_transaction(patch: Patch) -> None:
    produce = producer.SimProducer.produce

    def apart(self: producer.SimProducer, output: Output) -> bool:
        if output.key == RELEASE_KEY:
            self._broker.append(output.topic, output.partition, output.key, output.value, output.headers)
            return True
        return produce(self, output)

    patch.setattr(producer.SimProducer, "produce", apart)


def handed_over_before_it_is_committed(patch: Patch) -> None:
    async def release(self: Partitions, worker: PartitionWorker, order: Order) -> bool:
        self._close_intake(worker, PartitionState.RELEASING)
        await self._finish(worker)
        if worker.state is not PartitionState.RELEASING:
            return False
        self._member.pool.admit_release(worker.partition, worker.watermark, ReleaseMarker(order.to, order.generation))
        worker.state = worker.state.to(PartitionState.RELEASED)
        self._forget(worker)
        return True

    patch.setattr(Partitions, "release", release)


def standbys_are_promoted_as_they_are(patch: Patch) -> None:
    def reaches(self: Replicas, partition: int, goal: int) -> bool:
        copy = self._copies.get(partition)
        return copy is not None and (copy.caught_up or copy.position >= goal)

    start = TakeOvers._start

    def at_once(self: TakeOvers, worker: Any, offset: Any, source: Any, changelog_end: int, ids: Any) -> Any:
        return start(self, worker, offset, source, FROM_START, ids)

    patch.setattr(Replicas, "reaches", reaches)
    patch.setattr(TakeOvers, "_start", at_once)


def the_tails_epoch_is_not_looked_at(patch: Patch) -> None:
    received = Replicas._received

    def whatever(self: Replicas, partition: int, epoch: int, records: Any, position: int, end: int) -> None:
        copy = self._copies.get(partition)
        received(self, partition, -1 if copy is None else copy.epoch, records, position, end)

    patch.setattr(Replicas, "_received", whatever)


def lost_stores_are_kept_as_copies(patch: Patch) -> None:
    """They hold what was never committed."""
    void = Partitions._void

    def keep(self: Partitions, worker: PartitionWorker) -> None:
        store, record, timers = worker.store, worker.offset_record, worker.timers.contents()
        if worker.state is not PartitionState.ACTIVE or store is None:
            void(self, worker)
            return
        worker.store = None
        void(self, worker)
        engine: Any = self._member
        end = engine.connections.process.broker.log(engine.config.changelog, worker.partition).stable
        engine.replicas.adopt(worker.partition, store, record, timers, end)

    patch.setattr(Partitions, "_void", keep)


def cancelled_events_leave_their_traces_in_copies(patch: Patch) -> None:
    was_handed_over = Handover._was_handed_over

    def keep(self: Handover, worker: PartitionWorker, order: Order, position: int | None) -> None:
        scope, worker.scope = worker.scope, _NeverCancelled()  # type: ignore[assignment]
        try:
            was_handed_over(self, worker, order, position)
        finally:
            worker.scope = scope

    patch.setattr(Handover, "_was_handed_over", keep)


class _NeverCancelled:
    cancel_called = False


def spare_copies_begin_where_the_receiver_is(patch: Patch) -> None:
    """What it wrote until then is missed."""
    adopt = Replicas.adopt

    def at_the_end(
        self: Replicas, partition: int, store: Any, offset: OffsetRecord | None, timers: Any, position: int
    ) -> None:
        engine: Any = self._member
        log = engine.connections.process.broker.log(engine.config.changelog, partition)
        adopt(self, partition, store, offset, timers, log.stable)

    patch.setattr(Replicas, "adopt", at_the_end)


def foreign_records_answer_a_look_up(patch: Patch) -> None:
    """The receiver's offsets are taken for a proof that the donor's last transaction is not there."""
    look_up_once = TakeOvers._look_up_once

    async def hasty(self: TakeOvers, partition: int, cut: Cut, serial: int) -> bool:
        plain = Cut()
        plain.offset = cut.offset
        return await look_up_once(self, partition, plain, serial)

    patch.setattr(TakeOvers, "_look_up_once", hasty)


def late_answers_end_other_barriers(patch: Patch) -> None:
    patch.setattr(GroupMember, "_is_answer", lambda self, incarnation, _: incarnation == self.snapshot.incarnation)
    patch.setattr(GroupMember, "end_barrier", lambda self: None)


def copies_that_others_write_to_are_judged(patch: Patch) -> None:
    patch.setattr(Replicas, "written_at", lambda self, partition: -1)
    patch.setattr(Engine, "is_current", property(lambda self: True))


MOVE_SAFEGUARDS: Mapping[str, Safeguard] = {
    made.out.__name__: made
    for made in (
        Safeguard("marker: to", markers_are_for_everybody, ("struck_moves", "moves"), 25),
        Safeguard("marker: a member id", markers_are_for_the_instance, ("struck_moves", "evictions"), 8),
        Safeguard("marker: generation", old_markers_count_too, ("pendulum",), 190),
        Safeguard("transit", plans_forget_who_expects_what, ("overtaken",), 102),
        Safeguard("withdrawn", withdrawn_orders_count_when_carried_out, ("evictions", "unclear_moves"), 10),
        Safeguard("donor", donors_go_on_after_the_marker, ("moves", "unclear_moves"), 1),
        Safeguard("donor", markers_are_not_part_of_the_transaction, ("unclear_moves",), 3),
        Safeguard("donor", handed_over_before_it_is_committed, ("struck_moves", "unclear_moves"), 8),
        Safeguard("donor", foreign_records_answer_a_look_up, ("overtaken",), 12),
        Safeguard("section 8", late_answers_end_other_barriers, ("laggards",), 2105),
        Safeguard("copies", standbys_are_promoted_as_they_are, ("slow_restores", "evictions"), 2),
        Safeguard("copies", the_tails_epoch_is_not_looked_at, ("refused_under_way", "pendulum"), 248),
        Safeguard("copies", lost_stores_are_kept_as_copies, ("forgets", "evictions")),
        Safeguard("copies", cancelled_events_leave_their_traces_in_copies, ("moves", "struck_moves"), 2),
        Safeguard("copies", spare_copies_begin_where_the_receiver_is, ("standbys", "moves", "rolling"), 18),
        Safeguard("take-over", copies_that_others_write_to_are_judged, ("evictions", "struck_moves", "forgets"), 29),
    )
}
