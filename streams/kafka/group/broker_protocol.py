"""One member of a group that the broker shares out (KIP-848): ConsumerGroupHeartbeat, and nothing else.

A member joins with epoch 0. The answers name its partitions, and each heartbeat names those that it owns. That is the
acknowledgement: a partition that was taken away is another member's once a heartbeat comes without it. So every
heartbeat is a full one, and lost requests and answers cost time only. What an answer means is in ``broker_answers``.

The member chooses its id, a new one after each loss: the broker takes epochs of the present life of an id.
"""

from __future__ import annotations

import uuid
from typing import Final, Protocol
from uuid import UUID

from streams.errors import ConfigError, StreamsError
from streams.kafka import permissions
from streams.kafka.group import broker_answers, refusals
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.join_answers import GroupRequest, JoinStep
from streams.kafka.group.join_protocol import Halted, JoinProtocol
from streams.kafka.group.link import CannotJoinYet, Hooks, Notifier
from streams.kafka.group.locating import LOCATE_SECONDS
from streams.kafka.wire import group_bytes
from streams.kafka.wire.client import GROUP, WireClient
from streams.kafka.wire.codes import BrokerRefusal, Code, raise_for
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.schemas.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from streams.kafka.wire.topic_questions import metadata, only

_JOIN, _LEAVE, _STEP_OUT = 0, -1, -2
"""In the place of an epoch: join; leave for good; leave, and keep the place of a static name for a session."""
_GONE: Final = (Code.UNKNOWN_MEMBER_ID, Code.GROUP_ID_NOT_FOUND, Code.FENCED_INSTANCE_ID)
_SESSION_SECONDS: Final = 45.0
"""The broker's default session, until the group's is known."""


class NameHeld(CannotJoinYet):
    """A member has the static name. It may be what a kill left of a predecessor."""


class BrokerHooks(Hooks, Protocol):
    """Calls to the membership, in place of ``subscriptions``, ``lead`` and ``joined``."""

    @property
    def owned(self) -> frozenset[int]:
        """Return the partitions that are not given up, for the next heartbeat."""
        ...

    async def shared_out(self, epoch: int, own: frozenset[int]) -> None:
        """Give up what is not in ``own``, then take what is new."""
        ...


