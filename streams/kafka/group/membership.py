"""A member of a consumer group, without a consumer: ``streams.model.group.Membership`` over kafka-python.

The rules that carry the exactly-once guarantee are those of ``core/group_member.py``, the machine that is driven here
(``docs/internals/membership.md`` has the facts behind them).

Threads: all state below belongs to kafka-python's IO thread, except ``group_metadata`` (replaced by one assignment,
read anywhere). The public methods post to that thread and return.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from streams.core.group_member import GroupMember
from streams.errors import ConfigError, MembershipFatal, StreamsError
from streams.kafka.group import coordinator as group_coordinator
from streams.kafka.group.coordinator import FATAL, GroupCoordinator, leave_group
from streams.kafka.questions.takeover import WireTakeOver
from streams.kafka.wire import group_bytes, kafka_python_settings
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.kafka_python import WakeupNotifier
from streams.kafka.wire.kafka_python import errors as kafka_errors
from streams.kafka.wire.kafka_python_client import KafkaPythonClient
from streams.kafka.wire.security import PLAINTEXT, Security
from streams.model.group import Assignment, Assignor, Copies, Fatal, GroupEvent, GroupMetadata, Order

log = logging.getLogger(__name__)

_IDLE_CHECK = 0.5  # seconds between checks of `alive` when nothing happens
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between tries after an error
_LEAVE_PATIENCE = 3.0  # seconds for a LeaveGroup at the end


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Settings of one member. Raises ``ConfigError`` for what cannot work, by the setting's name.

    ``instance`` is the member's stable name. ``assignors``: strategy name -> how it shares the ``partitions`` of
    ``topic``, the preferred one first. ``static``: the instance is its group instance id too.
    """

    group_id: str
    topic: str
    partitions: int
    instance: str
    assignors: Mapping[str, Assignor]
    session_timeout_ms: int = 6000
    heartbeat_interval_ms: int = 300
    rebalance_timeout_ms: int = 15000
    static: bool = False

    def __post_init__(self) -> None:
        group_bytes.checked_name("group.id", self.group_id)
        group_bytes.checked_name("instance", self.instance, dots=False)
        if self.partitions < 1:
            raise ConfigError(f"topic {self.topic!r} has {self.partitions} partitions, at least 1 is needed")
        if not 0 < self.heartbeat_interval_ms < self.session_timeout_ms:
            raise ConfigError(
                f"heartbeat interval of {self.heartbeat_interval_ms} ms: it must be above 0 and below the session "
                f"timeout of {self.session_timeout_ms} ms"
            )
        if self.rebalance_timeout_ms < 1:
            raise ConfigError(f"rebalance timeout of {self.rebalance_timeout_ms} ms: it must be above 0")
        if not self.assignors:
            raise ConfigError("strategy: at least one is needed")
        for strategy in self.assignors:
            group_bytes.protocol(strategy)

    @property
    def static_id(self) -> str | None:
        """The group instance id, if it has one."""
        return self.instance if self.static else None

    def for_coordinator(self) -> dict[str, Any]:
        """Settings of kafka-python's coordinator client."""
        return {
            "group_id": self.group_id,
            "group_instance_id": self.static_id,
            "session_timeout_ms": self.session_timeout_ms,
            "heartbeat_interval_ms": self.heartbeat_interval_ms,
            "max_poll_interval_ms": self.rebalance_timeout_ms,
        }


def connect_group(
    bootstrap_servers: str,
    group_id: str,
    topic: str,
    partitions: int,
    instance: str,
    assignors: Mapping[str, Assignor],
    *,
    security: Security = PLAINTEXT,
    alive: Callable[[], bool] = lambda: True,
    **settings: Any,
) -> tuple[KafkaPythonMembership, WireTakeOver]:
    """A membership and the take-over questions, each on a client of its own. ``membership.start`` starts both,
    ``membership.close`` closes both. No I/O yet.

    ``assignors``: strategy name -> how it shares, the preferred one first. ``settings`` are ``changelog``, timeouts and
    ``static`` (``GroupSettings``). ``alive``: see ``KafkaPythonMembership``. Raises ``ConfigError``.
    """
    changelog = settings.pop("changelog", "")
    checked = GroupSettings(
        group_id=group_id, topic=topic, instance=instance, partitions=partitions, assignors=assignors, **settings
    )
    client = KafkaPythonClient(bootstrap_servers, instance, kafka_python_settings.translated(security))
    asking = WireClient(bootstrap_servers, instance, security)
    take_over = WireTakeOver(asking, group_id, topic, changelog=changelog)
    return KafkaPythonMembership(client, asking, checked, alive), take_over


