"""A group whose members are librdkafka's: its settings, its members, and the questions of a take-over.

librdkafka's members carry no data of ours, so no assignment names the other members. Their client id is their
instance name instead (that of the toolkit's own members is too), and the coordinator lists the members.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec
from confluent_kafka import KafkaError

from streams.errors import BrokerUnavailable, ConfigError, MembershipFatal, StreamsError
from streams.kafka import permissions
from streams.kafka.connection import ConnectionLog
from streams.kafka.group.refusals import refused
from streams.kafka.permissions import denied, is_denial
from streams.kafka.questions.groups import describe_group
from streams.kafka.questions.requests import only
from streams.kafka.questions.takeover import WireTakeOver
from streams.kafka.wire import group_bytes
from streams.kafka.wire.codes import BrokerRefusal, Code, raise_for
from streams.kafka.wire.schemas.describe_configs import DescribeConfigsRequest

log = logging.getLogger(__name__)

_GROUP_RESOURCE = 32  # Kafka's number for the settings of groups


class RosterMember(msgspec.Struct, frozen=True):
    """One member as the coordinator knows it. ``client_id`` is its instance name, if it is a member of ours."""

    member_id: str
    client_id: str
    static_id: str | None


class Roster(msgspec.Struct, frozen=True):
    """The members of a group at one moment. ``kind``: ``classic``, ``consumer`` (KIP-848), or ``none``: no such group,
    or no member in it. ``protocol``: the assignor that they share, empty while they agree on it."""

    kind: str = "none"
    protocol: str = ""
    members: tuple[RosterMember, ...] = ()

    @property
    def instances(self) -> frozenset[str]:
        """The instance names of all members, foreign ones as they call themselves."""
        return frozenset(member.client_id for member in self.members)

    def rivals(self, instance: str, member_id: str) -> list[RosterMember]:
        """Other members of the same instance name."""
        return [member for member in self.members if member.client_id == instance and member.member_id != member_id]


class RosterTakeOver(WireTakeOver):
    """The questions of a take-over, in a group whose assignments do not name the members.

    ``member_id``: gives this member's own id at the moment, empty when it is none.
    """

    member_id: Callable[[], str] = str

    async def _present(self, members: Collection[str], deadline: float) -> frozenset[str]:
        """List the group's instances by the coordinator; ``members`` is ignored. ``BrokerUnavailable``: this member is
        not on the list. Then nothing is fenced, and the take-over is tried again."""
        # After the open transactions, so that no live member is fenced. An instance with a transaction open when they
        # were listed, and still at work, was a member before, and is one still. If it left in between, it has settled
        # all it had; if it was evicted, its transaction is to be ended. One that joins in between has none listed.
        roster = await self._roster(deadline)
        own = self.member_id()
        # Without ourselves the list is not complete: a restarted coordinator may have loaded a part of its log only
        # (Kafka 4.1.1).
        if own not in {member.member_id for member in roster.members}:
            raise BrokerUnavailable(
                f"group {self._group_id}: the coordinator's list of members does not have this member "
                f"({own or 'none at the moment'}); no member is fenced by it"
            )
        return roster.instances

    def roster(self, deadline: float) -> Roster:
        """List the members of the group. ``ConfigError`` without the right to describe it. The caller has to log an
        outage: the client does not, however long it lasts."""

        async def work() -> Roster:
            await self._client.connected(deadline, quiet=True)
            return await self._roster(deadline)

        return self._client.call(work, deadline)

    def group_settings(self, deadline: float) -> dict[str, str]:
        """Return the broker's settings for this group (``consumer.session.timeout.ms`` ...), empty if it refuses to
        describe them. The caller has to log an outage, as with ``roster``."""

        async def attempt() -> dict[str, str]:
            resource = DescribeConfigsRequest.DescribeConfigsResource(
                resource_type=_GROUP_RESOURCE, resource_name=self._group_id, configuration_keys=None
            )
            request = DescribeConfigsRequest(resources=[resource])
            answer = await self._client.send(request, None, deadline, least=1)
            result = only(answer.results, f"group {self._group_id}")
            try:
                raise_for(result.error_code)
            except BrokerRefusal as refusal:
                if not (is_denial(refusal.name) or refusal.code == Code.INVALID_REQUEST):
                    raise
                log.info("group %s: the broker does not report its settings (%s)", self._group_id, refusal)
                return {}
            return {entry.name: entry.value for entry in result.configs if entry.value is not None}

        return self._client.ask(f"reading the settings of group {self._group_id}", deadline, attempt, quiet=True)

    # ------------------------------------------------------------------ the client's loop

    async def _roster(self, deadline: float) -> Roster:
        step = f"asking for the members of group {self._group_id}"
        needed = [permissions.on_group("Describe", self._group_id)]
        return await self._until(deadline, step, self._roster_once, needed)

    async def _roster_once(self, deadline: float) -> Roster:
        classic, broker_side = await describe_group(self._client, self._group_id, deadline)
        if classic is not None and classic.members:
            members = tuple(RosterMember(m.member_id, m.client_id, m.group_instance_id) for m in classic.members)
            return Roster("classic", classic.protocol_data, members)
        if broker_side is not None and broker_side.members:
            members = tuple(RosterMember(m.member_id, m.client_id, m.instance_id) for m in broker_side.members)
            return Roster("consumer", broker_side.assignor_name, members)
        return Roster()


class GroupLog(ConnectionLog):
    """Remembers a fatal error: librdkafka reports it in several places, in each of them once."""

    fatal: KafkaError | None = None

    def on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self.fatal = self.fatal or error
        else:
            super().on_error(error)


class Term:
    """One Consumer, from its subscription to its end. ``held``: what librdkafka believes the group gave it."""

    def __init__(self, consumer: Any, log: GroupLog) -> None:
        self.consumer, self.log = consumer, log
        self.held: frozenset[int] = frozenset()
        self.over = False
        self.unsubscribed = False
        self.stale_since: float | None = None  # the membership was found void; ``held`` has still to be given up

    @property
    def is_stale(self) -> bool:
        """Check whether librdkafka still holds what the membership has lost."""
        return self.stale_since is not None

    @property
    def reason(self) -> str:
        """Reason of the loss of the membership, as far as it is known."""
        if self.log.down:
            return f"the coordinator did not answer for a session timeout ({self.log.reason})"
        return "the group does not know this member any more"

    def metadata(self) -> group_bytes.Metadata:
        """The group metadata now. 5 us, and a question to librdkafka's main thread."""
        return group_bytes.parse_metadata(self.consumer.consumer_group_metadata())