class BrokerProtocol(JoinProtocol):
    """``hooks`` is the membership. On the loop."""

    def __init__(self, hooks: BrokerHooks, client: WireClient, settings: GroupSettings) -> None:
        super().__init__(hooks, client, settings)
        self._membership, self._bell = hooks, Notifier()  # it ends the pause between two heartbeats
        self._session, self._gives_ids_back = _SESSION_SECONDS, True
        self._topic_id = UUID(int=0)
        self._own = self._reported = frozenset[int]()

    def has_session(self, seconds: float) -> None:
        """Note the session timeout of the group, which is the broker's."""
        self._session = seconds

    async def _join(self) -> bytes:
        """Join, unless the member has only been given other partitions. Raises ``Halted``."""
        if self._generation < 0:
            await self._join_anew()
        self._must_join = False
        if self._beats is None:
            self._beats = self._client.spawn(self._beat())
        return b""

    async def _join_anew(self) -> None:
        if self._departure is not None:
            await self._departure  # until then the broker holds the static name, and the partitions
        try:
            await self._line.ready()
        except (LostConnection, BrokerRefusal) as error:
            raise self._halted(GroupRequest.FIND, error) from error
        # Under the same id when it is repeated: the broker may have taken the request whose answer is missing.
        self.member_id = self.member_id or f"{group_bytes.MEMBER_PREFIX}{uuid.uuid4().hex}"
        self._own = frozenset()
        try:
            self._topic_id = await self._find_topic()
            await self._exchange(GroupRequest.JOIN, _JOIN)
        except (LostConnection, BrokerRefusal) as error:
            raise self._halted(GroupRequest.JOIN, error) from error
        self._at_work = self._loop.time()

    async def _apply(self, data: bytes) -> None:
        await self._membership.shared_out(self._generation, self._own)
        if self._membership.owned != self._reported:
            self._bell.notify()  # the others wait for what was given up

    async def _rest(self, seconds: float) -> None:
        await self._bell(seconds)

    async def _beat_once(self) -> None:
        await self._exchange(GroupRequest.HEARTBEAT, self._generation)

    async def _exchange(self, kind: GroupRequest, epoch: int) -> None:
        """Send one heartbeat, and take its answer."""
        # Read once: what is given up while this heartbeat is under way is acknowledged by the next one.
        self._reported = self._membership.owned
        owned = ConsumerGroupHeartbeatRequest.TopicPartitions(
            topic_id=self._topic_id, partitions=sorted(self._reported)
        )
        request = ConsumerGroupHeartbeatRequest(
            group_id=self._settings.group_id,
            member_id=self.member_id,
            member_epoch=epoch,
            instance_id=self._settings.static_id,
            rebalance_timeout_ms=self._settings.rebalance_timeout_ms,
            subscribed_topic_names=[self._settings.topic],
            server_assignor=self._settings.server_assignor,
            topic_partitions=[owned] if self._reported else [],
        )
        answer = await self._line.ask(request, request.LAST_VERSION, self._session)
        self._check(kind, answer.error_code)
        if not epoch <= answer.member_epoch or answer.member_epoch < 1:
            # A coordinator that lost its memory counts from the beginning, and old epochs would fit again under this
            # id. A coordinator that has not decided yet answers so to a join, which is repeated.
            step = JoinStep.LEAVE_AND_JOIN_ANEW if epoch > 0 else JoinStep.WAIT
            raise Halted(step, BrokerRefusal(Code.FENCED_MEMBER_EPOCH))
        self._interval = answer.heartbeat_interval_ms / 1000 or self._interval
        if answer.member_epoch != self._generation:
            self._generation = answer.member_epoch
            self._hooks.published(self._generation, self.member_id)  # the broker refuses the epoch before from now on
        if answer.assignment is not None:
            self._own = await self._partitions(answer.assignment)
            if self._own != self._membership.owned:
                self.request_rejoin()

    async def _partitions(self, assignment: ConsumerGroupHeartbeatResponse.Assignment) -> frozenset[int]:
        given = {each.topic_id: frozenset(each.partitions) for each in assignment.topic_partitions}
        if given.keys() - {self._topic_id}:
            found = await self._find_topic()
            if found != self._topic_id and self._membership.owned:
                # The topic was deleted and made again: the partitions that are owned are not its partitions.
                raise Halted(JoinStep.LEAVE_AND_JOIN_ANEW, BrokerRefusal(Code.INCONSISTENT_TOPIC_ID))
            self._topic_id = found
        return given.get(self._topic_id, frozenset())

    async def _find_topic(self) -> UUID:
        topic = self._settings.topic
        found = only((await metadata(self._client, [topic], self._loop.time() + LOCATE_SECONDS)).topics, topic)
        raise_for(found.error_code)
        return found.topic_id

    def _next_step(self, request: GroupRequest, code: int) -> JoinStep:
        if request is GroupRequest.FIND:
            return super()._next_step(request, code)
        return broker_answers.next_step(self._standing, code)

    def _follow(self, halted: Halted) -> None:
        if halted.step is JoinStep.NAME_HELD:
            raise NameHeld(str(halted.error), is_outage=False)
        super()._follow(halted)

    async def leave(self, member_id: str, deadline: float, reason: str = "", *, for_good: bool = True) -> None:
        """Leave the group. ``for_good``: also a static name is free then. Raises ``StreamsError``."""
        settings = self._settings
        if for_good:
            self.member_id = ""  # it has none to leave with any more
        request = ConsumerGroupHeartbeatRequest(
            group_id=settings.group_id,
            member_id=member_id,
            member_epoch=_LEAVE if for_good else _STEP_OUT,
            instance_id=settings.static_id,
        )

        async def attempt() -> None:
            node = await self._client.coordinator(GROUP, settings.group_id, deadline)
            code = (await self._client.send(request, node, deadline)).error_code
            raise_for(0 if code in _GONE else code)

        rights = [permissions.on_group("Read", settings.group_id)]
        await self._client.until(deadline, f"leaving group {settings.group_id}", attempt, rights)

    def _explained(self, error: BrokerRefusal | LostConnection) -> StreamsError:
        group = f"group {self._settings.group_id}"
        match error.name if isinstance(error, BrokerRefusal) else error.code:
            case "UNSUPPORTED_VERSION":
                return ConfigError(
                    f"{group}: the broker has no ConsumerGroupHeartbeat; membership 'broker' (KIP-848) needs Kafka 4.0 "
                    "or newer, with 'consumer' among its group.coordinator.rebalance.protocols"
                )
            case "UNSUPPORTED_ASSIGNOR":
                assignor = self._settings.server_assignor
                return ConfigError(
                    f"{group}: the broker has no assignor {assignor!r}; see its group.consumer.assignors"
                )
            case "TOPIC_AUTHORIZATION_FAILED" as name:
                needed = [permissions.on_topic("Describe", self._settings.topic)]
                return ConfigError(f"joining {group}: {permissions.denied(name, needed)}")
            case name:
                return refusals.explained(
                    name, self._settings.group_id, self._settings.instance, self._translated(error)
                )
