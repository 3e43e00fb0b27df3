"""The questions to the broker that a take-over asks: ``streams.group.TakeOver`` over kafka-python.

Why not librdkafka: its clients cannot list or fence transactions, wait for stable offsets in steps of 100 to 500 ms,
and one that lived through a broker restart may answer FENCED_LEADER_EPOCH for ever. Here each question asks for the
cluster's metadata first.

Threads: all methods block and may be called from any thread but the client's IO thread, several at once.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Collection
from typing import Any

from streams.clients import group_wire
from streams.clients.group_coordinator import leave_group
from streams.clients.kafka_python import (
    DescribeLogDirsRequest,
    InitProducerIdRequest,
    ListOffsetsRequest,
    ListTransactionsRequest,
    MetadataRequest,
    OffsetFetchRequest,
)
from streams.clients.kafka_python import errors as kafka_errors
from streams.clients.kafka_python_client import GROUP, TRANSACTION, KafkaPythonClient, raise_for
from streams.errors import StreamsError, TopicError
from streams.topics import TopicIdentity

log = logging.getLogger(__name__)

_OPEN = ["Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"]
_EARLIEST, _LATEST = -2, -1
_FENCE_TIMEOUT_MS = 5000  # of the throw-away producer, which never begins a transaction


class KafkaPythonTakeOver:
    """Questions of one group about its source ``topic``, on a client that it shares and does not close."""

    def __init__(self, client: KafkaPythonClient, group_id: str, topic: str) -> None:
        self._client, self._group_id, self._topic = client, group_id, topic

    def fence_departed(self, members: Collection[str], deadline: float) -> list[str]:
        """End open transactions of this group's instances that are not in ``members``; returns their transactional ids.

        Done by a throw-away InitProducerId: it aborts what is open, and fences the producer that held it. Raises
        ``ConfigError`` without the right to describe and write transactional ids.
        """
        present = frozenset(members)

        async def work() -> list[str]:
            await self._client.connected(deadline)
            found = await self._client.until(deadline, "listing transactions", lambda: self._open_ids(deadline))
            owners = {name: group_wire.instance_of(self._group_id, name) for name in found}
            departed = sorted(name for name, owner in owners.items() if owner and owner not in present)
            fencing = [self._client.manager.call_soon(self._fence, name, deadline) for name in departed]
            for fenced in fencing:
                await fenced
            return departed

        return self._client.call(work, deadline)

    def stable_offsets(self, partitions: Collection[int], deadline: float) -> dict[int, int | None]:
        """The group's committed offsets of the source topic, when no commit is pending any more. ``None``: none."""

        async def work() -> dict[int, int | None]:
            await self._client.connected(deadline)
            step = f"reading the offsets of group {self._group_id}"
            return await self._client.until(deadline, step, lambda: self._offsets(sorted(set(partitions)), deadline))

        return self._client.call(work, deadline)

    def log_range(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, tuple[int, int]]:
        """(log start, high watermark) of each partition. ``TopicError`` when one does not exist."""

        async def work() -> dict[int, tuple[int, int]]:
            await self._client.connected(deadline)
            numbers = sorted(set(partitions))
            return await self._client.until(
                deadline, f"reading the offsets of topic {topic}", lambda: self._range(topic, numbers, deadline)
            )

        return self._client.call(work, deadline)

    def identity(self, topic: str, deadline: float) -> TopicIdentity:
        """The topic's id and number of partitions. ``TopicError`` when it did not exist until ``deadline``."""

        async def attempt() -> TopicIdentity:
            answer = await self._metadata(topic, deadline)
            name = base64.urlsafe_b64encode(answer.topic_id.bytes).decode().rstrip("=")
            return TopicIdentity(name, len(answer.partitions))

        async def work() -> TopicIdentity:
            await self._client.connected(deadline)
            return await self._client.until(deadline, f"asking for topic {topic}", attempt)

        return self._client.call(work, deadline)

    def remove_member(self, member_id: str, instance: str | None, deadline: float) -> bool:
        """Take a member out of the group, without waiting for its session: a dynamic one by its id, a static one by its
        id and its instance. ``False``: that member was not in it (any more), also if somebody else has its instance
        name now; nothing was changed then. ``ValueError`` without an id: it would hit whoever has the name."""
        if not member_id:
            raise ValueError("remove_member needs a member id")

        async def attempt() -> bool:
            try:
                return await leave_group(self._client, self._group_id, member_id, instance, deadline)
            except (kafka_errors.FencedInstanceIdError, kafka_errors.UnknownMemberIdError):
                return False

        async def work() -> bool:
            await self._client.connected(deadline)
            return await self._client.until(deadline, f"removing {member_id} from group {self._group_id}", attempt)

        return self._client.call(work, deadline)

    def log_sizes(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, int]:
        """Bytes on disk of each partition, as its leader has it; partitions that nobody tells of are not in it, up to
        none at all: this is a question that may be refused (it takes the right to describe the cluster)."""

        async def work() -> dict[int, int]:
            await self._client.connected(deadline)
            step = f"asking for the leaders of topic {topic}"
            by_leader = await self._client.until(
                deadline, step, lambda: self._by_leader(topic, sorted(set(partitions)), deadline)
            )
            asking = [
                self._client.manager.call_soon(self._log_dirs, topic, numbers, leader, deadline)
                for leader, numbers in by_leader.items()
            ]
            sizes: dict[int, int] = {}
            refusal: BaseException | None = None
            for asked in asking:
                try:
                    sizes.update(await asked)
                except kafka_errors.KafkaError as error:
                    refusal = error
            if refusal is not None:
                log.debug("sizes of topic %s on disk: %r", topic, refusal)
            return sizes

        try:
            return self._client.call(work, deadline) if partitions else {}
        except StreamsError as error:
            log.debug("sizes of topic %s on disk: %s", topic, error)
            return {}

    # ------------------------------------------------------------------ IO thread: one try each

    async def _open_ids(self, deadline: float) -> list[str]:
        """Transactional ids with an open transaction, of all groups: each broker knows those that it coordinates."""
        cluster = await self._client.send(_metadata_request([]), None, deadline)
        found: list[str] = []
        for broker in cluster.brokers:
            request = ListTransactionsRequest(state_filters=_OPEN, producer_id_filters=[])
            answer = await self._client.send(request, broker.node_id, deadline)
            raise_for(answer.error_code)
            found += [state.transactional_id for state in answer.transaction_states]
        return found

    async def _fence(self, transactional_id: str, deadline: float) -> None:
        """CONCURRENT_TRANSACTIONS says that the abort is under way: asked again until it is through."""
        await self._client.until(
            deadline, f"fencing {transactional_id}", lambda: self._fence_once(transactional_id, deadline)
        )

    async def _fence_once(self, transactional_id: str, deadline: float) -> None:
        node = await self._client.coordinator(TRANSACTION, transactional_id, deadline)
        request = InitProducerIdRequest(
            transactional_id=transactional_id,
            transaction_timeout_ms=_FENCE_TIMEOUT_MS,
            producer_id=-1,
            producer_epoch=-1,
            max_version=4,
        )
        raise_for((await self._client.send(request, node, deadline)).error_code)

    async def _offsets(self, partitions: list[int], deadline: float) -> dict[int, int | None]:
        if not partitions:
            return {}
        node = await self._client.coordinator(GROUP, self._group_id, deadline)
        group_of = OffsetFetchRequest.OffsetFetchRequestGroup
        topic = group_of.OffsetFetchRequestTopics(name=self._topic, partition_indexes=partitions)
        request = OffsetFetchRequest(
            groups=[group_of(group_id=self._group_id, topics=[topic])],
            require_stable=True,
            min_version=8,
            max_version=8,
        )
        group = (await self._client.send(request, node, deadline)).groups[0]
        raise_for(group.error_code)
        offsets: dict[int, int | None] = dict.fromkeys(partitions)
        for entry in (entry for topic in group.topics for entry in topic.partitions):
            raise_for(entry.error_code)
            offsets[entry.partition_index] = entry.committed_offset if entry.committed_offset >= 0 else None
        return offsets

    async def _range(self, topic: str, partitions: list[int], deadline: float) -> dict[int, tuple[int, int]]:
        if not partitions:
            return {}
        by_leader = await self._by_leader(topic, partitions, deadline)
        if -1 in by_leader:
            raise kafka_errors.LeaderNotAvailableError()
        ranges: dict[int, tuple[int, int]] = {}
        for leader, numbers in by_leader.items():
            first = await self._list_offsets(topic, numbers, leader, _EARLIEST, deadline)
            last = await self._list_offsets(topic, numbers, leader, _LATEST, deadline)
            ranges.update((number, (first[number], last[number])) for number in numbers)
        return ranges

    async def _by_leader(self, topic: str, partitions: list[int], deadline: float) -> dict[int, list[int]]:
        """Broker -> those of the partitions that it leads; -1: nobody does for now."""
        leaders = {
            entry.partition_index: entry.leader_id for entry in (await self._metadata(topic, deadline)).partitions
        }
        missing = [number for number in partitions if number not in leaders]
        if missing:
            raise TopicError(f"topic {topic} has {len(leaders)} partitions, none with number {missing}")
        by_leader: dict[int, list[int]] = {}
        for number in partitions:
            by_leader.setdefault(leaders[number], []).append(number)
        return by_leader

    async def _log_dirs(self, topic: str, partitions: list[int], leader: int, deadline: float) -> dict[int, int]:
        if leader < 0:
            raise kafka_errors.LeaderNotAvailableError()
        topic_of = DescribeLogDirsRequest.DescribableLogDirTopic
        request = DescribeLogDirsRequest(topics=[topic_of(topic=topic, partitions=partitions)], max_version=4)
        answer = await self._client.send(request, leader, deadline)
        raise_for(getattr(answer, "error_code", 0) or 0)  # older brokers answer a refusal with nothing
        sizes: dict[int, int] = {}
        for folder in answer.results:  # one that is offline has an error, and no topics
            for entry in (entry for found in folder.topics for entry in found.partitions):
                if not entry.is_future_key:  # a copy on its way to another folder
                    sizes[entry.partition_index] = entry.partition_size
        return sizes

    async def _list_offsets(
        self, topic: str, partitions: list[int], leader: int, timestamp: int, deadline: float
    ) -> dict[int, int]:
        """Read uncommitted, so the high watermark; without a leader epoch, so an old one cannot be fenced."""
        topic_of = ListOffsetsRequest.ListOffsetsTopic
        asked = [
            topic_of.ListOffsetsPartition(partition_index=number, current_leader_epoch=-1, timestamp=timestamp)
            for number in partitions
        ]
        request = ListOffsetsRequest(
            replica_id=-1, isolation_level=0, max_version=5, topics=[topic_of(name=topic, partitions=asked)]
        )
        offsets = {}
        for entry in (
            entry for found in (await self._client.send(request, leader, deadline)).topics for entry in found.partitions
        ):
            raise_for(entry.error_code)
            offsets[entry.partition_index] = entry.offset
        return offsets

    async def _metadata(self, topic: str, deadline: float) -> Any:
        answer = await self._client.send(_metadata_request([topic]), None, deadline)
        raise_for(answer.topics[0].error_code)
        return answer.topics[0]


def _metadata_request(topics: list[str]) -> Any:
    return MetadataRequest(
        topics=[MetadataRequest.MetadataRequestTopic(name=name) for name in topics],
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
        min_version=10,
    )
