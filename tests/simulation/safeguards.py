"""The engine's safeguards, each with what stands in for it when it is taken out, and where that is noticed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from streams.core.known_failures import KnownFailures
from streams.core.origin import batch_end, is_batch
from streams.core.partition import PartitionState
from streams.core.policy import Failure
from streams.core.timers import Timer, Timers
from streams.core.transaction import Transaction
from streams.kafka.questions.takeover import WireTakeOver
from streams.model.group import GroupMetadata, Lost, Revoked
from streams.records import Change, IncomingRecord
from streams.runtime.async_work.job_stage import JobStage
from streams.runtime.changelog import decode_timer
from streams.runtime.engine import Engine
from streams.runtime.ownership.look_up import LookUps
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.ownership.replica import Replica
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.ownership.takeover import TakeOvers
from streams.runtime.partition.batch_handlers import BatchContext
from streams.runtime.partition.due_timers import DueTimers
from streams.runtime.partition.reorder_buffer import Entry, ReorderBuffer
from streams.runtime.partition.timers import PartitionTimers
from streams.runtime.partition.unit import Unit
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.transactions.pool import TransactionPool
from streams.runtime.transactions.recovery import Recovery

Patch = pytest.MonkeyPatch


class Safeguard(NamedTuple):
    """``rule``: of the protocol. ``out``: takes it out. ``profiles``: kinds of worlds in which it is missed; ``seed``:
    of the first of them, one that was a miss once, and is tried first."""

    rule: str
    out: Callable[[Patch], None]
    profiles: Sequence[str]
    seed: int = 0


SAFEGUARDS: dict[str, Safeguard] = {}


def missed(rule: str, *profiles: str, seed: int = 0) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """What is decorated takes a safeguard out."""

    def register(out: Callable[[Patch], None]) -> Callable[[Patch], None]:
        SAFEGUARDS[out.__name__] = Safeguard(rule, out, profiles, seed)
        return out

    return register


def stand_in(patch: Patch, owner: object, name: str, new: Any) -> None:
    """Put ``new`` in the place of ``owner``'s attribute, which it is given first if it asks for ``original``."""
    original = getattr(owner, name)
    asks = callable(new) and next(iter(inspect.signature(new).parameters), "") == "original"
    patch.setattr(owner, name, (lambda *args, **more: new(original, *args, **more)) if asks else new)


def left_out(safeguard: str, owner: object, name: str, new: Any, rule: str, *profiles: str, seed: int = 0) -> None:
    """A safeguard that is out with ``new`` in the place of ``owner``'s attribute."""
    SAFEGUARDS[safeguard] = Safeguard(rule, lambda patch: stand_in(patch, owner, name, new), profiles, seed)


def instead(owner: object, name: str, rule: str, *profiles: str, seed: int = 0) -> Callable[[Any], Any]:
    """The same for what is decorated."""

    def register(new: Any) -> Any:
        left_out(new.__name__, owner, name, new, rule, *profiles, seed=seed)
        return new

    return register


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


async def at_once(*_: Any, **__: Any) -> None:
    """Waits for nothing."""


# -- transactions ------------------------------------------------------------------------------------------------------


@instead(TransactionPool, "_fence", "8a", "forgets", "crashes", seed=51)
def incarnation_is_not_looked_at(self: TransactionPool, txn: Transaction) -> GroupMetadata:
    self.metadata_used = self.group_metadata()
    return self.metadata_used


@instead(Engine, "_on_lost", "R5", "forgets", "crashes", seed=1)
def lost_is_taken_for_nothing(self: Engine, event: Lost) -> None:
    self.incarnation = self.pool.incarnation = event.incarnation


left_out("dropped_work_does_not_cost_the_store", Partitions, "dropped", nothing, "R5", "late", "lost_replies", seed=1)


@instead(LookUps, "look_up", "R3", "late", "lost_replies")
async def unclear_is_taken_for_committed(self: LookUps, txn: Transaction) -> bool:
    return True


@instead(LookUps, "look_up", "R3", "lost_replies", "late", seed=1)
async def unclear_is_taken_for_aborted(self: LookUps, txn: Transaction) -> bool:
    return False