class KafkaPythonMembership:
    """One member of a group that shares the partitions of a topic with the others; ``model.group.Membership`` and
    ``coordinator.Hooks`` document the methods. ``start`` is for once; ``close`` ends the clients, and may be repeated.
    ``asking``: the client of the take-over's questions.

    Of several ``settings.assignors`` the broker chooses one that all members have, so a running group changes its
    strategy by two rolling restarts, the first one with both strategies. ``settings.static``: a restart within the
    session timeout gets its partitions back before others do, and ``close`` leaves only after ``leave``. ``alive`` is
    called every half second: when it returns ``False`` for the rebalance timeout, the member gives up.
    """

    def __init__(
        self, client: KafkaPythonClient, asking: WireClient, settings: GroupSettings, alive: Callable[[], bool]
    ) -> None:
        self._group_id, self._instance, self._static_id = settings.group_id, settings.instance, settings.static_id
        self._topic, self._partitions = settings.topic, settings.partitions
        self._assignors = {group_bytes.protocol(name): assignor for name, assignor in settings.assignors.items()}
        self._settings, self._client, self._asking, self._alive = settings, client, asking, alive
        self._deliver: Callable[[GroupEvent], None] | None = None
        self._coordinator: GroupCoordinator | None = None
        self._wake, self._released = WakeupNotifier(client.net), WakeupNotifier(client.net)
        self._state = GroupMember(
            settings.instance,
            session_seconds=settings.session_timeout_ms / 1000,
            rebalance_seconds=settings.rebalance_timeout_ms / 1000,
            # Also a predecessor's counter must not fit: a restarted static member is given the assignment made for it.
            sequence=time.time_ns() // 1000,
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
        return "" if self._coordinator is None else self._coordinator.member_id

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        if self._deliver is not None:
            raise RuntimeError("a membership is started once")
        self._deliver = deliver
        self._client.net.on_crash = self._crashed
        self._asking.start()
        self._client.start()
        self._client.post(self._run)

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        given = frozenset(partitions)  # as they are now: the caller may change them

        def note() -> None:
            self._state.released(given, incarnation, generation)
            self._released.notify()

        self._client.post(note)

    def handed_over(self, partition: int, order: Order) -> None:
        def note() -> None:
            self._state.handed_over(partition, order)
            self._released.notify()

        self._client.post(note)

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
        for client in (self._asking, self._client):
            client.close(max(0.5, deadline - time.monotonic()))

    def _note(self, event: Callable[[], object]) -> None:
        def note() -> None:
            event()
            self._join_for_news()

        self._client.post(note)

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
                await self._client.net.sleep(_IDLE_CHECK)
            except FATAL as error:
                self.fatal(error)
            except kafka_errors.KafkaError as error:
                self._log_once(error)
                await self._client.net.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            except Exception:
                # What meets a client that is being closed is no failure.
                level = logging.DEBUG if self._stopped else logging.ERROR  # type: ignore[redundant-expr]
                log.log(level, "group %s: unexpected failure; trying on", self._group_id, exc_info=True)
                await self._client.net.sleep(_LONGEST_PAUSE)

    def _log_once(self, error: Exception) -> None:
        """Log an error that keeps it from joining. Outages are none: the coordinator hooks and the client log those."""
        trouble = type(error).__name__
        if not error.retriable and trouble != self._trouble and not self._stopped:  # type: ignore[attr-defined]
            log.warning("group %s: cannot join yet (%s); trying on", self._group_id, trouble)
            self._trouble = trouble

    def _refused(self, error: BaseException) -> None:
        """The group has members, and shares no strategy with us. They may be what a kill left of a predecessor."""
        now = time.monotonic()
        if self._state.no_common_strategy.begins(now):
            self.voided("the group refuses its strategies")
            log.warning(
                "group %s: it has members that know no strategy of ours (%s); waiting a session timeout for them to go",
                self._group_id,
                ", ".join(self._settings.assignors),
            )
        elif self._state.no_common_strategy.is_over(now):
            self.fatal(error)

    async def _step(self, coordinator: GroupCoordinator) -> None:
        """Join if there is a reason to, then wait for the next reason."""
        # Without ``poll_heartbeat`` kafka-python leaves the group after the rebalance timeout. A dead engine must not
        # join again after that: it would leave again, each rebalance timeout anew.
        if self._alive():
            await coordinator.ensure_active_group_async(timeout_ms=None)
            coordinator.poll_heartbeat()
            self._trouble = ""
            self._state.no_common_strategy.passed()
        if self._state.rival.is_over(time.monotonic()):
            self._end(group_coordinator.name_taken(self._group_id, self._instance))
        await self._wake(_IDLE_CHECK)

    # ------------------------------------------------------------------ IO thread: hooks of the coordinator

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
        metadata = group_bytes.group_metadata(self._group_id, generation, member_id, self._static_id)
        self._state.joined(generation, member_id, metadata)

    async def joined(self, generation: int, data: bytes) -> None:
        await self._apply(generation, data)
        self._join_for_news()  # it may have come during the join; kafka-python forgets requests of that time

    async def _apply(self, generation: int, data: bytes) -> None:
        """First give up what was taken away, then take what is new."""
        incarnation = self.group_metadata.incarnation
        if generation < 0 or self.group_metadata.generation != generation:
            self._rejoin()  # lost between the answers to JoinGroup and SyncGroup
            return
        assignment = self._understood(data)
        if assignment is None:
            self._misses += 1
            await self._client.net.sleep(min(_LONGEST_PAUSE, 0.02 * 2 ** min(self._misses, 10)))
            self._rejoin()
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
        assigned = state.assign(generation, assignment)
        owned, releasing, incoming = map(group_bytes.ranges, (holdings.owned, holdings.releasing, holdings.incoming))
        moves = f"; to hand over {releasing}; to take {incoming}" if holdings.releasing or holdings.incoming else ""
        log.info("group %s: generation %d, partitions %s%s", self._group_id, generation, owned, moves)
        self._tell(assigned)
        if joins_again and not state.is_dismissed(assignment):
            self._rejoin()  # what was given up can be assigned now

    def _met_rival(self) -> None:
        """An older member has our instance name. It may be what a kill left of our predecessor: then it expires, and we
        are given its place. If it is still there after that time, it is alive."""
        if self._state.rival.begins(time.monotonic()):
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
        now = time.monotonic()
        if self._state.undecodable.begins(now):
            log.warning("group %s: the assignment is not understood (%s); joining again", self._group_id, error)
        elif self._state.undecodable.is_over(now):
            self._end(group_coordinator.not_understood(self._group_id, error))

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

    def fatal(self, error: BaseException) -> None:
        strategies = tuple(self._settings.assignors)
        self._end(group_coordinator.explained(error, self._client, self._group_id, self._instance, strategies))

    # ------------------------------------------------------------------ IO thread: small parts

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

    def _join_for_news(self) -> None:
        if self._state.has_news:
            self._rejoin()

    def _rejoin(self) -> None:
        if self._coordinator is not None:
            self._coordinator.request_rejoin()

    async def _depart(self, deadline: float) -> None:
        """Stop for good, with a LeaveGroup: the others rebalance at once."""
        self._stopped = True
        member_id = self.joining_as
        if self._coordinator is not None:
            self._coordinator.stop()
        self._state.void()  # before the LeaveGroup: from then on the partitions may be another member's
        self._released.notify()
        self.woken()
        if member_id and (self._static_id is None or self._state.holdings.leaving):
            await leave_group(self._client, self._group_id, member_id, self._static_id, deadline)

    def _crashed(self, error: BaseException) -> None:
        self._end(MembershipFatal(f"group {self._group_id}: the thread of the membership failed: {error!r}"))