_FATAL: Final = (
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.UNRELEASED_INSTANCE_ID,
    KafkaError.GROUP_ID_NOT_FOUND,
    KafkaError.UNSUPPORTED_ASSIGNOR,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError._UNSUPPORTED_FEATURE,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_MAX_SIZE_REACHED,
)


def name_of(error: KafkaError) -> str:
    """Return the name of an error. The error that ended a Consumer comes as ``_FATAL``, with its description in the
    text."""
    if error.code() == KafkaError._FATAL:
        for code in _FATAL:
            if KafkaError(code).str() in error.str():
                return KafkaError(code).name()
    return error.name()


def explained(code: str, text: str, group_id: str, instance: str, topic: str) -> StreamsError | None:
    """Translate an error of librdkafka's group membership by its name. ``None``: it passes."""
    group = f"group {group_id}"
    match code:
        case "UNRELEASED_INSTANCE_ID":
            return MembershipFatal(
                f"{group}: another member is static instance {instance!r}; each process needs an instance name of its "
                "own (one that was killed is in the group until its session expires)"
            )
        case "INCONSISTENT_GROUP_PROTOCOL":
            return MembershipFatal(
                f"{group}: its members use another membership or strategy; stop all of them before changing it, or "
                "use a group id of its own"
            )
        case "UNSUPPORTED_ASSIGNOR":
            return ConfigError(f"{group}: the broker has no such assignor ({text}); see its group.consumer.assignors")
        case "UNSUPPORTED_VERSION" | "_UNSUPPORTED_FEATURE":
            return ConfigError(f"{group}: the broker is too old for this membership ({text}); KIP-848 needs Kafka 4.0")
        case "GROUP_AUTHORIZATION_FAILED" | "TOPIC_AUTHORIZATION_FAILED":
            needed = permissions.on_group("Read", group_id), permissions.on_topic("Describe", topic)
            return ConfigError(f"joining {group}: {denied(code, needed)}")
        case _:
            return refused(code, group_id, instance)
