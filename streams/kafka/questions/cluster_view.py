"""A cluster as its brokers describe it: who they are, their versions and settings, and the time by their clock."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Final, NamedTuple, Self

import confluent_kafka
import msgspec

from streams.kafka import permissions
from streams.kafka.permissions import Right
from streams.kafka.questions.asking import Questions
from streams.kafka.questions.groups import DESCRIBE_GROUPS
from streams.kafka.questions.requests import describe_transaction
from streams.kafka.wire.client import GROUP, WireClient
from streams.kafka.wire.codes import BrokerRefusal, Code, raise_for
from streams.kafka.wire.schemas.api_versions import ApiVersionsRequest
from streams.kafka.wire.schemas.describe_configs import DescribeConfigsRequest
from streams.kafka.wire.schemas.describe_groups import DescribeGroupsRequest
from streams.kafka.wire.schemas.describe_quorum import DescribeQuorumRequest
from streams.kafka.wire.security import Security
from streams.kafka.wire.topic_questions import metadata, only

_BROKER: Final = 4
"""Kafka's number for settings of brokers."""


def librdkafka_version() -> str:
    """Return the version of librdkafka that is loaded."""
    text: str = confluent_kafka.libversion()[0]
    return text


class BrokerView(msgspec.Struct, frozen=True):
    """A broker, at the address that it gives to clients. ``version``: the newest Kafka that has all of its requests;
    ``""``: it did not answer."""

    number: int
    host: str
    port: int
    version: str


class ClockView(NamedTuple):
    """The controller's clock minus ours, in seconds, and by how much that may be wrong."""

    ahead: float
    uncertainty: float


_QUORUM: Final = "__cluster_metadata"
_WITH_RIGHTS: Final = 3
"""The first version of DescribeGroups that tells rights."""
_WITH_TIMES: Final = 1
"""The first version of DescribeQuorum that tells when a voter was caught up."""
_BEGAN_WITH: Final = {
    "4.3": (35, 5),
    "4.2": (2, 11),
    "4.1": (0, 13),
    "4.0": (2, 10),
    "3.9": (1, 17),
    "3.8": (0, 11),
    "3.7": (1, 16),
    "3.6": (24, 4),
    "3.5": (1, 15),
    "3.3": (29, 3),
    "3.2": (11, 9),
    "3.1": (1, 13),
    "3.0": (2, 7),
    "2.8": (0, 9),
}
"""The first Kafka that had a version of a request, by the request's key. (3.4 had none of its own that it tells.)"""
_OLDEST: Final = "2.7"
_WHO_ASKS: Final = ApiVersionsRequest(client_software_name="kafka-event-source", client_software_version="1")
_OPERATIONS: Final = {"Read": 3, "Write": 4, "Create": 5, "Describe": 8, "DescribeConfigs": 10}
"""Numbers of the operations in the protocol."""


