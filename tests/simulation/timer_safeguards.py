"""The safeguards of durable timers, each with a way to take it out, and where that is noticed."""

from __future__ import annotations

from typing import Any

from streams.core.timers import Timer, Timers
from streams.records import Change, IncomingRecord
from streams.runtime.changelog import decode_timer
from streams.runtime.ownership.replicas import Replica, Replicas
from streams.runtime.partition.due_timers import DueTimers
from streams.runtime.partition.timers import PartitionTimers
from streams.runtime.partition.worker import PartitionWorker

from .safeguards import Patch, Safeguard, _nothing

_admitted = PartitionTimers.admitted


def removals_are_not_in_the_transaction(patch: Patch) -> None:
    def admitted(self: PartitionTimers, changes: dict[str, Timer | None], origin: int) -> list[Change]:
        return [change for change in _admitted(self, changes, origin) if change.value is not None]

    patch.setattr(PartitionTimers, "admitted", admitted)


def timers_are_not_in_the_transaction(patch: Patch) -> None:
    def admitted(self: PartitionTimers, changes: dict[str, Timer | None], origin: int) -> list[Change]:
        return [change for change in _admitted(self, changes, origin) if change.value is None]

    patch.setattr(PartitionTimers, "admitted", admitted)


def copies_do_not_collect_timers(patch: Patch) -> None:
    patch.setattr(Replica, "_receive_timer", _nothing)


def copies_pass_over_removals(patch: Patch) -> None:
    def receive(self: Replica, record: IncomingRecord) -> None:
        name, timer = decode_timer(record)
        if timer is not None:
            self.timers[name] = timer

    patch.setattr(Replica, "_receive_timer", receive)


def donors_forget_the_timers_of_what_they_keep(patch: Patch) -> None:
    adopt = Replicas.adopt

    def without(self: Replicas, partition: int, store: Any, offset: Any, timers: Any, position: int) -> None:
        adopt(self, partition, store, offset, {}, position)

    patch.setattr(Replicas, "adopt", without)


def what_is_restored_has_no_timers(patch: Patch) -> None:
    patch.setattr(PartitionTimers, "restore", _nothing)


def a_new_worker_keeps_the_timers_of_the_last(patch: Patch) -> None:
    """Those of a partition that is restarted or given back: what was not committed is in them."""
    kept = dict[tuple[int, int], Timers]()
    made = PartitionWorker.adopt

    def adopt(self: PartitionWorker, copy: Replica) -> None:
        made(self, copy)
        self.timers._timers = kept.setdefault((id(self.engine), self.partition), self.timers._timers)

    patch.setattr(PartitionWorker, "adopt", adopt)


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


def timers_wait_for_events(patch: Patch) -> None:
    """Nobody looks at the time of day while nothing comes in."""
    patch.setattr(DueTimers, "seconds_to_next", _nothing)


CRASHES = ("crashes", "everything", "handlers")
TIMER_SAFEGUARDS: dict[str, Safeguard] = {
    made.__name__.replace("_", " "): Safeguard("timers", made, profiles, seed=3)
    for made, profiles in (
        (removals_are_not_in_the_transaction, CRASHES),
        (timers_are_not_in_the_transaction, CRASHES),
        (copies_do_not_collect_timers, ("moves",)),
        (copies_pass_over_removals, ("moves",)),
        (donors_forget_the_timers_of_what_they_keep, ("pendulum", "standbys")),
        (what_is_restored_has_no_timers, CRASHES),
        (a_new_worker_keeps_the_timers_of_the_last, ("forgets", "refused_under_way", "crashes")),
        (timers_fire_before_they_are_due, ("crashes",)),
        (timers_wait_for_events, ("crashes", "moves")),
    )
}
