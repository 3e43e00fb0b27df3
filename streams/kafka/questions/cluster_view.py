"""A cluster as its brokers describe it: who they are, their versions and settings, and the time by their clock."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

import confluent_kafka
import msgspec

from streams.kafka import permissions
from streams.kafka.permissions import Right
from streams.kafka.questions.asking import Questions
from streams.kafka.questions.open_transactions import describe_transaction
from streams.kafka.wire.kafka_python import (
    DescribeConfigsRequest,
    DescribeGroupsRequest,
    DescribeQuorumRequest,
    MetadataRequest,
)
from streams.kafka.wire.kafka_python import errors as kafka_errors
from streams.kafka.wire.kafka_python_client import GROUP, KafkaPythonClient, raise_for

_BROKER: Final = 4
"""Kafka's number for settings of brokers."""
_CLOSE_SECONDS: Final = 2.0
"""Seconds for the end of the thread and its connections."""


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


_OPERATIONS: Final = {"Read": 3, "Write": 4, "Create": 5, "Describe": 8, "DescribeConfigs": 10}
"""Numbers of the operations in the protocol."""


class ClusterQuestions(Questions):
    """Requests about one cluster. ``security`` are kafka-python settings. Blocks; making one starts a thread.
    ``with ClusterQuestions(...) as questions``."""

    def __init__(self, bootstrap_servers: str, security: Mapping[str, Any]) -> None:
        client = KafkaPythonClient(bootstrap_servers, "kes-cli", security)
        client.start()
        super().__init__(client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close(_CLOSE_SECONDS)

    def brokers(self, deadline: float) -> list[BrokerView]:
        """The brokers of the cluster. Raises ``BrokerUnavailable`` when none answers."""

        async def work() -> list[BrokerView]:
            await self._connected(deadline)
            versions, _ = await self._each_broker("asking the brokers", deadline, self._version_of)
            return [
                BrokerView(broker.node_id, broker.host, broker.port, versions.get(broker.node_id, ""))
                for broker in sorted(self._client.manager.cluster.brokers(), key=lambda broker: broker.node_id)
            ]

        return self._client.call(work, deadline)

    def settings(self, number: int, names: list[str], deadline: float) -> dict[str, str]:
        """These settings of a broker. Raises ``ConfigError`` without the right to see them."""
        resource = DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=_BROKER, resource_name=str(number), configuration_keys=names
        )
        request = DescribeConfigsRequest(resources=[resource], include_synonyms=False, include_documentation=False)

        async def attempt(limit: float) -> dict[str, str]:
            [result] = (await self._client.send(request, number, limit)).results
            raise_for(result.error_code)
            return {entry.name: entry.value for entry in result.configs if entry.value is not None}

        step = f"reading the settings of broker {number}"
        return self._ask(step, deadline, attempt, [permissions.on_cluster("DescribeConfigs")])

    def clock(self, deadline: float) -> ClockView:
        """Compare the clock of the active controller with ours. Raises ``ConfigError`` without the right to describe
        the cluster, and for a cluster that is too old."""
        topic_of = DescribeQuorumRequest.TopicData
        topic = topic_of(topic_name="__cluster_metadata", partitions=[topic_of.PartitionData(partition_index=0)])
        request = DescribeQuorumRequest(topics=[topic], min_version=1)

        async def attempt(limit: float) -> ClockView:
            before = time.time()
            answer = await self._client.send(request, None, limit)
            after = time.time()
            raise_for(answer.error_code)
            partition = answer.topics[0].partitions[0]
            raise_for(partition.error_code)
            # No request asks for the time. But the controller tells when each voter was caught up with it, by its own
            # clock, and it is always caught up with itself: that is now.
            [theirs] = [
                voter.last_caught_up_timestamp / 1000
                for voter in partition.current_voters
                if voter.replica_id == partition.leader_id
            ]
            # It looked at its clock at some time between request and answer: at half of it, give or take that half.
            return ClockView(theirs - (before + after) / 2, (after - before) / 2)

        return self._ask("asking for the time", deadline, attempt, [permissions.on_cluster("Describe")])

    def lacking(self, rights: list[Right], deadline: float) -> list[Right]:
        """Return those of these rights that this principal lacks, as far as the cluster tells: for topics that exist,
        and for groups. Of a transactional id only the right to describe it can be seen, which Write includes."""

        async def work() -> list[Right]:
            await self._connected(deadline)
            step = "asking for rights"
            return [
                right
                for right in rights
                if await self._until(deadline, step, functools.partial(self._is_lacking, right))
            ]

        return self._client.call(work, deadline)

    async def _is_lacking(self, right: Right, deadline: float) -> bool:
        try:
            allowed = await self._allowed(right, deadline)
        except kafka_errors.AuthorizationError:
            return True
        return allowed is not None and _OPERATIONS[right.operation] not in allowed

    async def _allowed(self, right: Right, deadline: float) -> set[int] | None:
        """Return the numbers of the operations; ``None``: not known. Raises for one that may not even look."""
        if right.kind == permissions.TOPIC:
            request = MetadataRequest(
                topics=[MetadataRequest.MetadataRequestTopic(name=right.name)],
                allow_auto_topic_creation=False,
                include_cluster_authorized_operations=False,
                include_topic_authorized_operations=True,
                min_version=10,
            )
            topic = (await self._client.send(request, None, deadline)).topics[0]
            if topic.error_code == kafka_errors.UnknownTopicOrPartitionError.errno:
                return None  # rights on a topic that is still to be made are not shown
            raise_for(topic.error_code)
            found: set[int] | None = topic.authorized_operations
            return found
        if right.kind == permissions.GROUP:
            node = await self._client.coordinator(GROUP, right.name, deadline)
            asked = DescribeGroupsRequest(
                groups=[right.name], include_authorized_operations=True, min_version=3, max_version=5
            )
            group = (await self._client.send(asked, node, deadline)).groups[0]
            raise_for(group.error_code)
            found = group.authorized_operations
            return found
        await describe_transaction(self._client, right.name, deadline)
        return None

    async def _version_of(self, number: int, deadline: float) -> str:
        connection = await self._client.manager.get_connection(number)
        return ".".join(map(str, connection.broker_version or ()))