class ClusterQuestions(Questions):
    """Requests about one cluster. Blocks; making one starts a thread. ``with ClusterQuestions(...) as questions``."""

    def __init__(self, bootstrap_servers: str, security: Security) -> None:
        client = WireClient(bootstrap_servers, "kes-cli", security)
        client.start()
        super().__init__(client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def brokers(self, deadline: float) -> list[BrokerView]:
        """The brokers of the cluster. Raises ``BrokerUnavailable`` when none answers."""

        async def work() -> list[BrokerView]:
            versions, _ = await self._each_broker("asking the brokers", deadline, self._version_of)
            found = sorted(self._client.brokers().items())
            return [BrokerView(number, host, port, versions.get(number, "")) for number, (host, port) in found]

        return self._run(deadline, work)

    def settings(self, number: int, names: list[str], deadline: float) -> dict[str, str]:
        """These settings of a broker. Raises ``ConfigError`` without the right to see them."""
        resource = DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=_BROKER, resource_name=str(number), configuration_keys=names
        )
        request = DescribeConfigsRequest(resources=[resource])

        async def attempt(limit: float) -> dict[str, str]:
            result = only((await self._client.send(request, number, limit)).results, f"broker {number}")
            raise_for(result.error_code)
            return {entry.name: entry.value for entry in result.configs if entry.value is not None}

        step = f"reading the settings of broker {number}"
        return self._ask(step, deadline, attempt, [permissions.on_cluster("DescribeConfigs")])

    def clock(self, deadline: float) -> ClockView:
        """Compare the clock of the active controller with ours. Raises ``ConfigError`` without the right to describe
        the cluster, and for a cluster that is too old."""
        topic_of = DescribeQuorumRequest.TopicData
        topic = topic_of(topic_name=_QUORUM, partitions=[topic_of.PartitionData(partition_index=0)])
        request = DescribeQuorumRequest(topics=[topic])

        async def attempt(limit: float) -> ClockView:
            before = time.time()
            answer = await self._client.send(request, None, limit, least=_WITH_TIMES)
            after = time.time()
            raise_for(answer.error_code)
            partition = only([entry for each in answer.topics for entry in each.partitions], _QUORUM)
            raise_for(partition.error_code)
            # No request asks for the time. But the controller tells when each voter was caught up with it, by its own
            # clock, and it is always caught up with itself: that is now.
            voters = [voter for voter in partition.current_voters if voter.replica_id == partition.leader_id]
            theirs = only(voters, "the controller").last_caught_up_timestamp / 1000
            # It looked at its clock at some time between request and answer: at half of it, give or take that half.
            return ClockView(theirs - (before + after) / 2, (after - before) / 2)

        return self._ask("asking for the time", deadline, attempt, [permissions.on_cluster("Describe")])

    def lacking(self, rights: list[Right], deadline: float) -> list[Right]:
        """Return those of these rights that this principal lacks, as far as the cluster tells: for topics that exist,
        and for groups. Of a transactional id only the right to describe it can be seen, which Write includes."""

        async def work() -> list[Right]:
            step = "asking for rights"
            return [
                right
                for right in rights
                if await self._until(deadline, step, functools.partial(self._is_lacking, right))
            ]

        return self._run(deadline, work)

    async def _is_lacking(self, right: Right, deadline: float) -> bool:
        try:
            allowed = await self._allowed(right, deadline)
        except BrokerRefusal as refusal:
            if not permissions.is_denial(refusal.name):
                raise
            return True
        return allowed is not None and not allowed & 1 << _OPERATIONS[right.operation]

    async def _allowed(self, right: Right, deadline: float) -> int | None:
        """Return a bit for each operation, by its number; ``None``: not known. Raises for one that may not even
        look."""
        if right.kind == permissions.TOPIC:
            found = await metadata(self._client, [right.name], deadline, with_rights=True)
            topic = only(found.topics, f"topic {right.name}")
            if topic.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION:
                return None  # rights on a topic that is still to be made are not shown
            raise_for(topic.error_code)
            return topic.topic_authorized_operations
        if right.kind == permissions.GROUP:
            node = await self._client.coordinator(GROUP, right.name, deadline)
            request = DescribeGroupsRequest(groups=[right.name], include_authorized_operations=True)
            answer = await self._client.send(request, node, deadline, least=_WITH_RIGHTS, most=DESCRIBE_GROUPS)
            group = only(answer.groups, f"group {right.name}")
            raise_for(group.error_code)
            return group.authorized_operations
        await describe_transaction(self._client, right.name, deadline)
        return None

    async def _version_of(self, number: int, deadline: float) -> str:
        answer = await self._client.send(_WHO_ASKS, number, deadline)
        raise_for(answer.error_code)
        return kafka_version({entry.api_key: entry.max_version for entry in answer.api_keys})


def kafka_version(newest: Mapping[int, int]) -> str:
    """Return the newest Kafka that has all of a broker's requests; ``newest``: their versions by key."""
    found = (version for version, (key, number) in _BEGAN_WITH.items() if newest.get(key, -1) >= number)
    return next(found, _OLDEST)
