"""Warm moves of partitions between live members, and the copies that make them warm (protocol, section 8).

The donor hands over by a marker in its last transaction; the receiver, which follows the changelog, starts when the
marker is the last thing in it. What is to move is the plan's business (``core/incremental.py``), what is claimed
meanwhile the membership's (``core/holdings.py``); this is what a member does about it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from streams.core.partition import PartitionState
from streams.errors import StreamsError
from streams.group import Assigned, Copies, Order
from streams.metrics import PartitionMoved
from streams.runtime.copies import StateCopies, StateCopy
from streams.runtime.partition_worker import PartitionWorker
from streams.statistics import MoveStatistics

if TYPE_CHECKING:
    from streams.runtime.lifecycle import Engine

_log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
"""Between two reports about copies that are being prepared."""
SIZES_SECONDS: Final = 60.0
"""Between two questions for the sizes of changelogs."""
ASK_SECONDS: Final = 3.0
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
MARKER_SECONDS: Final = 4.0
"""How long a marker may take once the donor has nothing running any more."""


class Moves:
    """The moves of one member. On the loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.copies = StateCopies(engine, self._copy_changed)
        self._asking = engine.connections.worker("kes-moves")
        self.owned: frozenset[int] = frozenset()
        """What the group says is ours, without what was handed over since."""
        self._releasing: Mapping[int, Order] = {}
        self._incoming: Mapping[int, int] = {}
        self._began: dict[int, float] = {}  # incoming ones: since when they are awaited
        self._handed_over: dict[int, Order] = {}  # the last order that was carried out
        self._known: dict[int, str] = {}  # how the copies that are prepared for moves stand, as far as the plan knows
        self._failed: set[int] = set()  # copies that could not be read on: they count as late until they are ready
        self._ask_again = Insistence()
        self._told = Copies()
        self._nudge_at = 0.0
        self._nudges = 0  # without a marker since
        self._sizes: dict[int, int] = {}
        self._is_incremental = "incremental" in engine.config.strategies
        self._quit = False

    # -- what the group says -------------------------------------------------------------------------------------------

    def assigned(self, event: Assigned) -> None:
        """A plan: it replaces everything that was ordered before."""
        plan = event.assignment
        self.owned = event.owned
        self._incoming = event.incoming
        self._nudges = self._nudges if event.incoming else 0
        # Twice as long each time: a donor that waits for a topic, say, has no marker until that is there.
        pause = (self._engine.config.drain_timeout_seconds + MARKER_SECONDS) * 2 ** min(self._nudges, 5)
        self._nudge_at = self._engine.now() + pause
        self._began = {partition: self._began.get(partition, self._engine.now()) for partition in event.incoming}
        self._known = {number: _standing(number, event.copies) for number in plan.preparing}
        self._ask_again.plan(self._engine.now(), waiting="ready" in self._known.values())
        self._quit = plan.quit
        new = {partition: order for partition, order in event.releasing.items() if self._is_new(partition, order)}
        self._releasing = event.releasing
        missing = self.owned - self._gone() - self._engine.partitions.workers.keys()
        copied = plan.standby | plan.preparing | event.incoming.keys() | missing
        self._engine.input.expect(copied | self._engine.partitions.restoring)
        self.copies.keep(copied)
        self._engine.partitions.bring_up(missing)
        if new:
            self._engine.spawn(partial(self._hand_over, new, plan.standby | plan.preparing))
        for partition in sorted(event.incoming):
            self._copy_changed(partition)  # the marker may have been there before the plan
        self._report()

    def _gone(self) -> frozenset[int]:
        """What was handed over, although the plan was made before that was known."""
        return frozenset(n for n, order in self._releasing.items() if self._handed_over.get(n) == order)

    def _is_new(self, partition: int, order: Order) -> bool:
        return order not in (self._releasing.get(partition), self._handed_over.get(partition))

    def revoked(self, partitions: Collection[int]) -> None:
        """Not ours any more, and not awaited either."""
        self.owned -= frozenset(partitions)
        self._incoming = {number: since for number, since in self._incoming.items() if number not in partitions}

    def look_again(self, partitions: Collection[int]) -> None:
        """These are given up now. A later plan may have given some back while that was under way."""
        if self._engine.accepting:
            self._engine.partitions.bring_up(self.owned & frozenset(partitions) - self._gone())
            for partition in partitions:
                self._copy_changed(partition)

    def lost(self) -> None:
        """The membership is lost: nothing is ours, and nothing is under way. Copies hold what is committed: they
        stay."""
        self.owned = frozenset()
        self._releasing, self._incoming, self._began, self._known = {}, {}, {}, {}
        self._handed_over = {}  # another incarnation may get an order like one of these

    # -- the donor -----------------------------------------------------------------------------------------------------

    async def _hand_over(self, orders: Mapping[int, Order], standby: frozenset[int]) -> None:
        positions = await self._positions(orders.keys() & standby)
        async with anyio.create_task_group() as tasks:
            for partition, order in orders.items():
                tasks.start_soon(self._hand_over_one, partition, order, positions.get(partition))

    async def _positions(self, partitions: frozenset[int] | set[int]) -> dict[int, int]:
        """Where a spare copy begins to read: everything below these ends is in our stores. Asked before the last
        transaction, or what the receiver writes might be missed."""
        engine = self._engine
        if not partitions:
            return {}
        try:
            ranges = await self._asking.call(
                engine.takeover_client.log_range, engine.config.changelog, partitions, engine.now() + ASK_SECONDS
            )
        except StreamsError as error:
            _log.info("the copies that stay here begin anew: %s", error)
            return {}
        return {partition: end for partition, (_, end) in ranges.items()}

    async def _hand_over_one(self, partition: int, order: Order, position: int | None) -> None:
        engine, partitions = self._engine, self._engine.partitions
        while self._releasing.get(partition) == order:
            worker = partitions.workers.get(partition)
            if worker is None or worker.state is not PartitionState.ACTIVE:
                await partitions.changed.wait()
                continue
            began = engine.now()
            if await partitions.release(worker, order):
                self._was_handed_over(worker, order, position)
                engine.measure(PartitionMoved(partition, "out", order.to, engine.now() - began))
                return

    def _was_handed_over(self, worker: PartitionWorker, order: Order, position: int | None) -> None:
        engine, partition = self._engine, worker.partition
        self._handed_over[partition] = order
        # Only what keeps bytes by key may be given the last records again; a cancelled event may have left its traces.
        if position is not None and worker.is_journalled and not worker.scope.cancel_called:
            timers = worker.timers.contents()
            self.copies.adopt(partition, worker.take_store(), worker.offset_record, timers, position)
        else:
            worker.drop_store()
            self.copies.renew(partition)
        engine.membership.handed_over(partition, order)
        _log.info("%s: handed over to %s", worker.topic_partition, order.to)
        if self._releasing.get(partition) == order:
            self.owned -= {partition}
        elif partition in self.owned:  # withdrawn meanwhile, the receiver is gone: it is ours again
            engine.partitions.bring_up([partition])

    # -- the receiver --------------------------------------------------------------------------------------------------

    def _copy_changed(self, partition: int) -> None:
        """Something is new about a copy: is it the marker that we wait for?"""
        engine, since = self._engine, self._incoming.get(partition)
        failure = self.copies.failure(partition)
        if failure is not None:
            self._failed.add(partition)
        if since is None or partition in engine.partitions.workers or not engine.accepting:
            return
        if failure is not None:  # somebody else has to take it
            engine.reading_failed(failure)
            return
        member_id = engine.membership.snapshot.member_id

        def is_for_us(copy: StateCopy) -> bool:
            marker = copy.marker
            return (
                marker is not None
                and marker.to == member_id
                and marker.generation >= since
                and copy.offset_record is not None
            )

        copy = self.copies.take(partition, is_for_us)
        if copy is None:
            return
        self._incoming = {number: told for number, told in self._incoming.items() if number != partition}
        self._nudges = 0
        self.owned |= {partition}
        assert copy.offset_record is not None
        engine.partitions.start_from(copy)
        engine.membership.took(partition, engine.incarnation)
        engine.measure(PartitionMoved(partition, "in", "", engine.now() - self._began.get(partition, engine.now())))

    # -- copies --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Report what is ready, until cancelled."""
        asked_at, asked_for = -SIZES_SECONDS, frozenset[int]()
        while True:
            self._report()
            working = frozenset(self._engine.partitions.workers)
            now = self._engine.now()
            if self._is_incremental and working and (working - asked_for or now - asked_at > SIZES_SECONDS):
                asked_at, asked_for = now, working
                await self._ask_sizes(working)
            await self.copies.changed.wait(LOOK_SECONDS)

    def _report(self) -> None:
        now, config = self._engine.now(), self._engine.config
        standing = self.copies.standing()
        ready = frozenset(number for number, copy in standing.items() if copy.is_ready)
        rest = standing.keys() - ready
        self._failed &= rest
        timeout = config.preparation_timeout_seconds
        late = frozenset(n for n in rest if n in self._failed or now - standing[n].since > timeout)
        left = {number: standing[number].behind for number in rest}
        report = Copies(ready=ready, preparing=left, late=late, sizes=self._sizes, asked=self._told.asked)
        stand = {number: _standing(number, report) for number in self._known}
        announce = _PENDING not in stand.values() and stand != self._known
        if announce:
            self._known = stand
        nudges = bool(self._incoming) and now > self._nudge_at
        if nudges:
            _log.warning("the markers of %s do not come: joining again", sorted(self._incoming))
            self._nudge_at = math.inf  # the next plan knows who has what
            self._nudges += 1
        if nudges or self._ask_again.is_due(now):
            report, announce = msgspec.structs.replace(report, asked=report.asked + 1), True
        if announce or report != self._told:
            self._told = report
            self._engine.membership.report(report, announce=announce)

    async def _ask_sizes(self, partitions: frozenset[int]) -> None:
        engine = self._engine
        try:
            self._sizes = await self._asking.call(
                engine.takeover_client.log_sizes, engine.config.changelog, partitions, engine.now() + ASK_SECONDS
            )
        except StreamsError as error:
            _log.debug("sizes of changelogs: %s", error)

    def close(self) -> None:
        """No more moves, no more copies."""
        self.copies.close()
        self._asking.abandon()

    # -- leaving -------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Hand everything over to others, as long as there are any, and time. What is left afterwards has to be given
        up."""
        engine, config = self._engine, self._engine.config
        stays = config.static_membership or not self._is_incremental or not config.leave_timeout_seconds
        if stays or len(engine.members) <= 1 or not engine.partitions.workers:
            return
        _log.info("handing over %d partitions", len(engine.partitions.workers))
        engine.membership.leave()
        deadline = engine.now() + config.leave_timeout_seconds
        while engine.partitions.workers and not self._quit and engine.now() < deadline and engine.is_draining:
            await engine.partitions.changed.wait(0.05)
        if engine.partitions.workers and not self._quit and engine.is_draining:
            _log.warning(
                "%d partitions were not handed over within leave_timeout_seconds (%g): they are given up",
                len(engine.partitions.workers),
                config.leave_timeout_seconds,
            )

    def statistics(self) -> tuple[MoveStatistics, ...]:
        """Moves under way here, ordered by partition."""
        now = self._engine.now()
        going = [
            MoveStatistics(number, "out", order.to, order.generation, None)
            for number, order in self._releasing.items()
            if number in self.owned
        ]
        coming = [
            MoveStatistics(number, "in", "", since, now - self._began.get(number, now))
            for number, since in self._incoming.items()
        ]
        return tuple(sorted(going + coming, key=lambda move: move.partition))


class Insistence:
    """When to ask for another round after a plan that has a ready copy prepared once more: it could not be released
    yet, because other moves of it were under way, and nobody else may have a reason to tell that they are done."""

    def __init__(self) -> None:
        self._pause = FIRST_PAUSE
        self._due = math.inf

    def plan(self, now: float, *, waiting: bool) -> None:
        """A plan came; ``waiting``: there is such a copy in it."""
        self._due = now + self._pause if waiting else math.inf
        self._pause = min(self._pause * 2, LONGEST_PAUSE) if waiting else FIRST_PAUSE

    def is_due(self, now: float) -> bool:
        """Whether to ask now; once per plan."""
        due = now >= self._due
        if due:
            self._due = math.inf
        return due


_PENDING: Final = "pending"


def _standing(partition: int, copies: Copies) -> str:
    """How a copy stands that is prepared for a move."""
    return "ready" if partition in copies.ready else "late" if partition in copies.late else _PENDING
