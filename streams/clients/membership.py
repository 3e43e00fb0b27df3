"""A member of a consumer group, without a consumer: ``streams.group.Membership`` over kafka-python.

Three rules carry the exactly-once guarantee (``docs/internals/membership.md`` has the facts behind them):

* **Incarnation first.** When the membership is lost, the snapshot is replaced before anything else happens. A
  transaction that began under an older incarnation finds another one right before it sends offsets, and is dropped.
* **The new generation is published with the JoinGroup answer**: from then on the broker refuses the old one.
* **Revoke is a barrier.** Joining again waits until ``released`` was called for all that was revoked; heartbeats go on.

What it claims, and what is still a claim once a move is under way, is kept by ``core/holdings.py``.

Threads: all state below belongs to kafka-python's IO thread, except ``snapshot`` (replaced by one assignment, read
anywhere). The public methods post to that thread and return.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

from streams.clients import group_coordinator, group_wire
from streams.clients.group_coordinator import FATAL, GroupCoordinator, leave_group
from streams.clients.group_settings import GroupSettings, Patience
from streams.clients.kafka_python import WakeupNotifier
from streams.clients.kafka_python import errors as kafka_errors
from streams.clients.kafka_python_client import KafkaPythonClient
from streams.clients.takeover import KafkaPythonTakeOver
from streams.core.holdings import Holdings
from streams.errors import MembershipFatal, StreamsError
from streams.group import Assigned, Assignment, Assignor, Copies, Fatal, GroupEvent, Lost, Order, Revoked, Snapshot

log = logging.getLogger(__name__)

_IDLE_LOOK = 0.5  # seconds between looks at `alive` when nothing happens
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between tries after an error
_LEAVE_PATIENCE = 3.0  # seconds for a LeaveGroup at the end


def connect_group(
    bootstrap_servers: str,
    group_id: str,
    topic: str,
    partitions: int,
    instance: str,
    assignors: Mapping[str, Assignor],
    *,
    security: Mapping[str, Any] | None = None,
    alive: Callable[[], bool] = lambda: True,
    **settings: Any,
) -> tuple[KafkaPythonMembership, KafkaPythonTakeOver]:
    """A membership and the take-over questions on one shared client. ``membership.close`` closes both. No I/O yet.

    ``assignors``: strategy name -> how it shares, the preferred one first. ``security`` are kafka-python settings
    (``kafka_python_settings.translate``); ``settings`` are ``changelog``, timeouts and ``static`` (``GroupSettings``).
    ``alive``: see ``KafkaPythonMembership``. Raises ``ConfigError``.
    """
    names: dict[str, Any] = {"group_id": group_id, "topic": topic, "instance": instance}
    changelog = settings.pop("changelog", "")
    checked = GroupSettings(**names, partitions=partitions, assignors=assignors, **settings)
    client = KafkaPythonClient(bootstrap_servers, instance, security or {})
    return KafkaPythonMembership(client, checked, alive), KafkaPythonTakeOver(client, **names, changelog=changelog)


class KafkaPythonMembership:
    """One member of a group that shares the partitions of a topic with the others.

    Of several ``settings.assignors`` the broker chooses one that all members have, so a running group changes its
    strategy by two rolling restarts, the first one with both strategies. ``settings.static``: a restart within the
    session timeout gets its partitions back before others do, and ``close`` leaves only after ``leave``. ``alive`` is
    asked every half second: when it says no for the rebalance timeout, the member gives itself up.
    """

    def __init__(
        self, client: KafkaPythonClient, settings: GroupSettings, alive: Callable[[], bool] = lambda: True
    ) -> None:
        self._group_id, self._instance, self._static_id = settings.group_id, settings.instance, settings.static_id
        self._topic, self._partitions = settings.topic, settings.partitions
        self._assignors = {group_wire.protocol(name): assignor for name, assignor in settings.assignors.items()}
        self._settings, self._client, self._alive = settings, client, alive
        self._snapshot = Snapshot(incarnation=0, generation=-1, member_id="", metadata=None)
        self._deliver: Callable[[GroupEvent], None] | None = None
        self._coordinator: GroupCoordinator | None = None
        self._wake, self._released = WakeupNotifier(client.net), WakeupNotifier(client.net)
        # Also a predecessor's counter must not fit: a restarted static member is given the assignment made for it.
        self._holdings = Holdings(settings.instance, sequence=time.time_ns() // 1000)
        self._unsaid = False  # something to tell came after the last report was made
        self._waiting_for: set[int] = set()  # revoked, not yet released
        self._stopped = self._closed = False
        self._misses, self._trouble = 0, ""  # assignments in a row that were not for us; what was said last
        # What a kill left of a predecessor is in the way until its session has expired, and may hold up a rebalance.
        patience = settings.session_seconds + settings.rebalance_seconds
        self._rival = Patience(patience)  # an older member has our name
        self._riddle = Patience(patience)  # the leader's assignments cannot be read
        self._refusal = Patience(settings.session_seconds + 1.0)  # the group has no strategy of ours

    # ------------------------------------------------------------------ any thread

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot. Read it once, right before offsets are sent."""
        return self._snapshot

    @property
    def joining_as(self) -> str:
        """The broker's name for this member, known from the first answer to a JoinGroup on; empty before."""
        return "" if self._coordinator is None else self._coordinator.member_id

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        """Join, and keep the membership. ``deliver`` is called on the IO thread and must not block. Once only."""
        if self._deliver is not None:
            raise RuntimeError("a membership is started once")
        self._deliver = deliver
        self._client.net.on_crash = self._crashed
        self._client.start()
        self._client.post(self._run)

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        """The last transaction on these revoked partitions is settled. Others than the revoked ones are ignored."""
        given = frozenset(partitions)

        def note() -> None:
            if (incarnation, generation) == (self._snapshot.incarnation, self._snapshot.generation):
                self._holdings.released(given & self._waiting_for)
                self._waiting_for -= given
            self._released.notify()

        self._client.post(note)

    def handed_over(self, partition: int, order: Order) -> None:
        """The release marker of this order is committed. Without effect if the order was withdrawn meanwhile."""

        def note() -> None:
            self._holdings.handed_over(partition, order)
            self._released.notify()

        self._client.post(note)

    def took(self, partition: int, incarnation: int) -> None:
        """The marker of an incoming partition was there: it is ours now. Without effect if it is not expected."""

        def note() -> None:
            if incarnation == self._snapshot.incarnation:
                self._holdings.took(partition)
            if self._holdings.leaving:
                self._say()  # it came while we are leaving: somebody else has to have it

        self._client.post(note)

    def report(self, copies: Copies, *, announce: bool) -> None:
        """What the next JoinGroup shall tell about copies. ``announce``: join again to tell it, once, unless the last
        report told this and all else that we claim now; when a join is under way, after that one. Do not change
        ``copies`` afterwards."""

        def note() -> None:
            self._holdings.copies = copies
            if announce and not self._is_told():
                self._say()

        self._client.post(note)

    def leave(self) -> None:
        """Ask the group to take everything away: by moves if it can, else ``Revoked`` follows, then ``Assigned`` with
        nothing. Repeating it is harmless."""

        def note() -> None:
            self._holdings.leaving = True
            if not self._holdings.told.leaving:
                self._say()

        self._client.post(note)

    def close(self, timeout_seconds: float) -> None:
        """Leave the group (a static member: only after ``leave``), end the thread and the shared client.

        Blocks up to the timeout. No event is delivered any more. Harmless to repeat; also before ``start``.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_seconds
        done: Future[None] = Future()

        async def depart() -> None:
            try:
                await self._depart(min(deadline, time.monotonic() + _LEAVE_PATIENCE))
            except Exception as error:
                log.warning("group %s: leaving failed (%s); the session has to expire", self._group_id, error)
            finally:
                done.set_result(None)

        if self._deliver is not None and self._client.post(depart):
            try:
                done.result(timeout_seconds)
            except TimeoutError:
                log.warning("group %s: leaving took too long; the session has to expire", self._group_id)
        self._client.close(max(0.5, deadline - time.monotonic()))

    # ------------------------------------------------------------------ IO thread: main coroutine

    async def _run(self) -> None:
        try:
            await self._client.connected()
        except StreamsError as error:
            self._end(error)
            return
        version, timing = self._client.manager.broker_version, self._settings.for_coordinator()
        self._coordinator = GroupCoordinator(self, self._client, api_version=version, **timing)
        pause = _FIRST_PAUSE
        while not self._stopped:
            try:
                await self._step(self._coordinator)
                pause = _FIRST_PAUSE
            except kafka_errors.InconsistentGroupProtocolError as error:
                self._refused(error)
                await self._client.net.sleep(_IDLE_LOOK)
            except FATAL as error:
                self.fatal(error)
            except kafka_errors.KafkaError as error:
                self._say_once(error)
                await self._client.net.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            except Exception:
                # What meets a client that is being closed is no failure.
                level = logging.DEBUG if self._stopped else logging.ERROR  # type: ignore[redundant-expr]
                log.log(level, "group %s: unexpected failure; trying on", self._group_id, exc_info=True)
                await self._client.net.sleep(_LONGEST_PAUSE)

    def _say_once(self, error: Exception) -> None:
        """Outages are told by the coordinator hooks and the client; this is for all else that keeps it from joining."""
        trouble = type(error).__name__
        if not error.retriable and trouble != self._trouble and not self._stopped:  # type: ignore[attr-defined]
            log.warning("group %s: cannot join yet (%s); trying on", self._group_id, trouble)
            self._trouble = trouble

    def _refused(self, error: BaseException) -> None:
        """The group has members, and shares no strategy with us. They may be what a kill left of a predecessor."""
        if self._refusal.begins():
            self.voided("the group refuses its strategies")
            log.warning(
                "group %s: it has members that know no strategy of ours (%s); waiting a session timeout for them to go",
                self._group_id,
                ", ".join(self._settings.assignors),
            )
        elif self._refusal.is_over:
            self.fatal(error)

    async def _step(self, coordinator: GroupCoordinator) -> None:
        """Join if there is a reason to, then wait for the next reason.

        When the engine is not alive, heartbeats go on without ``poll_heartbeat``, until kafka-python leaves the group
        after the rebalance timeout. It would join again at once, to leave again: a dead engine does not come to join.
        """
        if self._alive():
            await coordinator.ensure_active_group_async(timeout_ms=None)
            coordinator.poll_heartbeat()
            self._trouble = ""
            self._refusal.passed()
        if self._rival.is_over:
            self._end(group_coordinator.name_taken(self._group_id, self._instance))
        await self._wake(_IDLE_LOOK)

    # ------------------------------------------------------------------ IO thread: hooks of the coordinator

    def subscriptions(self) -> list[tuple[str, bytes]]:
        """The report for the next JoinGroup, once for each protocol, the preferred one first.

        Its counter makes the bytes differ, or a follower would not be heard.
        """
        self._unsaid = False
        report = group_wire.encode_report(self._topic, self._holdings.report())
        return [(protocol, report) for protocol in self._assignors]

    def lead(self, protocol: str, members: dict[str, bytes]) -> dict[str, bytes]:
        """This member leads: decide for all, by the strategy that the broker chose."""
        reports = {}
        for member_id, data in members.items():
            report, wrong = group_wire.decode_report(self._topic, member_id, data)
            reports[member_id] = group_wire.within(self._partitions, report)
            if wrong:
                log.warning("group %s: member %s gets no partitions: %s", self._group_id, member_id, wrong)
        plan = self._assignors[protocol](self._partitions, reports)
        return {
            member_id: group_wire.encode_assignment(self._topic, assignment) for member_id, assignment in plan.items()
        }

    def published(self, generation: int, member_id: str) -> None:
        """A new generation is valid."""
        before = self._snapshot
        if before.generation >= 0 and before.member_id != member_id:
            self.voided("the group gave this member another id")
            before = self._snapshot
        metadata = group_wire.group_metadata(self._group_id, generation, member_id, self._static_id)
        self._snapshot = Snapshot(before.incarnation, generation, member_id, metadata)

    async def joined(self, generation: int, data: bytes) -> None:
        """The rebalance is complete: apply the assignment, or join again when it was not for us."""
        await self._apply(generation, data)
        if self._unsaid:  # it came while the report was under way; kafka-python forgets requests of that time
            self._rejoin()

    async def _apply(self, generation: int, data: bytes) -> None:
        """First give up what was taken away, then take what is new."""
        incarnation = self._snapshot.incarnation
        if generation < 0 or self._snapshot.generation != generation:
            self._rejoin()  # lost between the answers to JoinGroup and SyncGroup
            return
        assignment = self._understood(data)
        if assignment is None:
            self._misses += 1
            await self._client.net.sleep(min(_LONGEST_PAUSE, 0.02 * 2 ** min(self._misses, 10)))
            self._rejoin()
            return
        self._misses = 0
        holdings = self._holdings
        rival = assignment.quit and not assignment.own and not holdings.leaving
        if not rival:
            self._rival.passed()
        elif not holdings.owned:
            self._met_rival()
            return
        joins_again = holdings.has_to_join_again(assignment)
        while revoked := holdings.revoked_by(assignment):  # again, should it have taken something meanwhile
            joins_again = True
            if not await self._barrier(incarnation, revoked):
                return
        added = holdings.apply(generation, assignment)
        owned, releasing, incoming = map(group_wire.ranges, (holdings.owned, holdings.releasing, holdings.incoming))
        moves = f"; to hand over {releasing}; to take {incoming}" if holdings.releasing or holdings.incoming else ""
        log.info("group %s: generation %d, partitions %s%s", self._group_id, generation, owned, moves)
        under_way = holdings.releasing, holdings.incoming, holdings.told.copies
        self._tell(Assigned(incarnation, generation, holdings.owned, added, assignment, *under_way))
        if joins_again and not (assignment.quit and holdings.leaving):
            self._rejoin()  # what was given up can be assigned now

    def _met_rival(self) -> None:
        """An older member has our instance name. It may be what a kill left of our predecessor: then it expires, and we
        are given its place. If it is still there after that time, it is alive."""
        if self._rival.begins():
            log.warning(
                "group %s: a member named %r is there already; waiting for it to go (a killed predecessor expires with "
                "its session)",
                self._group_id,
                self._instance,
            )

    def _understood(self, data: bytes) -> Assignment | None:
        """The assignment, if it answers our last report. Else it was made for a predecessor, or by something else."""
        try:
            assignment = group_wire.decode_assignment(data, self._partitions, self._snapshot.member_id)
        except ValueError as error:
            self._strange(error)
            return None
        self._riddle.passed()
        return assignment if assignment.sequence == self._holdings.told.sequence else None

    def _strange(self, error: ValueError) -> None:
        """The leader is something else, or has other settings. It may go away, or be restarted with ours."""
        if self._riddle.begins():
            log.warning("group %s: the assignment is not understood (%s); joining again", self._group_id, error)
        elif self._riddle.is_over:
            self._end(group_coordinator.not_understood(self._group_id, error))

    async def _barrier(self, incarnation: int, revoked: frozenset[int]) -> bool:
        """Wait until all is released, or handed over, at most the rebalance timeout. ``False``: lost meanwhile."""
        self._waiting_for = set(revoked)
        self._tell(Revoked(incarnation, self._snapshot.generation, revoked))
        while fine := self._snapshot.incarnation == incarnation and not self._stopped:
            if not self._waiting_for & self._holdings.here:
                break
            await self._released(_IDLE_LOOK)
        self._waiting_for = set()  # what comes late is no answer to another barrier
        return fine

    def voided(self, reason: str) -> None:
        """Everything owned is void. The snapshot comes first: see the incarnation rule above. Repeating is harmless."""
        if self._snapshot.generation < 0:
            return
        self._void_quietly()
        if not self._stopped:
            log.warning("group %s: membership lost: %s", self._group_id, reason)
            self._tell(Lost(self._snapshot.incarnation, reason))

    def woken(self) -> None:
        """There is a reason to join again, or to look."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._wake.notify()

    def fatal(self, error: BaseException) -> None:
        """The group will not have this member. Tells why, in our words, and ends."""
        strategies = tuple(self._settings.assignors)
        self._end(group_coordinator.explained(error, self._client, self._group_id, self._instance, strategies))

    # ------------------------------------------------------------------ IO thread: small parts

    def _void_quietly(self) -> None:
        self._snapshot = Snapshot(self._snapshot.incarnation + 1, generation=-1, member_id="", metadata=None)
        self._holdings.void()
        self._waiting_for = set()
        self._released.notify()

    def _end(self, error: StreamsError) -> None:
        if self._stopped:
            return
        self.voided(str(error))
        self._stopped = True
        if self._coordinator is not None:
            self._coordinator.stop()
            if self._coordinator.member_id and self._static_id is None:
                with contextlib.suppress(Exception):  # or the others wait for a member that has given up
                    self._client.manager.call_soon(self._depart, time.monotonic() + _LEAVE_PATIENCE)
        self.woken()
        log.error("group %s: %s", self._group_id, error)
        assert self._deliver is not None
        self._deliver(Fatal(error))

    def _tell(self, event: GroupEvent) -> None:
        if not self._stopped and self._deliver is not None:
            self._deliver(event)

    def _is_told(self) -> bool:
        now, told = self._holdings, self._holdings.told
        claims = (now.copies, now.owned, dict(now.releasing), frozenset(now.incoming))
        return claims == (told.copies, told.owned, told.releasing, told.incoming)

    def _say(self) -> None:
        """Join again soon, to tell what was not told yet."""
        self._unsaid = True
        self._rejoin()

    def _rejoin(self) -> None:
        if self._coordinator is not None:
            self._coordinator.request_rejoin()

    async def _depart(self, deadline: float) -> None:
        """Stop for good; a LeaveGroup tells the others at once."""
        self._stopped = True
        member_id = self.joining_as
        if self._coordinator is not None:
            self._coordinator.stop()
        self._void_quietly()
        self.woken()
        if member_id and (self._static_id is None or self._holdings.leaving):
            await leave_group(self._client, self._group_id, member_id, self._static_id, deadline)

    def _crashed(self, error: BaseException) -> None:
        self._end(MembershipFatal(f"group {self._group_id}: the thread of the membership failed: {error!r}"))
