"""kafka-python's group coordinator client with our payload: the hooks it offers, and the four it does not offer.

Join, sync, heartbeat, retries and moves of the coordinator are kafka-python's. Everything here runs on its IO thread.
The private names that are overridden are why ``kafka-python`` is pinned to one minor version;
``tests/broker/test_membership.py`` fails when one of them moves.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, Protocol

from streams.errors import ConfigError, MembershipFatal, StreamsError
from streams.kafka import permissions
from streams.kafka.wire.client import GROUP
from streams.kafka.wire.kafka_python import UNKNOWN_MEMBER_ID, BaseCoordinator, LeaveGroupRequest
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


class Hooks(Protocol):
    """Calls of the coordinator client to the membership. All on the IO thread."""

    def subscriptions(self) -> list[tuple[str, bytes]]:
        """Return (protocol, bytes) for the next JoinGroup, the preferred protocol first."""
        ...

    def lead(self, protocol: str, members: dict[str, bytes]) -> dict[str, bytes]:
        """Assign as leader: member id -> subscription to member id -> assignment, by the protocol chosen. Heartbeats
        wait for it."""
        ...

    def published(self, generation: int, member_id: str) -> None:
        """Take the JoinGroup answer: this generation is valid for commits from now on."""
        ...

    async def joined(self, generation: int, data: bytes) -> None:
        """Apply the assignment of a complete rebalance. Heartbeats go on meanwhile."""
        ...

    def voided(self, reason: str) -> None:
        """Void the membership: nothing that was owned is owned any more."""
        ...

    def woken(self) -> None:
        """Wake the main coroutine: it has something to do."""
        ...

    def fatal(self, error: BaseException) -> None:
        """End the membership: the group refuses this member."""
        ...


class GroupCoordinator(BaseCoordinator):
    """One member of one group on the wire."""

    def __init__(self, hooks: Hooks, client: KafkaPythonClient, **settings: Any) -> None:
        self._hooks = hooks
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
            self._hooks.fatal(error)  # kafka-python 3.0 logs it, stops heartbeating and stays "stable"
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
            await leave_group(self._connections, self.group_id, member_id, None, time.monotonic() + _LEAVE_SECONDS)

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


async def leave_group(
    client: KafkaPythonClient, group_id: str, member_id: str, instance: str | None, deadline: float
) -> None:
    """Take a member out of the group: by its id, or a static one by its instance. On the IO thread."""
    # Not on the connection that the coordinator client has of its own: a JoinGroup that waits there would hold this up.
    node = await client.coordinator(GROUP, group_id, deadline)
    leaver = LeaveGroupRequest.MemberIdentity(member_id=member_id, group_instance_id=instance)
    request = LeaveGroupRequest(group_id=group_id, member_id=member_id, members=[leaver])
    answer = await client.send(request, node, deadline)
    raise_for(answer.error_code)
    for member in answer.members:
        if member.error_code != kafka_errors.UnknownMemberIdError.errno:
            raise_for(member.error_code)


def explained(
    error: BaseException, client: KafkaPythonClient, group_id: str, instance: str, strategies: tuple[str, ...]
) -> StreamsError:
    """Translate one of ``FATAL``: the message names the refusal and the remedy."""
    group = f"group {group_id}"
    common = refused(getattr(error, "message", ""), group_id, instance)
    if common is not None:
        return common
    if isinstance(error, kafka_errors.InconsistentGroupProtocolError):
        ours = ", ".join(strategies)
        return MembershipFatal(
            f"{group}: no strategy of this member ({ours}) is known to all members of the running group. To change the "
            "strategy of a running group, give all members both strategies, the new one first, and restart them one by "
            "one; then restart them one by one without the old one. A group with members of something else than this "
            "toolkit cannot be joined: use another group id"
        )
    translated = client.translated(error, f"joining {group}", [permissions.on_group("Read", group_id)])
    return translated if isinstance(translated, ConfigError) else MembershipFatal(f"{group}: {error!r}")


def refused(code: str, group_id: str, instance: str) -> StreamsError | None:
    """Translate a refusal that any member may get, by its name in the protocol. ``None``: another error."""
    group = f"group {group_id}"
    match code:
        case "FENCED_INSTANCE_ID":
            return MembershipFatal(f"{group}: another process joined as instance {instance!r}; this one has to stop")
        case "INVALID_SESSION_TIMEOUT":
            return ConfigError(
                f"{group}: the broker refuses the session timeout; it must be within the broker's "
                "group.min.session.timeout.ms (6000 unless set) and group.max.session.timeout.ms"
            )
        case "GROUP_MAX_SIZE_REACHED":
            return MembershipFatal(f"{group}: it is full (the broker's group.max.size)")
        case "INVALID_GROUP_ID":
            return ConfigError(f"{group}: the broker refuses this group id")
        case _:
            return None


def name_taken(group_id: str, instance: str) -> MembershipFatal:
    """Make the error for another member with this instance name that does not go away."""
    return MembershipFatal(
        f"group {group_id}: another member is named {instance!r}; each process needs an instance name of its own"
    )


def not_understood(group_id: str, error: ValueError) -> MembershipFatal:
    """Make the error for assignments that are not this toolkit's, or are for other settings."""
    return MembershipFatal(
        f"group {group_id}: its leader's assignments are not understood ({error}); all members must run this toolkit "
        "with the same topic and number of partitions. A group that the broker shares out (KIP-848) has to be empty "
        "first, or use another group id"
    )
