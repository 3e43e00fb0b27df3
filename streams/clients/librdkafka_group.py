"""A group whose members are librdkafka's: its settings, its members, and the questions of a take-over.

librdkafka's members carry no data of ours, so no assignment names the other members. Their client id is their
instance name instead (that of kafka-python members is too), and the coordinator lists the members.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any, Final

import msgspec
from confluent_kafka import KafkaError

from streams.clients.kafka_python import DescribeConfigsRequest, DescribeGroupsRequest, errors
from streams.clients.kafka_python_client import GROUP, raise_for
from streams.clients.takeover import KafkaPythonTakeOver
from streams.errors import BrokerUnavailable, ConfigError, MembershipFatal, StreamsError

log = logging.getLogger(__name__)

_GROUP_RESOURCE = 32
_ApiMessage: Any = import_module("kafka.protocol.api_message").ApiMessage


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


class RosterTakeOver(KafkaPythonTakeOver):
    """The questions of a take-over, in a group whose assignments do not name the members.

    ``member_id``: gives this member's own id at the moment, empty when it is none.
    """

    member_id: Callable[[], str] = str

    async def _present(self, members: Collection[str], deadline: float) -> frozenset[str]:
        """List the group's instances by the coordinator, after the open transactions; ``members`` is ignored.

        In this order, so that no live member is fenced. An instance with a transaction open when they were listed, and
        still at work, was a member before, and is one still; if it left in between, it has settled all it had; if it
        was evicted, its transaction is to be ended. An instance that joins in between is on neither list, or on the
        second one only. The list counts as complete only if this member is on it itself: else
        ``BrokerUnavailable``, nothing is fenced, and the take-over is tried again.
        """
        roster = await self._roster(deadline)
        own = self.member_id()
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
            request = DescribeConfigsRequest(resources=[resource], include_synonyms=False, min_version=1)
            result = (await self._client.send(request, None, deadline)).results[0]
            try:
                raise_for(result.error_code)
            except (errors.AuthorizationError, errors.InvalidRequestError) as refusal:
                log.info("group %s: the broker does not report its settings (%s)", self._group_id, refusal)
                return {}
            return {entry.name: entry.value for entry in result.configs if entry.value is not None}

        async def work() -> dict[str, str]:
            await self._client.connected(deadline, quiet=True)
            return await self._client.until(deadline, f"reading the settings of group {self._group_id}", attempt)

        return self._client.call(work, deadline)

    # ------------------------------------------------------------------ IO thread

    async def _roster(self, deadline: float) -> Roster:
        step = f"asking for the members of group {self._group_id}"
        return await self._until(deadline, step, self._roster_once)

    async def _roster_once(self, deadline: float) -> Roster:
        """Describe the group as both kinds: it is of one kind at a time, and unknown as the other."""
        node = await self._client.coordinator(GROUP, self._group_id, deadline)
        request = DescribeGroupsRequest(groups=[self._group_id], min_version=4, max_version=5)
        group = (await self._client.send(request, node, deadline)).groups[0]
        raise_for(group.error_code)
        if group.members:
            return Roster("classic", group.protocol_data, tuple(_member(m, m.group_instance_id) for m in group.members))
        try:
            answer = await self._client.send(consumer_group_describe(self._group_id), node, deadline)
        except errors.UnsupportedVersionError:
            return Roster()  # a broker without KIP-848
        described = answer.groups[0]
        if described.error_code == errors.GroupIdNotFoundError.errno:
            return Roster()
        raise_for(described.error_code)
        members = tuple(_member(m, m.instance_id) for m in described.members)
        return Roster("consumer", described.assignor_name, members) if members else Roster()


def _member(described: Any, static_id: str | None) -> RosterMember:
    return RosterMember(described.member_id, described.client_id, static_id)


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


def explained(code: str, text: str, group_id: str, instance: str) -> StreamsError | None:
    """Translate an error of librdkafka's group membership by its name. ``None``: it passes."""
    group = f"group {group_id}"
    match code:
        case "FENCED_INSTANCE_ID":
            return MembershipFatal(f"{group}: another process joined as instance {instance!r}; this one has to stop")
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
        case "INVALID_SESSION_TIMEOUT":
            return ConfigError(
                f"{group}: the broker refuses the session timeout; it must be within the broker's "
                "group.min.session.timeout.ms (6000 unless set) and group.max.session.timeout.ms"
            )
        case "UNSUPPORTED_ASSIGNOR":
            return ConfigError(f"{group}: the broker has no such assignor ({text}); see its group.consumer.assignors")
        case "UNSUPPORTED_VERSION" | "_UNSUPPORTED_FEATURE":
            return ConfigError(f"{group}: the broker is too old for this membership ({text}); KIP-848 needs Kafka 4.0")
        case "GROUP_AUTHORIZATION_FAILED" | "TOPIC_AUTHORIZATION_FAILED":
            return ConfigError(f"joining {group}: not authorised ({code}); the principal needs the right in the ACLs")
        case "GROUP_MAX_SIZE_REACHED":
            return MembershipFatal(f"{group}: it is full (the broker's group.max.size)")
        case "INVALID_GROUP_ID":
            return ConfigError(f"{group}: the broker refuses this group id")
        case _:
            return None


