"""Warm moves of partitions between live members, and the copies that make them warm (protocol, section 8).

The donor hands over by a marker in its last transaction; the receiver, which follows the changelog, starts when the
marker is the last thing in it. The plan decides the moves (``core/incremental.py``), the membership makes the claims
meanwhile (``core/group_member.py``); this module carries the moves out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import anyio
import msgspec
from msgspec import UNSET

from streams.core.partition import PartitionState
from streams.errors import ConfigError, OffsetError, StreamsError
from streams.metrics import PartitionMoved
from streams.model.group import Assigned, Copies, Order
from streams.records import TopicPartition
from streams.runtime.changelog import MUTED
from streams.runtime.member import Member
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.ownership.readiness import Readiness
from streams.runtime.ownership.replica import Replica
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.partition.voices import refuse_voice
from streams.runtime.partition.worker import PartitionWorker
from streams.statistics import MoveStatistics

_log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 0.5
"""Copies that are being prepared are reported every so many seconds."""
SIZES_SECONDS: Final = 60.0
"""The sizes of changelogs are requested every so many seconds."""
ASK_SECONDS: Final = 3.0
"""One request to the broker takes so many seconds, at most."""
FIRST_PAUSE: Final = 1.0
"""The first request for another round comes so many seconds after the plan."""
LONGEST_PAUSE: Final = 30.0
"""Each plan in vain doubles that pause, up to so many seconds."""
MARKER_SECONDS: Final = 4.0
"""A marker may take so many seconds once the donor has nothing running any more."""


class Handover:
    """The moves of one member. On the loop."""

    def __init__(self, member: Member, partitions: Partitions, replicas: Replicas) -> None:
        self._member = member
        self._partitions = partitions
        self._replicas = replicas
        self._thread = member.thread("kes-moves")
        self.owned: frozenset[int] = frozenset()
        """The partitions assigned to this member, without those handed over since."""
        self._releasing: Mapping[int, Order] = {}
        self._incoming: Mapping[int, int] = {}
        self._began: dict[int, float] = {}  # incoming ones: since when they are awaited
        self._handed_over: dict[int, Order] = {}  # the last order that was carried out
        self._known: dict[int, str] = {}  # how the copies that are prepared for moves stand, as far as the plan knows
        self._failed: set[int] = set()  # copies that could not be read on: they count as late until they are ready
        self._insistence = Insistence()
        self._reported = Copies()
        self._nudge_at = 0.0
        self._nudges = 0  # without a marker since
        self._sizes: dict[int, int] = {}
        self._is_incremental = "incremental" in member.config.group.strategies
        self._quit = False
        self._readiness = Readiness(member.config, partitions, replicas, member.now)

    # -- the group's events --------------------------------------------------------------------------------------------

    def assigned(self, event: Assigned) -> None:
        """Carry out a plan: it replaces all earlier orders."""
        plan = event.assignment
        self.owned = event.owned
        self._incoming = event.incoming
        self._nudges = self._nudges if event.incoming else 0
        # Twice as long each time: a donor that waits for a topic, say, has no marker until that is there.
        pause = (self._member.config.timeouts.drain_timeout_seconds + MARKER_SECONDS) * 2 ** min(self._nudges, 5)
        self._nudge_at = self._member.now() + pause
        self._began = {partition: self._began.get(partition, self._member.now()) for partition in event.incoming}
        self._known = {number: _standing(number, event.copies) for number in plan.preparing}
        self._insistence.plan(self._member.now(), waiting="ready" in self._known.values())
        self._quit = plan.quit
        new = {partition: order for partition, order in event.releasing.items() if self._is_new(partition, order)}
        self._releasing = event.releasing
        missing = self.owned - self._gone() - self._partitions.workers.keys()
        copied = plan.standby | plan.preparing | event.incoming.keys() | missing
        for port in self._member.inputs:
            port.expect(copied | self._partitions.restoring)
        self._replicas.keep(copied)
        self._partitions.bring_up(missing)
        if new:
            self._member.spawn(partial(self._hand_over, new, plan.standby | plan.preparing))
        for partition in sorted(event.incoming):
            self.replica_changed(partition)  # the marker may have been there before the plan
        self.report()

    def _gone(self) -> frozenset[int]:
        """Return the partitions handed over although the plan still has them here: it was made before that was
        known."""
        return frozenset(n for n, order in self._releasing.items() if self._handed_over.get(n) == order)

    def _is_new(self, partition: int, order: Order) -> bool:
        return order not in (self._releasing.get(partition), self._handed_over.get(partition))

    def revoked(self, partitions: Collection[int]) -> None:
        """Drop revoked partitions: they are not ours any more, and not awaited either."""
        self.owned -= frozenset(partitions)
        self._incoming = {number: since for number, since in self._incoming.items() if number not in partitions}

    def bring_up_again(self, partitions: Collection[int]) -> None:
        """Bring up given-up partitions that a later plan has given back while that was under way."""
        if self._member.accepting:
            self._partitions.bring_up(self.owned & frozenset(partitions) - self._gone())
            for partition in partitions:
                self.replica_changed(partition)

    def lost(self) -> None:
        """Drop all partitions and moves after a loss of the membership. Copies hold committed records only: they
        stay."""
        self.owned = frozenset()
        self._releasing, self._incoming, self._began, self._known = {}, {}, {}, {}
        self._handed_over = {}  # another incarnation may get an order like one of these

    # -- the donor -----------------------------------------------------------------------------------------------------

    async def _hand_over(self, orders: Mapping[int, Order], standby: frozenset[int]) -> None:
        # The time is taken before the request: the age of the copy counts from it, and must not be too short.
        as_of_ms = self._member.wall_ms()
        positions = await self._positions(orders.keys() & standby)
        async with anyio.create_task_group() as tasks:
            for partition, order in orders.items():
                tasks.start_soon(self._hand_over_one, partition, order, positions.get(partition), as_of_ms)

    async def _positions(self, partitions: frozenset[int] | set[int]) -> dict[int, int]:
        """Return the offsets where spare copies begin to read: everything below these ends is in our stores."""
        member = self._member
        if not partitions:
            return {}
        # This comes before the last transaction: behind it the receiver writes, and its first records might be below
        # the end.
        try:
            ranges = await self._thread.call(
                member.takeover_client.log_range, member.config.changelog, partitions, member.now() + ASK_SECONDS
            )
        except StreamsError as error:
            _log.info("the copies that stay here start over: %s", error)
            return {}
        return {partition: end for partition, (_, end) in ranges.items()}

    async def _hand_over_one(self, partition: int, order: Order, position: int | None, as_of_ms: int) -> None:
        member, partitions = self._member, self._partitions
        while self._releasing.get(partition) == order:
            worker = partitions.workers.get(partition)
            if worker is None or worker.state is not PartitionState.ACTIVE:
                await partitions.changed.wait()
                continue
            began = member.now()
            if await partitions.release(worker, order):
                self._was_handed_over(worker, order, position, as_of_ms)
                member.measure(PartitionMoved(partition, "out", order.to, member.now() - began))
                return

    def _was_handed_over(self, worker: PartitionWorker, order: Order, position: int | None, as_of_ms: int) -> None:
        member, partition = self._member, worker.partition
        self._handed_over[partition] = order
        # Only a store of bytes by key may receive the last records again; a cancelled event may have left its traces.
        is_whole = worker.store is not None and worker.is_journalled and not worker.scope.cancel_called
        if position is not None and is_whole:
            timers = worker.timers.contents()
            self._replicas.adopt(
                partition,
                worker.take_store(),
                worker.offset_record,
                timers,
                position,
                as_of_ms,
                worker.take_kept(),
                worker.joined,
                worker.seen,
                worker.voice,
            )
        else:
            worker.drop_store()
            self._replicas.renew(partition)
        member.membership.handed_over(partition, order)
        _log.info("%s: handed over to %s", worker.topic_partition, order.to)
        if self._releasing.get(partition) == order:
            self.owned -= {partition}
        elif partition in self.owned:  # withdrawn meanwhile, the receiver is gone: it is ours again
            self._partitions.bring_up([partition])

    # -- the receiver --------------------------------------------------------------------------------------------------

    def replica_changed(self, partition: int) -> None:
        """Start the partition if its copy has read the awaited marker: something is new about the copy."""
        member, since = self._member, self._incoming.get(partition)
        failure = self._replicas.failure(partition)
        if failure is not None:
            self._failed.add(partition)
        if since is None or partition in self._partitions.workers or not member.accepting:
            return
        if failure is not None:  # another member has to take it
            member.reading_failed(failure)
            return
        member_id = member.membership.group_metadata.member_id

        def is_for_us(copy: Replica) -> bool:
            marker = copy.marker
            return (
                marker is not None
                and marker.to.removeprefix(MUTED) == member_id
                and marker.generation >= since
                and copy.offset_record is not None
            )

        needs_takeover = False

        def can_start(copy: Replica) -> bool:
            nonlocal needs_takeover
            if not is_for_us(copy):
                return False
            assert copy.offset_record is not None
            needs_takeover = True
            # A position that cannot be read, or a voice that the settings do not know: the take-over names it.
            with suppress(OffsetError, ConfigError):
                where = TopicPartition(member.config.topic, partition)
                refuse_voice(member.config.shadow_of, where, copy.offset_record, copy.voice)
                has_inputs = copy.offset_record.has_all(self._partitions.further_topics, partition)
                needs_takeover = not has_inputs or not member.lookups.reach_donor(copy.offset_record)
            return not needs_takeover

        copy = self._replicas.take(partition, can_start)
        if copy is None and not needs_takeover:
            return
        self._incoming = {number: since for number, since in self._incoming.items() if number != partition}
        self._nudges = 0
        self.owned |= {partition}
        if copy is not None:
            self._partitions.start_from(copy)
        else:
            # The donor does not know an input or a lookup of ours, or it has looked into newer lookups than ours are.
            # Where the input begins is for a take-over, from this copy, and so is the wait for the lookups.
            self._partitions.bring_up([partition])
        member.membership.took(partition, member.incarnation)
        member.measure(PartitionMoved(partition, "in", "", member.now() - self._began.get(partition, member.now())))

    # -- copies --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Report the copies, until cancelled."""
        requested_at, requested_for = -SIZES_SECONDS, frozenset[int]()
        while True:
            self.report()
            self._readiness.report()
            working = frozenset(self._partitions.workers)
            now = self._member.now()
            if self._is_incremental and working and (working - requested_for or now - requested_at > SIZES_SECONDS):
                requested_at, requested_for = now, working
                await self._ask_sizes(working)
            await self._replicas.changed.wait(CHECK_SECONDS)

    def report(self) -> None:
        """Give the group what its next plan is to know of the copies here, and of the state on disk."""
        now, config = self._member.now(), self._member.config
        standing = self._replicas.standing()
        ready = frozenset(number for number, copy in standing.items() if copy.is_ready)
        rest = standing.keys() - ready
        self._failed &= rest
        timeout = config.group.preparation_timeout_seconds
        late = frozenset(n for n in rest if n in self._failed or now - standing[n].since > timeout)
        left = {number: standing[number].behind for number in rest}
        keeper, asked = self._member.keeper, self._reported.asked
        shelf = UNSET if keeper is None else keeper.shelf.found
        report = Copies(ready=ready, preparing=left, late=late, sizes=self._sizes, asked=asked, shelf=shelf)
        stand = {number: _standing(number, report) for number in self._known}
        announce = _PENDING not in stand.values() and stand != self._known
        if announce:
            self._known = stand
        nudges = bool(self._incoming) and now > self._nudge_at
        if nudges:
            _log.warning("the markers of %s do not come: joining again", sorted(self._incoming))
            self._nudge_at = math.inf  # once for a plan: the next plan sets it again
            self._nudges += 1
        if nudges or self._insistence.is_due(now):
            report, announce = msgspec.structs.replace(report, asked=report.asked + 1), True
        if announce or report != self._reported:
            self._reported = report
            self._member.membership.report(report, announce=announce)

    async def _ask_sizes(self, partitions: frozenset[int]) -> None:
        member = self._member
        try:
            self._sizes = await self._thread.call(
                member.takeover_client.log_sizes, member.config.changelog, partitions, member.now() + ASK_SECONDS
            )
        except StreamsError as error:
            _log.debug("sizes of changelogs: %s", error)

    # -- leaving -------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Hand all partitions over to others, as long as there are any, and time. The rest has to be given up
        afterwards."""
        member, config = self._member, self._member.config
        stays = config.group.static_membership or not self._is_incremental or not config.group.leave_timeout_seconds
        if stays or len(member.members) <= 1 or not self._partitions.workers:
            return
        _log.info("handing over %d partitions", len(self._partitions.workers))
        member.membership.leave()
        deadline = member.now() + config.group.leave_timeout_seconds
        while self._partitions.workers and not self._quit and member.now() < deadline and member.is_draining:
            await self._partitions.changed.wait(0.05)
        if self._partitions.workers and not self._quit and member.is_draining:
            _log.warning(
                "%d partitions were not handed over within leave_timeout_seconds (%g): they are given up",
                len(self._partitions.workers),
                config.group.leave_timeout_seconds,
            )

    def statistics(self) -> tuple[MoveStatistics, ...]:
        """Return the moves under way here, ordered by partition."""
        now = self._member.now()
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
    """The times of requests for another round, after a plan that has a ready copy prepared once more: its partition
    could not be released yet, because other moves of it were under way, and no other member may have a reason to report
    their end."""

    def __init__(self) -> None:
        self._pause = FIRST_PAUSE
        self._due = math.inf

    def plan(self, now: float, *, waiting: bool) -> None:
        """Note a plan; ``waiting``: there is such a copy in it."""
        self._due = now + self._pause if waiting else math.inf
        self._pause = min(self._pause * 2, LONGEST_PAUSE) if waiting else FIRST_PAUSE

    def is_due(self, now: float) -> bool:
        """Check whether a request is due now; once per plan."""
        due = now >= self._due
        if due:
            self._due = math.inf
        return due


_PENDING: Final = "pending"


def _standing(partition: int, copies: Copies) -> str:
    """Return the progress of a copy that is prepared for a move."""
    return "ready" if partition in copies.ready else "late" if partition in copies.late else _PENDING