@instead(Recovery, "_end", "R4", "late", "lost_replies", seed=5)
async def only_the_failed_one_is_sent_again(original: Any, self: Recovery, txn: Transaction) -> None:
    if txn is self._pool.unsettled[0]:
        await original(self, txn)


left_out(
    "older_one_is_disturbed_by_a_younger_failure",
    TransactionPool, "_settled_before", at_once, "R4", "refused_under_way", "lost_replies", seed=24,
)  # fmt: skip


@instead(Recovery, "_end", "R4", "lost_replies", seed=1)
async def aborted_work_is_not_sent_again(original: Any, self: Recovery, txn: Transaction) -> None:
    await original(self, txn)
    txn.outputs.clear()


# -- partitions and stores ---------------------------------------------------------------------------------------------


@instead(TakeOvers, "_start_offset", "section 6", "forgets")
def starts_at_the_groups_offset(self: TakeOvers, worker: Any, found: Any, known: int | None) -> int:
    return found.range[0] if found.group_offset is None else found.group_offset


@instead(WireTakeOver, "log_range", "section 7", "handlers", "refused_under_way", seed=17)
def restores_to_the_last_stable_offset(self: WireTakeOver, topic: str, partitions: Any, deadline: float) -> Any:
    return {number: (0, self.stable_end(topic, number, deadline)) for number in partitions}


left_out(
    "revoked_before_it_is_settled",
    TransactionPool, "wait_settled", at_once, "section 8", "slow_rebalances", seed=1,
)  # fmt: skip


@instead(Partitions, "give_up", "section 8", "slow_rebalances", seed=250)
async def released_while_another_drain_runs(original: Any, self: Partitions, worker: PartitionWorker) -> None:
    if worker.state is not PartitionState.DRAINING:
        await original(self, worker)


@instead(Engine, "_revoke", "section 8", "rebalances", seed=1)
async def revoked_is_answered_at_once(original: Any, self: Engine, event: Revoked, workers: Any) -> None:
    self.membership.released(event.partitions, event.incarnation, event.generation)
    await original(self, event, workers)


left_out("failed_events_are_not_undone", Unit, "_undo", nothing, "section 3", "handlers", seed=1)
left_out("refused_events_leave_their_state", Partitions, "refused", nothing, "section 10", "handlers")
left_out(
    "given_up_partitions_still_admit",
    PartitionState, "admits", property(lambda self: True), "section 3", "refused_under_way", seed=6,
)  # fmt: skip


@instead(Partitions, "deliver", "section 3", "handlers", "refused_under_way", "rebalances", seed=2)
def old_batches_are_taken(self: Partitions, batch: Any) -> None:
    for partition, records in batch.records.items():
        worker = self.workers.get(partition)
        if worker is None or worker.state is not PartitionState.ACTIVE:
            self._member.input.handled(len(records), 0)
        else:
            worker.inbox.add(records, 0)


# -- work that runs ahead of its turn ----------------------------------------------------------------------------------


def first_settled_is_ready(self: ReorderBuffer) -> bool:
    """Finalizers run as their jobs end, and what is admitted has gaps before it."""
    for entry in list(self.entries):
        if entry.is_settled:
            self.entries.remove(entry)
            self.entries.appendleft(entry)
            return True
    return False


left_out("whoever_is_done_is_next", ReorderBuffer, "is_ready", property(first_settled_is_ready), "section 3", "ahead")


@instead(PartitionWorker, "_step_ahead", "section 3", "ahead")
async def plain_handlers_do_not_wait_for_jobs(original: Any, self: Any, records: Any, start: int) -> int:
    """They are not put in the reorder buffer, and are admitted although there are events before them."""
    if not self._issuer.is_blocked and not self._issuer.goes_ahead(records[start]):
        await self._execution.one(records[start], None)
        self.inbox.handled(1)
        return start + 1
    taken: int = await original(self, records[: start + 1], start)
    return taken


@instead(JobStage, "add", "section 3", "ahead", seed=1)
def jobs_are_done_when_they_have_begun(original: Any, self: JobStage, entry: Entry, key: Any, item: Any) -> None:
    """As if the result did not matter: committed, although a crash may take the job with it."""
    original(self, entry, key, item)
    entry.settle(lambda ctx: None)


