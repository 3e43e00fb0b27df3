"""A member of a consumer group, without a consumer: ``streams.group.Membership`` over kafka-python.

Three rules carry the exactly-once guarantee (``docs/internals/membership.md`` has the facts behind them):

* **Incarnation first.** When the membership is lost, the snapshot is replaced before anything else happens. A
  transaction that began under an older incarnation finds another one right before it sends offsets, and is dropped.
* **The new generation is published with the JoinGroup answer**: from then on the broker refuses the old one.
* **Revoke is a barrier.** Joining again waits until ``released`` was called for all that was revoked; heartbeats go on.

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

from streams.clients import group_wire
from streams.clients.group_coordinator import FATAL, GroupCoordinator, explained, leave_group
from streams.clients.kafka_python import WakeupNotifier
from streams.clients.kafka_python import errors as kafka_errors
from streams.clients.kafka_python_client import KafkaPythonClient
from streams.clients.takeover import KafkaPythonTakeOver
from streams.errors import ConfigError, MembershipFatal, StreamsError
from streams.group import Assigned, Assignment, Assignor, Fatal, GroupEvent, Lost, MemberReport, Revoked, Snapshot

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
    assignor: Assignor,
    *,
    session_timeout_ms: int = 6000,
    heartbeat_interval_ms: int = 300,
    rebalance_timeout_ms: int = 15000,
    static: bool = False,
    security: Mapping[str, Any] | None = None,
    alive: Callable[[], bool] = lambda: True,
) -> tuple[KafkaPythonMembership, KafkaPythonTakeOver]:
    """A membership and the take-over questions on one shared client. ``membership.close`` closes both. No I/O yet.

    ``security`` are kafka-python settings (``kafka_python_settings.translate``). Raises ``ConfigError``.
    """
    group_wire.checked_name("group.id", group_id)
    group_wire.checked_name("instance", instance, dots=False)
    client = KafkaPythonClient(bootstrap_servers, instance, security or {})
    try:
        membership = KafkaPythonMembership(
            client,
            group_id,
            topic,
            partitions,
            instance,
            assignor,
            session_timeout_ms=session_timeout_ms,
            heartbeat_interval_ms=heartbeat_interval_ms,
            rebalance_timeout_ms=rebalance_timeout_ms,
            static=static,
            alive=alive,
        )
    except ConfigError:
        client.close(1.0)
        raise
    return membership, KafkaPythonTakeOver(client, group_id, topic)


class KafkaPythonMembership:
    """One member of ``group_id`` that shares the ``partitions`` of ``topic`` with the others, as ``assignor`` decides.

    ``instance`` is its stable name. ``static``: it is its group instance id too, so that a restart within the session
    timeout gets its partitions back before others do, and ``close`` leaves only after ``leave``. ``alive`` is asked
    every half second: when it says no for the rebalance timeout, the member gives itself up. Raises ``ConfigError``.
    """

    def __init__(
        self,
        client: KafkaPythonClient,
        group_id: str,
        topic: str,
        partitions: int,
        instance: str,
        assignor: Assignor,
        *,
        session_timeout_ms: int = 6000,
        heartbeat_interval_ms: int = 300,
        rebalance_timeout_ms: int = 15000,
        static: bool = False,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._group_id = group_wire.checked_name("group.id", group_id)
        self._instance = group_wire.checked_name("instance", instance, dots=False)
        if partitions < 1:
            raise ConfigError(f"topic {topic!r} has {partitions} partitions, at least 1 is needed")
        if not 0 < heartbeat_interval_ms < session_timeout_ms:
            raise ConfigError(
                f"heartbeat interval of {heartbeat_interval_ms} ms: it must be above 0 and below the session timeout "
                f"of {session_timeout_ms} ms"
            )
        if rebalance_timeout_ms < 1:
            raise ConfigError(f"rebalance timeout of {rebalance_timeout_ms} ms: it must be above 0")
        self._topic, self._partitions, self._assignor = topic, partitions, assignor
        self._static_id = instance if static else None
        self._alive = alive
        self._settings = {
            "group_id": group_id,
            "group_instance_id": self._static_id,
            "session_timeout_ms": session_timeout_ms,
            "heartbeat_interval_ms": heartbeat_interval_ms,
            "max_poll_interval_ms": rebalance_timeout_ms,
        }
        self._client = client
        self._snapshot = Snapshot(incarnation=0, generation=-1, member_id="", metadata=None)
        self._deliver: Callable[[GroupEvent], None] | None = None
        self._coordinator: GroupCoordinator | None = None
        self._wake = WakeupNotifier(client.net)
        self._released = WakeupNotifier(client.net)
        self._owned: frozenset[int] = frozenset()
        self._applied = -1  # generation of the last assignment that was applied
        self._waiting_for: set[int] = set()  # revoked, not yet released
        self._leaving = False
        self._stopped = self._closed = False
        self._echo_misses = 0
        self._trouble = ""
        self._rival_patience = (session_timeout_ms + rebalance_timeout_ms) / 1000
        self._rival_until: float | None = None  # while an older member has our name
        # Also a predecessor's counter must not fit: a restarted static member is given the assignment made for it.
        self._sent = MemberReport(instance=instance, sequence=time.time_ns() // 1000)

    # ------------------------------------------------------------------ any thread

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot. Read it once, right before offsets are sent."""
        return self._snapshot

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        """Join, and keep the membership. ``deliver`` is called on the IO thread and must not block. Once only."""
        if self._deliver is not None:
            raise RuntimeError("a membership is started once")
        self._deliver = deliver
        self._client.net.on_crash = self._crashed
        self._client.start()
        self._client.post(self._run)

    def released(self, partitions: Collection[int]) -> None:
        """The last transaction on these revoked partitions is settled. Others than the revoked ones are ignored."""
        given = frozenset(partitions)

        def note() -> None:
            given_up = given & self._waiting_for
            self._owned -= given_up
            self._waiting_for -= given_up
            self._released.notify()

        self._client.post(note)

    def leave(self) -> None:
        """Ask the group to take everything away: ``Revoked`` follows, then ``Assigned`` with nothing."""

        def note() -> None:
            self._leaving = True
            if self._coordinator is not None:
                self._coordinator.request_rejoin()

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
        version = self._client.manager.broker_version
        self._coordinator = GroupCoordinator(self, self._client, api_version=version, **self._settings)
        pause = _FIRST_PAUSE
        while not self._stopped:
            try:
                await self._step(self._coordinator)
                pause = _FIRST_PAUSE
            except FATAL as error:
                self.fatal(error)
            except kafka_errors.KafkaError as error:
                self._say_once(error)
                await self._client.net.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            except Exception:
                log.exception("group %s: unexpected failure of the membership; trying on", self._group_id)
                await self._client.net.sleep(_LONGEST_PAUSE)

    def _say_once(self, error: Exception) -> None:
        """Outages are told by the coordinator hooks and the client; this is for all else that keeps it from joining."""
        trouble = type(error).__name__
        if not error.retriable and trouble != self._trouble:  # type: ignore[attr-defined]
            log.warning("group %s: cannot join yet (%s); trying on", self._group_id, trouble)
            self._trouble = trouble

    async def _step(self, coordinator: GroupCoordinator) -> None:
        """Join if there is a reason to, then wait for the next reason.

        When the engine is not alive, heartbeats go on without ``poll_heartbeat``, until kafka-python leaves the group
        after the rebalance timeout. It would join again at once, to leave again: a dead engine does not come to join.
        """
        if self._alive():
            await coordinator.ensure_active_group_async(timeout_ms=None)
            coordinator.poll_heartbeat()
            self._trouble = ""
        if self._rival_until is not None and time.monotonic() > self._rival_until:
            self._give_way()
        await self._wake(_IDLE_LOOK)

    # ------------------------------------------------------------------ IO thread: hooks of the coordinator

    def subscription(self) -> bytes:
        """The report for the next JoinGroup. Its counter makes the bytes differ, or a follower would not be heard."""
        self._sent = MemberReport(
            instance=self._instance,
            owned=self._owned,
            generation=self._applied,
            leaving=self._leaving,
            sequence=self._sent.sequence + 1,
        )
        return group_wire.encode_report(self._topic, self._sent)

    def lead(self, members: dict[str, bytes]) -> dict[str, bytes]:
        """This member leads: decide for all."""
        reports = {}
        for member_id, data in members.items():
            reports[member_id], wrong = group_wire.decode_report(self._topic, member_id, data)
            if wrong:
                log.warning("group %s: member %s gets no partitions: %s", self._group_id, member_id, wrong)
        plan = self._assignor(self._partitions, reports)
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
        """Apply an assignment: first give up what was taken away, then take what is new."""
        incarnation = self._snapshot.incarnation
        if generation < 0 or self._snapshot.generation != generation:
            self._rejoin()  # lost between the answers to JoinGroup and SyncGroup
            return
        assignment = self._understood(data)
        if assignment is None:
            self._echo_misses += 1
            await self._client.net.sleep(min(_LONGEST_PAUSE, 0.02 * 2**self._echo_misses))
            self._rejoin()
            return
        self._echo_misses = 0
        if assignment.quit and not assignment.own and not self._leaving:
            self._met_rival()
            return
        self._rival_until = None
        self._applied = generation
        revoked = self._owned - assignment.own - assignment.release.keys()
        if revoked and not await self._barrier(incarnation, revoked):
            return
        added = assignment.own - self._owned
        self._owned |= added
        log.info("group %s: generation %d, partitions %s", self._group_id, generation, group_wire.ranges(self._owned))
        self._tell(Assigned(incarnation, generation, self._owned, added, assignment))
        if (revoked and not assignment.quit) or self._leaving != self._sent.leaving:
            self._rejoin()  # what was given up can be assigned now; or `leave` came while the report was under way

    def _met_rival(self) -> None:
        """An older member has our instance name. It may be what a kill left of our predecessor: then it expires, and we
        are given its place. If it is still there after that time, it is alive."""
        if self._rival_until is None:
            self._rival_until = time.monotonic() + self._rival_patience
            log.warning(
                "group %s: a member named %r is there already; waiting for it to go (a killed predecessor expires with "
                "its session)",
                self._group_id,
                self._instance,
            )

    def _give_way(self) -> None:
        self._end(
            MembershipFatal(
                f"group {self._group_id}: another member is named {self._instance!r}; "
                "each process needs an instance name of its own"
            )
        )

    def _understood(self, data: bytes) -> Assignment | None:
        """The assignment, if it answers our last report. Else it was made for a predecessor, or by something else."""
        try:
            assignment = group_wire.decode_assignment(data)
        except ValueError as error:
            log.warning("group %s: the leader's assignment is not understood (%s); joining", self._group_id, error)
            return None
        return assignment if assignment.sequence == self._sent.sequence else None

    async def _barrier(self, incarnation: int, revoked: frozenset[int]) -> bool:
        """Wait until all is released, at most the rebalance timeout. ``False``: the membership was lost meanwhile."""
        self._waiting_for = set(revoked)
        self._tell(Revoked(incarnation, revoked))
        while self._waiting_for and self._snapshot.incarnation == incarnation and not self._stopped:
            await self._released(_IDLE_LOOK)
        return self._snapshot.incarnation == incarnation and not self._stopped

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
        self._end(explained(error, self._client, self._group_id, self._instance))

    # ------------------------------------------------------------------ IO thread: small parts

    def _void_quietly(self) -> None:
        incarnation = self._snapshot.incarnation + 1
        self._snapshot = Snapshot(incarnation, generation=-1, member_id="", metadata=None)
        self._owned, self._applied = frozenset(), -1
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

    def _rejoin(self) -> None:
        if self._coordinator is not None:
            self._coordinator.request_rejoin()

    async def _depart(self, deadline: float) -> None:
        """Stop for good; a LeaveGroup tells the others at once."""
        self._stopped = True
        coordinator, member_id = self._coordinator, ""
        if coordinator is not None:
            member_id = coordinator.member_id
            coordinator.stop()
        self._void_quietly()
        self.woken()
        if not member_id or (self._static_id is not None and not self._leaving):
            return
        await leave_group(self._client, self._group_id, member_id, self._static_id, deadline)

    def _crashed(self, error: BaseException) -> None:
        self._end(MembershipFatal(f"group {self._group_id}: the thread of the membership failed: {error!r}"))
