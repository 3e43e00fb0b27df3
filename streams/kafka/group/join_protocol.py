"""The classic group protocol of one member over our own wire: JoinGroup, SyncGroup, Heartbeat, LeaveGroup.

What an answer means is in ``join_answers``; what is owned and claimed is the membership's, behind ``link.Hooks``. All
of it runs on one loop. Heartbeats belong to one generation: a task that begins with the answer to SyncGroup, and ends
where the next JoinGroup is sent. A member that waits in JoinGroup or SyncGroup is alive for its coordinator.

Versions: those of Kafka 2.8. From JoinGroup 9 on, a static leader that comes back would have to look at a plan that it
must not make (KIP-814).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from functools import partial
from typing import Final

from streams.errors import StreamsError
from streams.kafka import permissions
from streams.kafka.group import refusals
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.join_answers import GroupRequest, JoinStep, MemberStanding, next_step
from streams.kafka.group.link import CannotJoinYet, Hooks, NoCommonStrategy
from streams.kafka.group.locating import CoordinatorLine
from streams.kafka.questions.groups import leave_group
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import BrokerRefusal, Code
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.lines import HOPELESS
from streams.kafka.wire.schemas.heartbeat import HeartbeatRequest
from streams.kafka.wire.schemas.join_group import JoinGroupRequest, JoinGroupResponse
from streams.kafka.wire.schemas.sync_group import SyncGroupRequest, SyncGroupResponse

log = logging.getLogger(__name__)

PROTOCOL_TYPE: Final = "consumer"
_VERSIONS: Final = {GroupRequest.JOIN: 7, GroupRequest.SYNC: 5, GroupRequest.HEARTBEAT: 4}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two joins in vain: the first pause, and the longest, each twice as long as the one before."""
_PAUSED: Final = (JoinStep.LOOK_FOR_COORDINATOR, JoinStep.WAIT)
"""Steps with a pause before the first one, too."""
_RETRY_SECONDS = 0.1
"""Seconds to the next heartbeat behind one without a good answer."""
_JOIN_SECONDS, _JOIN_MARGIN = 30.0, 5.0
"""Seconds for a JoinGroup: at least the first, and the second more than the rebalance timeout, for which it waits."""
_SYNC_SECONDS, _SYNC_MARGIN = 10.0, 5.0
"""Seconds for a SyncGroup: at least the first, and the second more than the session, after which a leader that makes no
plan is gone."""
_LEAVE_SECONDS = 3.0
"""Seconds for a LeaveGroup under an id that this member had before."""
_LATE_SECONDS = 60.0
"""Seconds in which a JoinGroup whose connection was lost may still reach the coordinator, at most."""
_UNKNOWN: Final = "the group does not know this member any more"


class Halted(Exception):
    """An answer that is not taken: the next step, and why."""

    def __init__(self, step: JoinStep, error: BrokerRefusal | LostConnection, member_id: str = "") -> None:
        super().__init__(str(error))
        self.step, self.error, self.member_id = step, error, member_id