# ---------------------------------------------------------------------- API 69, which kafka-python does not have yet

_STRINGS: Final = {"type": "[]string", "versions": "0+"}
_PLACES: Final[list[dict[str, Any]]] = [
    {
        "name": "TopicPartitions",
        "type": "[]TopicPartitions",
        "versions": "0+",
        "fields": [
            {"name": "TopicId", "type": "uuid", "versions": "0+"},
            {"name": "TopicName", "type": "string", "versions": "0+"},
            {"name": "Partitions", "type": "[]int32", "versions": "0+"},
        ],
    }
]


def _text(name: str, *, nullable: bool = False) -> dict[str, Any]:
    field = {"name": name, "type": "string", "versions": "0+"}
    return {**field, "nullableVersions": "0+", "default": "null"} if nullable else field


_REQUEST: Final = {
    "apiKey": 69,
    "type": "request",
    "name": "ConsumerGroupDescribeRequest",
    "validVersions": "0",
    "flexibleVersions": "0+",
    "fields": [
        {"name": "GroupIds", **_STRINGS},
        {"name": "IncludeAuthorizedOperations", "type": "bool", "versions": "0+"},
    ],
}
_RESPONSE: Final = {
    "apiKey": 69,
    "type": "response",
    "name": "ConsumerGroupDescribeResponse",
    "validVersions": "0",
    "flexibleVersions": "0+",
    "fields": [
        {"name": "ThrottleTimeMs", "type": "int32", "versions": "0+"},
        {
            "name": "Groups",
            "type": "[]DescribedGroup",
            "versions": "0+",
            "fields": [
                {"name": "ErrorCode", "type": "int16", "versions": "0+"},
                _text("ErrorMessage", nullable=True),
                _text("GroupId"),
                _text("GroupState"),
                {"name": "GroupEpoch", "type": "int32", "versions": "0+"},
                {"name": "AssignmentEpoch", "type": "int32", "versions": "0+"},
                _text("AssignorName"),
                {
                    "name": "Members",
                    "type": "[]Member",
                    "versions": "0+",
                    "fields": [
                        _text("MemberId"),
                        _text("InstanceId", nullable=True),
                        _text("RackId", nullable=True),
                        {"name": "MemberEpoch", "type": "int32", "versions": "0+"},
                        _text("ClientId"),
                        _text("ClientHost"),
                        {"name": "SubscribedTopicNames", **_STRINGS},
                        _text("SubscribedTopicRegex", nullable=True),
                        {"name": "Assignment", "type": "Assignment", "versions": "0+", "fields": _PLACES},
                        {"name": "TargetAssignment", "type": "Assignment", "versions": "0+", "fields": _PLACES},
                    ],
                },
                {"name": "AuthorizedOperations", "type": "int32", "versions": "0+", "default": "-2147483648"},
            ],
        },
    ],
}


def _message(base_name: str, schema: dict[str, Any]) -> Any:
    """A message class of kafka-python for a schema that it does not ship. It finds schemas by the name of the class,
    and lets the class change what it found."""

    def json_patch(_metaclass: Any, _shipped: Any) -> dict[str, Any]:
        return schema

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # kafka-python's own use of importlib.resources
        return type(_ApiMessage)(base_name, (_ApiMessage,), {"json_patch": classmethod(json_patch)})


_ConsumerGroupDescribeRequest: Any = _message("DescribeGroupsRequest", _REQUEST)
_ConsumerGroupDescribeResponse: Any = _message("DescribeGroupsResponse", _RESPONSE)


def consumer_group_describe(group_id: str) -> Any:
    """The question for a group of the broker-side protocol."""
    return _ConsumerGroupDescribeRequest(group_ids=[group_id], include_authorized_operations=False)
