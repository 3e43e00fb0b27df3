"""The engine's safeguards, each with a way to take it out, and where that is noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from streams.core.partition import PartitionState
from streams.core.transaction import Transaction, TransactionState
from streams.errors import TransactionFailed
from streams.group import Lost, Revoked, Snapshot
from streams.runtime.engine import Engine
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.ownership.takeover import TakeOvers
from streams.runtime.partition.unit import Unit
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.transactions import pool as transaction_pool
from streams.runtime.transactions.pool import TransactionPool
from streams.runtime.transactions.producer_slot import Slot
from streams.runtime.transactions.recovery import Recovery
from streams.testing.simulation import clients, process

Patch = pytest.MonkeyPatch


class Safeguard(NamedTuple):
    """``rule``: of the protocol. ``out``: takes it out. ``profiles``: kinds of worlds in which it is missed; ``seed``:
    of the first of them, one that was a miss once, and is tried first."""

    rule: str
    out: Callable[[Patch], None]
    profiles: Sequence[str]
    seed: int = 0


async def _at_once(*_: Any, **__: Any) -> None:
    """Waits for nothing."""


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


def incarnation_is_not_looked_at(patch: Patch) -> None:
    def fence(self: TransactionPool, txn: Transaction) -> Snapshot:
        self.snapshot_used = self.snapshot()
        return self.snapshot_used

    patch.setattr(TransactionPool, "_fence", fence)


def lost_is_taken_for_nothing(patch: Patch) -> None:
    def on_lost(self: Engine, event: Lost) -> None:
        self.incarnation = self.pool.incarnation = event.incarnation

    patch.setattr(Engine, "_on_lost", on_lost)


def dropped_work_does_not_cost_the_store(patch: Patch) -> None:
    patch.setattr(Partitions, "dropped", _nothing)


def unclear_is_taken_for_committed(patch: Patch) -> None:
    async def look_up(self: TakeOvers, txn: Transaction) -> bool:
        return True

    patch.setattr(TakeOvers, "look_up", look_up)


def unclear_is_taken_for_aborted(patch: Patch) -> None:
    async def look_up(self: TakeOvers, txn: Transaction) -> bool:
        return False

    patch.setattr(TakeOvers, "look_up", look_up)


def abandoned_call_commits_when_it_comes_back(patch: Patch) -> None:
    async def commit(self: Slot, topic: str, offsets: Any, fence: Any, requested: Any) -> None:
        producer = self._alive("commit_transaction")

        def send_and_commit() -> None:
            metadata = fence().metadata
            if metadata is None:
                raise TransactionFailed("send_offsets_to_transaction", "NO_MEMBER", "stale")
            producer.send_offsets(topic, offsets, metadata, self._timeout)
            requested()
            producer.commit(self._timeout)

        await self._call(send_and_commit, name="commit", patience=2.0)

    patch.setattr(Slot, "commit", commit)


def calls_have_no_deadline(patch: Patch) -> None:
    call = process.SimWorker.call

    async def patient(self: process.SimWorker, function: Any, *args: Any, timeout: float | None = None) -> Any:
        return await call(self, function, *args)

    patch.setattr(process.SimWorker, "call", patient)


def younger_is_produced_before_older_is_flushed(patch: Patch) -> None:
    patch.setattr(transaction_pool, "_FLUSHED", tuple(TransactionState))


def younger_is_produced_during_recovery(patch: Patch) -> None:
    pump = TransactionPool.pump

    def always(self: TransactionPool) -> None:
        failure, self._failure = self._failure, None
        try:
            pump(self)
        finally:
            self._failure = failure

    patch.setattr(TransactionPool, "pump", always)


def only_the_failed_one_is_sent_again(patch: Patch) -> None:
    end = Recovery._end

    async def only_head(self: Recovery, txn: Transaction, *, abortable: bool) -> None:
        if txn is self._pool.unsettled[0]:
            await end(self, txn, abortable=abortable)

    patch.setattr(Recovery, "_end", only_head)


def older_one_is_disturbed_by_a_younger_failure(patch: Patch) -> None:
    patch.setattr(TransactionPool, "_settled_before", _at_once)


def aborted_work_is_not_sent_again(patch: Patch) -> None:
    end = Recovery._end

    async def forgotten(self: Recovery, txn: Transaction, *, abortable: bool) -> None:
        await end(self, txn, abortable=abortable)
        txn.outputs.clear()

    patch.setattr(Recovery, "_end", forgotten)


def starts_at_the_groups_offset(patch: Patch) -> None:
    def start(self: TakeOvers, worker: Any, group_offset: int | None, source: Any, ids: Any) -> int:
        return source[0] if group_offset is None else group_offset

    patch.setattr(TakeOvers, "_start_offset", start)


def restores_to_the_last_stable_offset(patch: Patch) -> None:
    def log_range(self: clients.SimTakeOver, topic: str, partitions: Any, deadline: float) -> Any:
        broker = self._process.broker
        return self._ask("range", deadline, lambda: {n: (0, broker.log(topic, n).stable) for n in partitions})

    patch.setattr(clients.SimTakeOver, "log_range", log_range)


def revoked_before_it_is_settled(patch: Patch) -> None:
    patch.setattr(TransactionPool, "wait_settled", _at_once)


def released_while_another_drain_runs(patch: Patch) -> None:
    give_up = Partitions.give_up

    async def at_once(self: Partitions, worker: PartitionWorker) -> None:
        if worker.state is not PartitionState.DRAINING:
            await give_up(self, worker)

    patch.setattr(Partitions, "give_up", at_once)


def revoked_is_answered_at_once(patch: Patch) -> None:
    revoke = Engine._revoke

    async def answered(self: Engine, event: Revoked, workers: list[PartitionWorker]) -> None:
        self.membership.released(event.partitions, event.incarnation, event.generation)
        await revoke(self, event, workers)

    patch.setattr(Engine, "_revoke", answered)


def failed_events_are_not_undone(patch: Patch) -> None:
    patch.setattr(Unit, "_undo", _nothing)


def refused_events_leave_their_state(patch: Patch) -> None:
    patch.setattr(Partitions, "refused", _nothing)


def given_up_partitions_still_admit(patch: Patch) -> None:
    patch.setattr(PartitionState, "admits", property(lambda self: True))


def old_batches_are_taken(patch: Patch) -> None:
    def deliver(self: Partitions, batch: Any) -> None:
        for partition, records in batch.records.items():
            worker = self.workers.get(partition)
            if worker is None or worker.state is not PartitionState.ACTIVE:
                self._member.input.handled(len(records), 0)
            else:
                worker.inbox.add(records, 0)

    patch.setattr(Partitions, "deliver", deliver)


SAFEGUARDS: dict[str, Safeguard] = {
    made.out.__name__: made
    for made in (
        Safeguard("8a", incarnation_is_not_looked_at, ("forgets", "crashes"), 21),
        Safeguard("R5", lost_is_taken_for_nothing, ("forgets", "crashes")),
        Safeguard("R5", dropped_work_does_not_cost_the_store, ("late", "lost_replies"), 4),
        Safeguard("R3", unclear_is_taken_for_committed, ("late", "lost_replies")),
        Safeguard("R3", unclear_is_taken_for_aborted, ("lost_replies", "late"), 3),
        Safeguard("R7", abandoned_call_commits_when_it_comes_back, ("late",), 33),
        Safeguard("R7", calls_have_no_deadline, ("lost_replies", "outages")),
        Safeguard("R2", younger_is_produced_before_older_is_flushed, ("handlers", "rebalances", "lost_replies")),
        Safeguard("R2", younger_is_produced_during_recovery, ("lost_replies", "late")),
        Safeguard("R4", only_the_failed_one_is_sent_again, ("late", "lost_replies")),
        Safeguard("R4", older_one_is_disturbed_by_a_younger_failure, ("refused_under_way", "lost_replies"), 4),
        Safeguard("R4", aborted_work_is_not_sent_again, ("lost_replies",), 1),
        Safeguard("section 6", starts_at_the_groups_offset, ("forgets",)),
        Safeguard("section 7", restores_to_the_last_stable_offset, ("handlers", "refused_under_way"), 11),
        Safeguard("section 8", revoked_before_it_is_settled, ("slow_rebalances",), 18),
        Safeguard("section 8", released_while_another_drain_runs, ("slow_rebalances",), 3),
        Safeguard("section 8", revoked_is_answered_at_once, ("rebalances",), 1),
        Safeguard("section 3", failed_events_are_not_undone, ("handlers",), 1),
        Safeguard("section 10", refused_events_leave_their_state, ("handlers",)),
        Safeguard("section 3", given_up_partitions_still_admit, ("refused_under_way",), 10),
        Safeguard("section 3", old_batches_are_taken, ("handlers", "refused_under_way", "rebalances"), 2),
    )
}
