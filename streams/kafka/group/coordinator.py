"""kafka-python's group coordinator client with our payload: the hooks it offers, and the four it does not offer.

Join, sync, heartbeat, retries and moves of the coordinator are kafka-python's. Everything here runs on its IO thread.
The private names that are overridden are why ``kafka-python`` is pinned to one minor version;
``tests/broker/test_membership.py`` fails when one of them moves.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from streams.errors import MembershipFatal, StreamsError
from streams.kafka import permissions
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.link import CannotJoinYet, Hooks, NoCommonStrategy, Notifier
from streams.kafka.group.refusals import explained
from streams.kafka.wire.client import GROUP, WireClient
from streams.kafka.wire.kafka_python import UNKNOWN_MEMBER_ID, BaseCoordinator, LeaveGroupRequest, WakeupNotifier
from streams.kafka.wire.kafka_python import errors as kafka_errors
from streams.kafka.wire.kafka_python_client import KafkaPythonClient, raise_for

log = logging.getLogger(__name__)

_LEAVE_SECONDS = 3.0
"""Seconds for a LeaveGroup under an id that this member had before."""

FATAL = (
    kafka_errors.FencedInstanceIdError,
    kafka_errors.AuthorizationError,
    kafka_errors.SaslAuthenticationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
    kafka_errors.InconsistentGroupProtocolError,
    kafka_errors.InvalidSessionTimeoutError,
    kafka_errors.InvalidGroupIdError,
    kafka_errors.GroupMaxSizeReachedError,
    kafka_errors.UnsupportedVersionError,
)
"""Errors that trying again does not cure."""


class GroupCoordinator(BaseCoordinator):
    """One member of one group on the wire."""

    def __init__(
        self,
        hooks: Hooks,
        client: KafkaPythonClient,
        explain: Callable[[BaseException], StreamsError],
        **settings: Any,
    ) -> None:
        self._hooks, self._explain = hooks, explain
        self._connections = client
        self._closing = False
        self._silent = False
        super().__init__(client.kafka, **settings)

    # ------------------------------------------------------------------ hooks that kafka-python documents

    def protocol_type(self) -> str:
        return "consumer"

    def group_protocols(self) -> list[tuple[str, bytes]]:
        return self._hooks.subscriptions()

    def _perform_assignment(self, leader_id: str, protocol: str, members: Any) -> dict[str, bytes]:
        return self._hooks.lead(protocol, {member.member_id: member.metadata for member in members})

    async def _on_join_complete_async(self, generation: int, member_id: str, protocol: str, data: bytes) -> None:
        self._answers()
        await self._hooks.joined(generation, data)

    # ------------------------------------------------------------------ overridden: the moments that it keeps to itself

    def _process_join_group_response(self, response: Any, send_time: float) -> Any:
        # Each of our joins makes a newer generation. A coordinator that was restarted without its log (Kafka 4.1.1)
        # counts anew: old orders and markers would fit again.
        before = self._generation.generation_id
        answer = super()._process_join_group_response(response, send_time)
        if (
            0 <= self._generation.generation_id <= before
        ):  # a coordinator that went back in time: each of our joins is new
            self.reset_generation(self._generation.member_id)
            raise kafka_errors.UnknownMemberIdError()
        # Before SyncGroup: from this answer on the broker refuses the old generation and takes the new one.
        self._hooks.published(self._generation.generation_id, self._generation.member_id)
        return answer

    def reset_generation(self, member_id: str = UNKNOWN_MEMBER_ID) -> None:
        # Before anything else: what was owned is void, and no transaction may see valid metadata any more.
        former = self._generation
        if former.generation_id >= 0:
            self._hooks.voided("the group does not know this member any more")
            if member_id and member_id == former.member_id:
                # ILLEGAL_GENERATION: kafka-python joins again under the same id. Orders and markers name members by
                # their ids, and a coordinator that lost its memory counts generations anew: old ones would fit again.
                member_id = UNKNOWN_MEMBER_ID
                if self.config["group_instance_id"] is None:
                    self._manager.call_soon(self._leave_as, former.member_id)
        super().reset_generation(member_id)
        self._hooks.woken()

    def request_rejoin(self) -> None:
        super().request_rejoin()
        self._hooks.woken()  # else the main coroutine would find out half a second later

    def need_rejoin(self) -> bool:
        # A join behind our LeaveGroup would bring a member back that does nothing.
        return not self._closing and bool(super().need_rejoin())

    def _handle_heartbeat_response(self, response: Any, send_time: float) -> Any:
        try:
            answer = super()._handle_heartbeat_response(response, send_time)
        except (kafka_errors.FencedInstanceIdError, kafka_errors.GroupAuthorizationFailedError) as error:
            self._hooks.fatal(self._explain(error))  # kafka-python 3.0 logs it, stops heartbeating and stays "stable"
            raise
        self._answers()
        return answer

    async def maybe_leave_group_async(self, reason: str | None = None, timeout_ms: float | None = None) -> None:
        # Called by kafka-python when there was no poll for the rebalance timeout. It sends LeaveGroup and resets the
        # generation afterwards, so everything is voided before.
        reason = reason or "no progress for the rebalance timeout"
        self._hooks.voided(reason)
        await super().maybe_leave_group_async(reason, timeout_ms)

    async def _send_heartbeat_request(self) -> Any:
        # A broker that keeps the connection and does not answer (frozen, cut off) would stop heartbeats for the whole
        # request timeout. After a session without an answer the connection is closed, and the coordinator looked for.
        node, patience = self.coordinator_id, self.config["session_timeout_ms"]
        try:
            return await self._manager.wait_for(self._manager.call_soon(super()._send_heartbeat_request), patience)
        except kafka_errors.KafkaTimeoutError:
            self.coordinator_dead("no answer to a heartbeat for a session timeout")
            if node is not None:
                self._client.close(node)
            raise

    def coordinator_dead(self, error: Any) -> None:
        if self.coordinator_id is not None and not self._silent and not self._closing:
            self._silent = True
            log.warning("group %s: its coordinator does not answer (%s); looking for it", self.group_id, error)
        super().coordinator_dead(error)

    # ------------------------------------------------------------------ ours

    async def _leave_as(self, member_id: str) -> None:
        """Leave the group as this id, or the other members would wait for it until its session is over."""
        with contextlib.suppress(kafka_errors.KafkaError):
            await _leave_group(self._connections, self.group_id, member_id, None, time.monotonic() + _LEAVE_SECONDS)

    def _answers(self) -> None:
        if self._silent:
            self._silent = False
            log.info("group %s: its coordinator answers again", self.group_id)

    @property
    def member_id(self) -> str:
        """Member id from the broker, empty before the first answer."""
        member_id: str = self._generation.member_id
        return member_id

    def stop(self) -> None:
        """End joining and heartbeats."""
        self._closing = True
        self._close_heartbeat()


async def _leave_group(
    client: KafkaPythonClient, group_id: str, member_id: str, instance: str | None, deadline: float
) -> None:
    """Take a member out of the group: by its id, or a static one by its instance."""
    # Not on the connection that the coordinator client has of its own: a JoinGroup that waits there would hold this up.
    node = await client.coordinator(GROUP, group_id, deadline)
    leaver = LeaveGroupRequest.MemberIdentity(member_id=member_id, group_instance_id=instance)
    request = LeaveGroupRequest(group_id=group_id, member_id=member_id, members=[leaver])
    answer = await client.send(request, node, deadline)
    raise_for(answer.error_code)
    for member in answer.members:
        if member.error_code != kafka_errors.UnknownMemberIdError.errno:
            raise_for(member.error_code)


class KafkaPythonLink:
    """One member's client (``link.Link``) over kafka-python. ``questions``: that of the take-over, which starts with it
    and ends with it."""

    def __init__(self, client: KafkaPythonClient, settings: GroupSettings, questions: WireClient) -> None:
        self._client, self._settings, self._questions = client, settings, questions
        self._coordinator: GroupCoordinator | None = None
        self._hooks: Hooks | None = None

    @property
    def member_id(self) -> str:
        """See ``link.Link``, also for all others."""
        return "" if self._coordinator is None else self._coordinator.member_id

    def start(self, hooks: Hooks, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._hooks = hooks
        self._client.net.on_crash = self._crashed
        self._questions.start()
        self._client.start()
        self._client.post(main)

    def _crashed(self, error: BaseException) -> None:
        assert self._hooks is not None
        group = f"group {self._settings.group_id}"
        self._hooks.fatal(MembershipFatal(f"{group}: the thread of the membership failed: {error!r}"))

    def post(self, work: Callable[[], Any]) -> bool:
        return self._client.post(work)

    def call(self, work: Callable[[], Coroutine[Any, Any, None]], deadline: float) -> None:
        self._client.call(work, deadline)

    def close(self, timeout_seconds: float) -> None:
        self._questions.close(timeout_seconds)
        self._client.close(timeout_seconds)

    def now(self) -> float:
        return time.monotonic()

    def notifier(self) -> Notifier:
        made: Notifier = WakeupNotifier(self._client.net)
        return made

    async def sleep(self, seconds: float) -> None:
        await self._client.net.sleep(seconds)

    async def connected(self) -> None:
        await self._client.connected()
        assert self._hooks is not None
        settings = self._settings
        self._coordinator = GroupCoordinator(
            self._hooks,
            self._client,
            self._explained,
            api_version=self._client.manager.broker_version,
            group_id=settings.group_id,
            group_instance_id=settings.static_id,
            session_timeout_ms=settings.session_timeout_ms,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            max_poll_interval_ms=settings.rebalance_timeout_ms,
        )

    async def ensure_joined(self) -> None:
        # Without ``poll_heartbeat`` kafka-python leaves the group after the rebalance timeout.
        assert self._coordinator is not None
        try:
            await self._coordinator.ensure_active_group_async(timeout_ms=None)
            self._coordinator.poll_heartbeat()
        except kafka_errors.InconsistentGroupProtocolError as error:
            raise NoCommonStrategy from error
        except FATAL as error:
            raise self._explained(error) from error
        except kafka_errors.KafkaError as error:
            raise CannotJoinYet(type(error).__name__, is_outage=error.retriable) from error

    def _explained(self, error: BaseException) -> StreamsError:
        settings = self._settings
        needed = [permissions.on_group("Read", settings.group_id)]
        translated = self._client.translated(error, f"joining group {settings.group_id}", needed)
        code = getattr(error, "message", "") or repr(error)
        return explained(code, settings.group_id, settings.instance, translated)

    def request_rejoin(self) -> None:
        if self._coordinator is not None:
            self._coordinator.request_rejoin()

    def stop(self) -> None:
        if self._coordinator is not None:
            self._coordinator.stop()

    async def leave(self, member_id: str, deadline: float) -> None:
        await _leave_group(self._client, self._settings.group_id, member_id, self._settings.static_id, deadline)