# -- batch handlers ----------------------------------------------------------------------------------------------------


def of_the_last(self: BatchContext[Any]) -> int:
    return batch_end(self._batch) if is_batch(self._batch) else self._batch


left_out("lists_that_failed_are_not_undone", Unit, "_undo", nothing, "batch handlers", "batches")
left_out(
    "refused_lists_are_their_last_events_fault",
    BatchContext, "_origin", property(of_the_last), "batch handlers", "batches",
)  # fmt: skip
left_out(
    "refused_lists_are_tried_again_as_they_are",
    KnownFailures, "split_batch", nothing, "batch handlers", "batches", seed=4,
)  # fmt: skip


@instead(KnownFailures, "carried_over", "batch handlers", "batches", seed=4)
def what_came_apart_is_forgotten_by_a_restart(original: Any, self: KnownFailures) -> dict[int, Failure]:
    """Of a store that cannot undo, or after a refused record."""
    return {origin: failure for origin, failure in original(self).items() if not is_batch(origin)}


# -- timers ------------------------------------------------------------------------------------------------------------

CRASHES = ("crashes", "everything", "handlers")


@instead(PartitionTimers, "admitted", "timers", *CRASHES, seed=3)
def removals_are_not_in_the_transaction(original: Any, *of: Any) -> list[Change]:
    return [change for change in original(*of) if change.value is not None]


@instead(PartitionTimers, "admitted", "timers", *CRASHES, seed=3)
def timers_are_not_in_the_transaction(original: Any, *of: Any) -> list[Change]:
    return [change for change in original(*of) if change.value is None]


left_out("copies_do_not_collect_timers", Replica, "_receive_timer", nothing, "timers", "moves", seed=7)


@instead(Replica, "_receive_timer", "timers", "moves", seed=3)
def copies_pass_over_removals(self: Replica, record: IncomingRecord) -> None:
    name, timer = decode_timer(record)
    if timer is not None:
        self.timers[name] = timer


@instead(Replicas, "adopt", "timers", "pendulum", "standbys", seed=9)
def donors_forget_the_timers_of_what_they_keep(
    original: Any, self: Replicas, partition: int, store: Any, offset: Any, timers: Any, position: int, *rest: Any
) -> None:
    original(self, partition, store, offset, {}, position, *rest)


left_out("what_is_restored_has_no_timers", PartitionTimers, "restore", nothing, "timers", *CRASHES, seed=3)


@missed("timers", "refused_under_way", "forgets", "crashes", seed=3)
def a_new_worker_keeps_the_timers_of_the_last(patch: Patch) -> None:
    """Those of a partition that is restarted or given back: what was not committed is in them."""
    kept = dict[tuple[int, int], Timers]()
    made = PartitionWorker.adopt

    def adopt(self: PartitionWorker, copy: Replica) -> None:
        made(self, copy)
        self.timers._timers = kept.setdefault((id(self.engine), self.partition), self.timers._timers)

    patch.setattr(PartitionWorker, "adopt", adopt)


@missed("timers", "crashes", seed=3)
def timers_fire_before_they_are_due(patch: Patch) -> None:
    """By a look at the wrong time of day; their handlers know the right one."""
    now_ms, run_due, fire = PartitionTimers.now_ms, DueTimers.run_due, DueTimers._fire
    early: set[PartitionTimers] = set()  # several partitions look at the same time

    async def too_soon(self: DueTimers) -> bool:
        early.add(self._timers)
        try:
            return await run_due(self)
        finally:
            early.discard(self._timers)

    async def in_time(self: DueTimers, timer: Timer) -> None:
        early.discard(self._timers)
        await fire(self, timer)
        early.add(self._timers)

    patch.setattr(PartitionTimers, "now_ms", lambda self: now_ms(self) + (300 if self in early else 0))
    patch.setattr(DueTimers, "run_due", too_soon)
    patch.setattr(DueTimers, "_fire", in_time)


# Nobody looks at the time of day while nothing comes in:
left_out("timers_wait_for_events", DueTimers, "seconds_to_next", nothing, "timers", "crashes", "moves", seed=3)
