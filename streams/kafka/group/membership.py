"""A member of a consumer group, without a consumer: ``streams.model.group.Membership`` over a client of its own.

The rules that carry the exactly-once guarantee are those of ``core/group_member.py``, the machine that is driven here
(``docs/internals/membership.md`` has the facts behind them).

Threads: all members of a process share the thread ``kes-group``, so a handler that blocks the application's loop does
not stop heartbeats. All state below belongs to it, except ``group_metadata`` (replaced by one assignment, read
anywhere). The public methods post to that thread and return.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from streams.core.group_member import GroupMember
from streams.errors import BrokerUnavailable, MembershipFatal, StreamsError
from streams.kafka.group import refusals
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.join_protocol import JoinProtocol
from streams.kafka.group.link import CannotJoinYet, NoCommonStrategy, Notifier
from streams.kafka.wire import group_bytes
from streams.kafka.wire.client import WireClient
from streams.model.group import Assignment, Copies, Fatal, GroupEvent, GroupMetadata, Order

log = logging.getLogger(__name__)

_IDLE_CHECK = 0.5  # seconds between checks of `alive` when nothing happens
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between tries after an error
_LEAVE_PATIENCE = 3.0  # seconds for a LeaveGroup at the end


class GroupMembership:
    """One member of a group that shares the partitions of a topic with the others; ``model.group.Membership`` and
    ``link.Hooks`` document the methods. ``client`` is for this member; ``close`` ends it. ``start`` is for once;
    ``close`` may be repeated.

    Of several ``settings.assignors`` the broker chooses one that all members have, so a running group changes its
    strategy by two rolling restarts, the first one with both strategies. ``settings.static``: a restart within the
    session timeout gets its partitions back before others do, and ``close`` leaves only after ``leave``. ``alive`` is
    called every half second: when it returns ``False`` for the rebalance timeout, the member gives up. ``sequence``
    begins the counter of its reports; by default the time does. ``clock`` returns the time of the client's loop, on any
    thread.
    """

    def __init__(
        self,
        client: WireClient,
        settings: GroupSettings,
        alive: Callable[[], bool] = lambda: True,
        sequence: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group_id, self._instance, self._static_id = settings.group_id, settings.instance, settings.static_id
        self._topic, self._partitions = settings.topic, settings.partitions
        self._assignors = {group_bytes.protocol(name): assignor for name, assignor in settings.assignors.items()}
        self._client, self._settings, self._alive, self._now = client, settings, alive, clock
        self._protocol: JoinProtocol | None = None  # until a broker has answered
        self._deliver: Callable[[GroupEvent], None] | None = None
        self._wake, self._released = Notifier(), Notifier()
        self._state = GroupMember(
            settings.instance,
            session_seconds=settings.session_timeout_ms / 1000,
            rebalance_seconds=settings.rebalance_timeout_ms / 1000,
            # Also a predecessor's counter must not fit: a restarted static member is given the assignment made for it.
            sequence=time.time_ns() // 1000 if sequence is None else sequence,
        )
        self._stopped = self._closed = False
        self._misses, self._trouble = 0, ""  # assignments in a row that were not for us; what was said last

    # ------------------------------------------------------------------ any thread

    @property
    def group_metadata(self) -> GroupMetadata:
        return self._state.group_metadata

    @property
    def joining_as(self) -> str:
        """The broker's name for this member, known from the first answer to a JoinGroup on; empty before."""
        return "" if self._protocol is None else self._protocol.member_id

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        if self._deliver is not None:
            raise RuntimeError("a membership is started once")
        self._deliver = deliver
        self._client.on_crash = self._crashed
        self._client.start()
        self._client.post(self._run)

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        given = frozenset(partitions)  # as they are now: the caller may change them

        def note() -> None:
            self._state.released(given, incarnation, generation)
            self._released.notify()

        self._post(note)

    def handed_over(self, partition: int, order: Order) -> None:
        def note() -> None:
            self._state.handed_over(partition, order)
            self._released.notify()

        self._post(note)

    def took(self, partition: int, incarnation: int) -> None:
        self._note(lambda: self._state.took(partition, incarnation))

    def report(self, copies: Copies, *, announce: bool) -> None:
        # Joins once, unless the last report had this and all else that we claim now; after a join that is under way.
        self._note(lambda: self._state.copies_changed(copies, announce=announce))

    def leave(self) -> None:
        self._note(self._state.leave)

    def close(self, timeout_seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = self._now() + timeout_seconds

        async def depart() -> None:
            try:
                await self._depart(min(deadline, self._now() + _LEAVE_PATIENCE))
            except Exception as error:
                log.warning("group %s: leaving failed (%s); the session has to expire", self._group_id, error)

        if self._deliver is not None:
            try:
                self._call(depart, deadline)
            except BrokerUnavailable as error:
                log.warning("group %s: leaving failed (%s); the session has to expire", self._group_id, error)
        self._client.close(max(0.5, deadline - self._now()))

    def _note(self, event: Callable[[], object]) -> None:
        def note() -> None:
            event()
            self._join_for_news()

        self._post(note)

    def _post(self, work: Callable[[], Any]) -> None:
        self._client.post(work)

    def _call(self, work: Callable[[], Coroutine[Any, Any, None]], deadline: float) -> None:
        self._client.call(work, deadline)

    # ------------------------------------------------------------------ IO thread: main coroutine

    async def _run(self) -> None:
        try:
            await self._client.connected()  # however long: the log says that no broker answers
        except StreamsError as error:
            self._end(error)
            return
        self._protocol = self._new_protocol()
        pause = _FIRST_PAUSE
        while not self._stopped:
            try:
                await self._step()
                pause = _FIRST_PAUSE
            except NoCommonStrategy:
                self._refused()
                await asyncio.sleep(_IDLE_CHECK)
            except StreamsError as error:
                self._end(error)
            except CannotJoinYet as error:
                self._log_once(error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            except Exception:
                # What meets a client that is being closed is no failure.
                level = logging.DEBUG if self._stopped else logging.ERROR  # type: ignore[redundant-expr]
                log.log(level, "group %s: unexpected failure; trying on", self._group_id, exc_info=True)
                await asyncio.sleep(_LONGEST_PAUSE)

    def _new_protocol(self) -> JoinProtocol:
        return JoinProtocol(self, self._client, self._settings)

    def _log_once(self, error: CannotJoinYet) -> None:
        """Log an error that keeps it from joining. Outages are none: the client logs those."""
        if not error.is_outage and error.trouble != self._trouble and not self._stopped:
            log.warning("group %s: cannot join yet (%s); trying on", self._group_id, error.trouble)
            self._trouble = error.trouble

    def _refused(self) -> None:
        """The group has members, and shares no strategy with us. They may be what a kill left of a predecessor."""
        now = self._now()
        if self._state.no_common_strategy.begins(now):
            self.voided("the group refuses its strategies")
            log.warning("%s. Waiting a session timeout for them to go", self._foreign())
        elif self._state.no_common_strategy.is_over(now):
            self._end(self._foreign())

    def _foreign(self) -> MembershipFatal:
        return refusals.no_common_strategy(self._group_id, self._settings.assignors)

    async def _step(self) -> None:
        """Join if there is a reason to, then wait for the next reason."""
        # A client that gets no call for the rebalance timeout leaves the group. A dead engine must not join again after
        # that: it would leave again, each rebalance timeout anew.
        if self._alive():
            assert self._protocol is not None
            await self._protocol.ensure_joined()
            self._trouble = ""
            self._state.no_common_strategy.passed()
        if self._state.rival.is_over(self._now()):
            self._end(refusals.name_taken(self._group_id, self._instance))
        await self._wake(_IDLE_CHECK)

    # ------------------------------------------------------------------ IO thread: hooks of the client

    def subscriptions(self) -> list[tuple[str, bytes]]:
        # The report's counter makes the bytes differ: equal bytes of a follower would start no rebalance.
        report = group_bytes.encode_report(self._topic, self._state.report())
        return [(protocol, report) for protocol in self._assignors]

    def lead(self, protocol: str, members: dict[str, bytes]) -> dict[str, bytes]:
        reports = {}
        for member_id, data in members.items():
            report, wrong = group_bytes.decode_report(self._topic, member_id, data)
            reports[member_id] = group_bytes.within(self._partitions, report)
            if wrong:
                log.warning("group %s: member %s gets no partitions: %s", self._group_id, member_id, wrong)
        plan = self._assignors[protocol](self._partitions, reports)
        return {
            member_id: group_bytes.encode_assignment(self._topic, assignment) for member_id, assignment in plan.items()
        }

    def published(self, generation: int, member_id: str) -> None:
        if self._stopped:  # the answer to a join that was under way at the departure: it is no member any more
            return
        before = self.group_metadata
        if before.generation >= 0 and before.member_id != member_id:  # orders and markers name the former id
            self.voided("the group gave this member another id")
        self._state.joined(generation, member_id, self._static_id)

    async def joined(self, generation: int, data: bytes) -> None:
        await self._apply(generation, data)
        self._join_for_news()  # it may have come during the join

    async def _apply(self, generation: int, data: bytes) -> None:
        """First give up what was taken away, then take what is new."""
        incarnation = self.group_metadata.incarnation
        if generation < 0 or self.group_metadata.generation != generation:
            self._request_rejoin()  # lost between the answers to JoinGroup and SyncGroup
            return
        assignment = self._understood(data)
        if assignment is None:
            self._misses += 1
            await asyncio.sleep(min(_LONGEST_PAUSE, 0.02 * 2 ** min(self._misses, 10)))
            self._request_rejoin()
            return
        self._misses = 0
        state, holdings = self._state, self._state.holdings
        if state.is_refused_for_rival(assignment):
            self._met_rival()
            return
        joins_again = state.has_to_join_again(assignment)
        while revoked := holdings.revoked_by(assignment):  # again, should it have taken something meanwhile
            if not await self._barrier(incarnation, revoked):
                return
        self._assigned(generation, assignment)
        if joins_again and not state.is_dismissed(assignment):
            self._request_rejoin()  # what was given up can be assigned now

    def _assigned(self, generation: int, assignment: Assignment) -> None:
        holdings, assigned = self._state.holdings, self._state.assign(generation, assignment)
        owned, releasing, incoming = map(group_bytes.ranges, (holdings.owned, holdings.releasing, holdings.incoming))
        moves = f"; to hand over {releasing}; to take {incoming}" if holdings.releasing or holdings.incoming else ""
        log.info("group %s: generation %d, partitions %s%s", self._group_id, generation, owned, moves)
        self._tell(assigned)

    def _met_rival(self) -> None:
        """An older member has our instance name. It may be what a kill left of our predecessor: then it expires, and we
        are given its place. If it is still there after that time, it is alive."""
        if self._state.rival.begins(self._now()):
            log.warning(
                "group %s: a member named %r is there already; waiting for it to go (a killed predecessor expires with "
                "its session)",
                self._group_id,
                self._instance,
            )

    def _understood(self, data: bytes) -> Assignment | None:
        """The assignment, if it answers our last report. Else it was made for a predecessor, or by something else."""
        try:
            assignment = group_bytes.decode_assignment(data, self._partitions, self.group_metadata.member_id)
        except ValueError as error:
            self._strange(error)
            return None
        self._state.undecodable.passed()
        # A restarted static member is first given what was assigned to its predecessor (no rebalance). A marker that is
        # addressed to that one's member id would be awaited forever.
        return assignment if self._state.is_answer_to_report(assignment) else None

    def _strange(self, error: ValueError) -> None:
        """The leader is something else, or has other settings. It may go away, or be restarted with ours."""
        now = self._now()
        if self._state.undecodable.begins(now):
            log.warning("group %s: the assignment is not understood (%s); joining again", self._group_id, error)
        elif self._state.undecodable.is_over(now):
            self._end(refusals.not_understood(self._group_id, error))

    async def _barrier(self, incarnation: int, revoked: frozenset[int]) -> bool:
        """Wait until all is released, or handed over, at most the rebalance timeout. ``False``: lost meanwhile."""
        self._tell(self._state.begin_barrier(revoked))
        while fine := self.group_metadata.incarnation == incarnation and not self._stopped:
            if self._state.is_barrier_open:
                break
            await self._released(_IDLE_CHECK)
        self._state.end_barrier()
        return fine

    def voided(self, reason: str) -> None:
        lost = self._state.lost(reason)
        if lost is None:
            return
        self._released.notify()
        if not self._stopped:
            log.warning("group %s: membership lost: %s", self._group_id, reason)
            self._tell(lost)

    def woken(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._wake.notify()

    def fatal(self, error: StreamsError) -> None:
        self._end(error)

    def _crashed(self, error: BaseException) -> None:
        self._protocol = None  # its loop does not run any more: nothing of it can be stopped, and its tasks end with it
        self._end(MembershipFatal(f"group {self._group_id}: the thread of the membership failed: {error!r}"))

    # ------------------------------------------------------------------ IO thread: small parts

    def _end(self, error: StreamsError) -> None:
        if self._stopped:
            return
        # Before it counts as stopped, which silences it: the engine has to hear that what it owned is void.
        self.voided(str(error))
        self._stop()
        if self.joining_as and self._static_id is None:  # or the others wait for a member that has given up
            self._post(self._depart_at_once)
        self.woken()
        log.error("group %s: %s", self._group_id, error)
        assert self._deliver is not None
        self._deliver(Fatal(error))

    def _tell(self, event: GroupEvent) -> None:
        if not self._stopped and self._deliver is not None:
            self._deliver(event)

    def _join_for_news(self) -> None:
        if self._state.has_news:
            self._request_rejoin()

    def _request_rejoin(self) -> None:
        if self._protocol is not None:
            self._protocol.request_rejoin()

    def _stop(self) -> None:
        self._stopped = True
        if self._protocol is not None:
            self._protocol.stop()

    async def _depart(self, deadline: float) -> None:
        """Stop for good, with a LeaveGroup: the others rebalance at once."""
        self._stop()
        self._state.void()  # before the LeaveGroup: from then on the partitions may be another member's
        self._released.notify()
        self.woken()
        member = self._protocol
        if member is not None and member.member_id and (self._static_id is None or self._state.holdings.leaving):
            await member.leave(member.member_id, deadline)

    async def _depart_at_once(self) -> None:
        with contextlib.suppress(Exception):  # the session has to expire then
            await self._depart(self._now() + _LEAVE_PATIENCE)