class JoinProtocol:
    """One member. ``hooks`` is the membership; ``settings`` are its. On the loop."""

    def __init__(self, hooks: Hooks, client: WireClient, settings: GroupSettings) -> None:
        self._hooks, self._client, self._settings = hooks, client, settings
        self._line = CoordinatorLine(client, settings.group_id)
        self._session = settings.session_timeout_ms / 1000
        self._loop = asyncio.get_running_loop()
        self.member_id = ""
        """The broker's name for this member, also of one that waits for its first generation; empty before."""
        self._generation, self._protocol = -1, ""
        self._must_join, self._is_closing = True, False
        self._beats: asyncio.Task[None] | None = None
        self._at_work = self._loop.time()  # when ``ensure_joined`` was last done
        self._late_until = -math.inf
        self._interval = settings.heartbeat_interval_ms / 1000
        self._gives_ids_back = not settings.static
        self._departure: asyncio.Task[None] | None = None  # of an id that this member had before

    async def ensure_joined(self) -> None:
        """Join if there is a reason to, and apply what comes of it; note that the member is at work. Raises
        ``NoCommonStrategy``, ``CannotJoinYet``, and a ``StreamsError`` for what trying cannot cure."""
        self._look_at_beats()
        pause = 0.0
        while self._must_join and not self._is_closing:
            self._at_work = self._loop.time()  # an outage is no reason to give up
            try:
                data = await self._join()
                self._line.answers()
                await self._apply(data)
                break  # also if it has to join again: only an engine that is alive does
            except Halted as halted:
                self._must_join = True
                self._follow(halted)
                if halted.step is not JoinStep.TAKE_ID:
                    pause = max(pause, _FIRST_PAUSE) if halted.step in _PAUSED else pause
                    await asyncio.sleep(pause)
                    pause = min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE)
            except BaseException:
                self._must_join = True
                raise
        self._at_work = self._loop.time()

    def request_rejoin(self) -> None:
        """Have the next ``ensure_joined`` join, and wake the main coroutine."""
        self._must_join = True
        self._hooks.woken()  # else the main coroutine would find out half a second later

    def stop(self) -> None:
        """End joining and heartbeats."""
        self._is_closing = True  # a join behind our LeaveGroup would bring a member back that does nothing
        self._line.is_quiet = True
        self._stop_beats()

    async def leave(self, member_id: str, deadline: float, reason: str = "") -> None:
        """Leave the group as this member: the others rebalance at once. ``reason`` is for the broker's log. Raises
        ``StreamsError``."""
        group_id, instance = self._settings.group_id, self._settings.static_id
        attempt = partial(leave_group, self._client, group_id, member_id, instance, deadline, reason)
        rights = [permissions.on_group("Read", group_id)]
        await self._client.until(deadline, f"leaving group {group_id}", attempt, rights)

    async def _apply(self, data: bytes) -> None:
        await self._hooks.joined(self._generation, data)

    # -- joining -------------------------------------------------------------------------------------------------------

    async def _join(self) -> bytes:
        """Join once, up to the assignment. Raises ``Halted``."""
        settings = self._settings
        try:
            await self._line.ready()  # heartbeats go on while the coordinator is looked for
        except (LostConnection, BrokerRefusal) as error:
            raise self._halted(GroupRequest.FIND, error) from error
        self._stop_beats()
        before = self._generation
        # From here on a request to join is about something that this JoinGroup does not have.
        self._must_join = False
        joined = await self._joined(
            JoinGroupRequest(
                group_id=settings.group_id,
                session_timeout_ms=settings.session_timeout_ms,
                rebalance_timeout_ms=settings.rebalance_timeout_ms,
                member_id=self.member_id,
                group_instance_id=settings.static_id,
                protocol_type=PROTOCOL_TYPE,
                protocols=[
                    JoinGroupRequest.JoinGroupRequestProtocol(name=name, metadata=report)
                    for name, report in self._hooks.subscriptions()
                ],
            )
        )
        self.member_id, self._generation = joined.member_id, joined.generation_id
        self._protocol = joined.protocol_name or ""
        if self._generation <= before:
            # A coordinator that went back in time (restarted without its log): each of our joins makes a newer
            # generation. It counts from the beginning: old orders and markers would fit again under this id.
            raise Halted(JoinStep.LEAVE_AND_JOIN_ANEW, BrokerRefusal(Code.UNKNOWN_MEMBER_ID))
        # Before SyncGroup: from this answer on the broker refuses the old generation and takes the new one.
        self._hooks.published(self._generation, self.member_id)
        return (await self._synced(self._plan(joined))).assignment

    async def _joined(self, request: JoinGroupRequest) -> JoinGroupResponse:
        seconds = max(_JOIN_SECONDS, self._settings.rebalance_timeout_ms / 1000 + _JOIN_MARGIN)
        is_first = not self.member_id and self._settings.static
        try:
            answer = await self._line.ask_patiently(request, _VERSIONS[GroupRequest.JOIN], seconds, self._session)
        except (LostConnection, BrokerRefusal) as error:
            if is_first:
                # It may reach the coordinator later than the next one, and look like another process of our name.
                self._late_until = self._loop.time() + _LATE_SECONDS
            raise self._halted(GroupRequest.JOIN, error) from error
        self._check(GroupRequest.JOIN, answer.error_code, answer.member_id)
        self._check_protocol(answer.protocol_type)
        if answer.generation_id < 0 or not answer.member_id:
            raise self._halted(GroupRequest.JOIN, LostConnection("a JoinGroup answer without a generation", "_BAD_MSG"))
        return answer

    def _plan(self, joined: JoinGroupResponse) -> dict[str, bytes]:
        if joined.leader != self.member_id:
            return {}
        return self._hooks.lead(self._protocol, {member.member_id: member.metadata for member in joined.members})

    async def _synced(self, plan: dict[str, bytes]) -> SyncGroupResponse:
        settings = self._settings
        request = SyncGroupRequest(
            group_id=settings.group_id,
            generation_id=self._generation,
            member_id=self.member_id,
            group_instance_id=settings.static_id,
            protocol_type=PROTOCOL_TYPE,
            protocol_name=self._protocol,
            assignments=[
                SyncGroupRequest.SyncGroupRequestAssignment(member_id=member, assignment=data)
                for member, data in plan.items()
            ],
        )
        seconds = max(_SYNC_SECONDS, self._session + _SYNC_MARGIN)
        try:
            answer = await self._line.ask_patiently(request, _VERSIONS[GroupRequest.SYNC], seconds, self._session)
        except (LostConnection, BrokerRefusal) as error:
            raise self._halted(GroupRequest.SYNC, error) from error
        self._check(GroupRequest.SYNC, answer.error_code)
        self._check_protocol(answer.protocol_type, answer.protocol_name)
        self._at_work = self._loop.time()
        self._beats = self._client.spawn(self._beat())
        return answer

    def _check_protocol(self, kind: str | None, name: str | None = None) -> None:
        # Old versions of the answers have neither.
        if kind not in (None, PROTOCOL_TYPE) or name not in (None, self._protocol):
            raise Halted(JoinStep.NO_STRATEGY, BrokerRefusal(Code.INCONSISTENT_GROUP_PROTOCOL))

    def _check(self, request: GroupRequest, code: int, member_id: str = "") -> None:
        step = self._next_step(request, code)
        if step is not JoinStep.TAKE:
            raise Halted(step, BrokerRefusal(code), member_id)

    def _halted(self, request: GroupRequest, error: BrokerRefusal | LostConnection) -> Halted:
        if isinstance(error, BrokerRefusal):
            return Halted(self._next_step(request, error.code), error)
        # A certificate that does not fit is none of these: it may just be renewed, on one broker after the other.
        return Halted(JoinStep.END if error.code in HOPELESS else JoinStep.LOOK_FOR_COORDINATOR, error)

    def _next_step(self, request: GroupRequest, code: int) -> JoinStep:
        return next_step(self._standing, request, code)

    @property
    def _standing(self) -> MemberStanding:
        if self._generation >= 0:
            return MemberStanding.MEMBER
        return MemberStanding.NAMED if self.member_id else MemberStanding.NEW

    def _follow(self, halted: Halted) -> None:
        """Take the step. Raises what the membership has to know."""
        match halted.step:
            case JoinStep.TAKE_ID if halted.member_id:
                self.member_id = halted.member_id
            case JoinStep.JOIN_ANEW:
                self._void(_UNKNOWN)
            case JoinStep.LEAVE_AND_JOIN_ANEW:
                self._void(_UNKNOWN, leaves=True)
            case JoinStep.LOOK_FOR_COORDINATOR:
                self._line.forget(halted.error)
            case JoinStep.NO_STRATEGY:
                self._void("the group refuses its strategies", leaves=True)
                raise NoCommonStrategy from halted.error
            case JoinStep.FENCED:
                self._fenced(halted.error)
            case JoinStep.END:
                raise self._explained(halted.error) from halted.error
            case JoinStep.REPORT | JoinStep.TAKE_ID:
                raise CannotJoinYet(str(halted.error), is_outage=False) from halted.error

    def _fenced(self, error: BrokerRefusal | LostConnection) -> None:
        """Another member has the static name. It is no other process if a JoinGroup of our own was under way without a
        connection: it came late, and made a member without a process. Raises the error if it is one."""
        if self._loop.time() > self._late_until:
            raise self._explained(error) from error
        self._late_until = -math.inf  # for once: a second one is another process
        self._void("a late request of this member took its place")

    def _void(self, reason: str, *, leaves: bool = False) -> None:
        """Void the membership, and join as a new member. ``leaves``: the group may wait for the id otherwise."""
        former, self.member_id, self._generation = self.member_id, "", -1
        self._must_join = True
        self._stop_beats()
        # Before LeaveGroup: what was owned is void, and no transaction may see valid metadata any more.
        self._hooks.voided(reason)
        if leaves and former and self._gives_ids_back:
            self._departure = self._client.spawn(self._leave_as(former, reason))
        self._hooks.woken()

    async def _leave_as(self, member_id: str, reason: str) -> None:
        deadline = self._loop.time() + _LEAVE_SECONDS
        with contextlib.suppress(StreamsError):  # its session ends by itself
            await self.leave(member_id, deadline, reason)

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        rebalance = self._settings.rebalance_timeout_ms / 1000
        next_one, trouble = self._loop.time() + self._interval, ""
        while True:
            await self._rest(next_one - self._loop.time())
            if self._loop.time() - self._at_work > rebalance:
                # A dead engine, or one that does not give up what was taken away: the others wait for it no longer.
                self._void("no progress for the rebalance timeout", leaves=True)
                return
            next_one = self._loop.time() + self._interval
            try:
                await self._beat_once()
            except (LostConnection, BrokerRefusal) as error:
                halted = self._halted(GroupRequest.HEARTBEAT, error)
            except Halted as refused:
                halted = refused
            else:
                self._line.answers()
                continue
            if halted.step is JoinStep.JOIN_AGAIN:  # an answer like any other: heartbeats go on until JoinGroup
                self._line.answers()
                self.request_rejoin()
                continue
            next_one = self._loop.time() + _RETRY_SECONDS
            try:
                self._follow(halted)
            except StreamsError as error:
                self._hooks.fatal(error)
            except CannotJoinYet as failure:
                if failure.trouble != trouble:
                    trouble = failure.trouble
                    log.warning("group %s: a heartbeat failed (%s); trying on", self._settings.group_id, trouble)
            if self._generation < 0 or self._is_closing:
                return

    async def _rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _beat_once(self) -> None:
        request = HeartbeatRequest(
            group_id=self._settings.group_id,
            generation_id=self._generation,
            member_id=self.member_id,
            group_instance_id=self._settings.static_id,
        )
        # A broker that keeps the connection and does not answer (frozen, cut off) has a session's time.
        answer = await self._line.ask(request, _VERSIONS[GroupRequest.HEARTBEAT], self._session)
        self._check(GroupRequest.HEARTBEAT, answer.error_code)

    def _stop_beats(self) -> None:
        # The task itself comes here when its answer voids the membership; it ends by itself.
        if self._beats is not None and self._beats is not asyncio.current_task():
            self._beats.cancel()
        self._beats = None

    def _look_at_beats(self) -> None:
        """Raise what ended the heartbeats, if it was a mistake; they begin again."""
        beats = self._beats
        if beats is not None and beats.done() and not beats.cancelled() and (error := beats.exception()) is not None:
            self._beats = self._client.spawn(self._beat())
            raise error

    # -- words ---------------------------------------------------------------------------------------------------------

    def _translated(self, error: BrokerRefusal | LostConnection) -> StreamsError:
        group_id = self._settings.group_id
        return self._client.translated(error, f"joining group {group_id}", [permissions.on_group("Read", group_id)])

    def _explained(self, error: BrokerRefusal | LostConnection) -> StreamsError:
        name = error.name if isinstance(error, BrokerRefusal) else error.code
        return refusals.explained(name, self._settings.group_id, self._settings.instance, self._translated(error))
