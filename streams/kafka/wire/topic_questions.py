"""Questions about topics and their logs, in versions that have the answer. Coroutines of the client's loop.

All raise ``BrokerRefusal`` and ``LostConnection``, as ``WireClient.send`` does; ``WireClient.until`` tries again.
"""

from __future__ import annotations

import base64
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final, TypeVar
from uuid import UUID

from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import BrokerRefusal, Code, entries_of, raise_for
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.schemas.fetch import FetchRequest, FetchResponse
from streams.kafka.wire.schemas.list_offsets import ListOffsetsRequest
from streams.kafka.wire.schemas.metadata import MetadataRequest, MetadataResponse

EARLIEST: Final = -2
LATEST: Final = -1
"""In the place of a time: the first offset of a partition, and its end."""
_WITH_IDS, _METADATA = 10, 12  # versions that name topics by their names, and tell their ids
_WITH_ISOLATION, _LIST_OFFSETS = 2, 5
BY_NAME: Final = 12
"""The last version of Fetch that names topics by their names."""

EntryT = TypeVar("EntryT")
TopicMetadata = MetadataResponse.MetadataResponseTopic
PartitionData = FetchResponse.FetchableTopicResponse.PartitionData


def only(entries: Sequence[EntryT], what: str) -> EntryT:
    """Return the one entry of an answer. Raises ``LostConnection`` for an answer that has none."""
    if not entries:
        raise LostConnection(f"the answer says nothing of {what}", "_BAD_MSG")
    return entries[0]


def check_complete(found: Container[int], topic: str, wanted: Iterable[int]) -> None:
    """Raise ``LostConnection`` for an answer that leaves out a partition that the request named."""
    for number in wanted:
        if number not in found:
            raise LostConnection(f"the answer says nothing of {topic}[{number}]", "_BAD_MSG")


async def metadata(
    client: WireClient, topics: Iterable[str] | None, deadline: float, *, with_rights: bool = False
) -> MetadataResponse:
    """Ask for brokers and for these topics; ``None``: for all topics. No topic is made by that."""
    named = None if topics is None else [MetadataRequest.MetadataRequestTopic(name=name) for name in topics]
    request = MetadataRequest(
        topics=named, allow_auto_topic_creation=False, include_topic_authorized_operations=with_rights
    )
    return await client.send(request, None, deadline, least=_WITH_IDS, most=_METADATA)


def leader_of(topic: TopicMetadata, partition: int) -> int:
    """Return the broker that leads a partition. Raises ``BrokerRefusal``, which passes, while none does."""
    leader = next((entry.leader_id for entry in topic.partitions if entry.partition_index == partition), -1)
    if leader < 0:
        raise BrokerRefusal(Code.LEADER_NOT_AVAILABLE)
    return leader


def topic_id_text(topic_id: UUID) -> str:
    """Return the id of a topic as librdkafka writes it, with ``+`` and ``/``: stored positions and snapshots have it
    so."""
    return base64.b64encode(topic_id.bytes).decode().rstrip("=")


async def list_offsets(
    client: WireClient,
    times: Mapping[str, Mapping[int, int]],
    leader: int,
    deadline: float,
    *,
    stable: bool = False,
) -> dict[str, dict[int, int]]:
    """Return the offset of the first record of a time or later, by topic and partition; -1: there is none. ``times``:
    in milliseconds, or ``EARLIEST`` or ``LATEST``, of partitions with this leader. Read uncommitted, so up to the high
    watermark, unless it is to be ``stable``."""
    topic_of = ListOffsetsRequest.ListOffsetsTopic
    of = topic_of.ListOffsetsPartition
    # Without a leader epoch: an old one would be refused (FENCED_LEADER_EPOCH) after a broker's restart.
    topics = [
        topic_of(name=topic, partitions=[of(partition_index=number, timestamp=at) for number, at in wanted.items()])
        for topic, wanted in times.items()
    ]
    request = ListOffsetsRequest(isolation_level=int(stable), topics=topics)
    answer = await client.send(request, leader, deadline, least=_WITH_ISOLATION, most=_LIST_OFFSETS)
    found = {
        topic.name: {entry.partition_index: entry.offset for entry in entries_of([topic])} for topic in answer.topics
    }
    for topic, wanted in times.items():
        check_complete(found.get(topic, {}), topic, wanted)
    return found


async def fetch(
    client: WireClient,
    topic: TopicMetadata,
    partition: int,
    offset: int,
    most_bytes: int,
    deadline: float,
    *,
    stable: bool = False,
) -> PartitionData:
    """Fetch once what a partition has from an offset on, in at most so many bytes, but the first batch as a whole. Read
    uncommitted, so up to the high watermark, unless it is to be ``stable``."""
    of, leader, name = FetchRequest.FetchTopic, leader_of(topic, partition), topic.name or ""
    # With the epoch: a leader of another one refuses, whose log may end elsewhere.
    epoch = next(entry.leader_epoch for entry in topic.partitions if entry.partition_index == partition)
    wanted = of.FetchPartition(
        partition=partition, current_leader_epoch=epoch, fetch_offset=offset, partition_max_bytes=most_bytes
    )
    request = FetchRequest(
        max_bytes=most_bytes,
        isolation_level=int(stable),
        session_epoch=-1,
        topics=[of(topic=name, topic_id=topic.topic_id, partitions=[wanted])],
    )
    answer = await client.send(request, leader, deadline, most=None if topic.topic_id.int else BY_NAME)
    raise_for(answer.error_code)
    data = only([entry for each in answer.responses for entry in each.partitions], f"{name}[{partition}]")
    raise_for(data.error_code)
    return data
