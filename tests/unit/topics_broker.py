"""A scripted broker that has topics: it makes, grows and deletes them, and tells their offsets and those of groups."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from anyio.from_thread import start_blocking_portal

from tests.unit.scripted_broker import ScriptedBroker, by_topic, speak

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of kafka-python's own
    from kafka.protocol.admin import (
        CreatePartitionsRequest,
        CreatePartitionsResponse,
        CreateTopicsRequest,
        CreateTopicsResponse,
        DeleteRecordsRequest,
        DeleteRecordsResponse,
        DeleteTopicsRequest,
        DeleteTopicsResponse,
        DescribeConfigsRequest,
        DescribeConfigsResponse,
    )
    from kafka.protocol.consumer import (
        ListOffsetsRequest,
        ListOffsetsResponse,
        OffsetCommitRequest,
        OffsetCommitResponse,
        OffsetFetchRequest,
        OffsetFetchResponse,
    )
    from kafka.protocol.metadata import MetadataRequest

EXISTS, NO_TOPIC, TOO_FEW = 36, 3, 37


class TopicsBroker(ScriptedBroker):
    """``topics`` has the number of partitions by name, ``configs`` the settings. Each partition has the offsets
    ``MARKS``; ``text`` is beside each ``committed`` one. ``leaderless``: so many answers to Metadata name no leader."""

    MARKS: ClassVar = {"earliest": 2, "stable": 7, "latest": 9}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.configs: dict[str, dict[str, str]] = {}
        self.internal: set[str] = set()
        self.committed: dict[int, int] = {}
        self.text = ""
        self.leaderless = 0
        self.topic_id: Any = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    def _looked_at(self, request: Any, version: int, code: int) -> Any:
        if request.topics is None:
            request.topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in self.topics]
        answer = ScriptedBroker._metadata(self, request, version, code)
        for topic in answer.topics:
            topic.is_internal = topic.name in self.internal
            if self.topic_id is not None:
                topic.topic_id = self.topic_id
            for partition in topic.partitions:
                partition.replica_nodes = [0, 1]
                if self.leaderless:
                    partition.leader_id = -1
        self.leaderless -= bool(self.leaderless and answer.topics)
        return answer

    def _made(self, request: Any, version: int, code: int) -> Any:
        of = CreateTopicsResponse.CreatableTopicResult
        results = []
        for topic in request.topics:
            error = code or (EXISTS if topic.name in self.topics else 0)
            if not error:
                self.topics[topic.name] = topic.num_partitions
                self.configs[topic.name] = {entry.name: entry.value for entry in topic.configs}
            results.append(of(name=topic.name, error_code=error, error_message="why" if error else None, configs=[]))
        return CreateTopicsResponse(topics=results)

    def _grown(self, request: Any, version: int, code: int) -> Any:
        of = CreatePartitionsResponse.CreatePartitionsTopicResult
        results = []
        for topic in request.topics:
            error = code or (0 if topic.count > self.topics[topic.name] else TOO_FEW)
            if not error:
                self.topics[topic.name] = topic.count
            results.append(of(name=topic.name, error_code=error, error_message="why" if error else None))
        return CreatePartitionsResponse(results=results)

    def _deleted(self, request: Any, version: int, code: int) -> Any:
        of = DeleteTopicsResponse.DeletableTopicResult
        names = [topic.name for topic in request.topics] if version >= 6 else request.topic_names
        results = []
        for name in names:
            error = code or (0 if self.topics.pop(name, None) else NO_TOPIC)
            results.append(of(name=name, error_code=error, error_message=None))
        return DeleteTopicsResponse(responses=results)

    def _settings(self, request: Any, version: int, code: int) -> Any:
        of = DescribeConfigsResponse.DescribeConfigsResult
        entry = of.DescribeConfigsResourceResult
        results = []
        for resource in request.resources:
            name = resource.resource_name
            error = code or (0 if name in self.topics else NO_TOPIC)
            found = {} if error else self.configs.get(name, {})
            configs = [entry(name=key, value=value, synonyms=[], documentation=None) for key, value in found.items()]
            results.append(
                of(error_code=error, error_message=None, resource_type=2, resource_name=name, configs=configs)
            )
        return DescribeConfigsResponse(results=results)

    def _ends(self, request: Any, version: int, code: int) -> Any:
        of = ListOffsetsResponse.ListOffsetsTopicResponse
        asked = {-2: "earliest", -1: "stable" if request.isolation_level else "latest"}

        def fields(part: Any) -> dict[str, Any]:
            at = part.timestamp
            return {"timestamp": -1, "offset": self.MARKS[asked[at]] if at in asked else at, "leader_epoch": 0}

        return ListOffsetsResponse(topics=by_topic(request, of, of.ListOffsetsPartitionResponse, code, fields))

    def _trimmed(self, request: Any, version: int, code: int) -> Any:
        of = DeleteRecordsResponse.DeleteRecordsTopicResult
        entry = of.DeleteRecordsPartitionResult
        topics = by_topic(request, of, entry, code, lambda part: {"low_watermark": part.offset})
        return DeleteRecordsResponse(topics=topics)

    def _positions(self, request: Any, version: int, code: int) -> Any:
        of = OffsetFetchResponse.OffsetFetchResponseGroup
        topic_of = of.OffsetFetchResponseTopics

        def entry(number: int) -> Any:
            offset = self.committed.get(number, -1)
            return topic_of.OffsetFetchResponsePartitions(
                partition_index=number,
                committed_offset=offset,
                committed_leader_epoch=-1,
                metadata=self.text,
                error_code=code,
            )

        def topic(asked: Any) -> Any:
            return topic_of(name=asked.name, partitions=[entry(number) for number in asked.partition_indexes])

        groups = [
            of(group_id=each.group_id, error_code=0, topics=[*map(topic, each.topics)]) for each in request.groups
        ]
        return OffsetFetchResponse(groups=groups)

    def _noted(self, request: Any, version: int, code: int) -> Any:
        of = OffsetCommitResponse.OffsetCommitResponseTopic
        if not code:
            for topic in request.topics:
                self.committed |= {part.partition_index: part.committed_offset for part in topic.partitions}
        return OffsetCommitResponse(topics=by_topic(request, of, of.OffsetCommitResponsePartition, code))


@contextmanager
def served(broker: TopicsBroker) -> Iterator[TopicsBroker]:
    """Serve it on a thread of its own."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(broker):
        yield broker


def _of_topics(request: Any, general: Any, own: Any) -> None:
    """Let brokers with topics answer in their own way, and all others as before."""
    speak(
        request,
        lambda broker, asked, version, code: (own if isinstance(broker, TopicsBroker) else general)(
            broker, asked, version, code
        ),
    )


_of_topics(MetadataRequest, ScriptedBroker._metadata, TopicsBroker._looked_at)
_of_topics(DescribeConfigsRequest, ScriptedBroker._configs, TopicsBroker._settings)
speak(CreateTopicsRequest, TopicsBroker._made)
speak(CreatePartitionsRequest, TopicsBroker._grown)
speak(DeleteTopicsRequest, TopicsBroker._deleted)
speak(ListOffsetsRequest, TopicsBroker._ends)
speak(DeleteRecordsRequest, TopicsBroker._trimmed)
speak(OffsetCommitRequest, TopicsBroker._noted)
speak(OffsetFetchRequest, TopicsBroker._positions)
