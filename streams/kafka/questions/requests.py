"""Requests that several questions share, in versions that have the answer. Coroutines of the client's loop.

All raise ``BrokerRefusal`` and ``LostConnection``, as ``WireClient.send`` does; ``WireClient.until`` tries again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from streams.kafka.wire.client import GROUP, TRANSACTION, WireClient
from streams.kafka.wire.codes import Code, entries_of, raise_for
from streams.kafka.wire.messages import WirePartition
from streams.kafka.wire.schemas.describe_transactions import DescribeTransactionsRequest, DescribeTransactionsResponse
from streams.kafka.wire.schemas.offset_commit import OffsetCommitRequest
from streams.kafka.wire.schemas.offset_delete import OffsetDeleteRequest
from streams.kafka.wire.schemas.offset_fetch import OffsetFetchRequest, OffsetFetchResponse
from streams.kafka.wire.topic_questions import only

_WITH_GROUPS: Final = 8  # of OffsetFetch: the first version that names groups in a list
_WITH_EPOCHS, _COMMIT = 6, 8
_COMMIT_OF_MEMBER: Final = 9  # members by the broker's protocol (KIP-848) are refused below it

GroupOffsets = OffsetFetchResponse.OffsetFetchResponseGroup
OffsetEntry = GroupOffsets.OffsetFetchResponseTopics.OffsetFetchResponsePartitions
TransactionState = DescribeTransactionsResponse.TransactionState


async def commit(
    client: WireClient,
    group_id: str,
    offsets: Mapping[WirePartition, tuple[int, str]],
    deadline: float,
    *,
    generation: int = -1,
    member_id: str = "",
) -> None:
    """Commit (offset, metadata) by topic and partition, as this member; or from outside of the group, which must have
    no members then."""
    topic_of = OffsetCommitRequest.OffsetCommitRequestTopic
    topics: dict[str, OffsetCommitRequest.OffsetCommitRequestTopic] = {}
    for (topic, partition), (offset, text) in offsets.items():
        entry = topic_of.OffsetCommitRequestPartition(
            partition_index=partition, committed_offset=offset, committed_metadata=text
        )
        topics.setdefault(topic, topic_of(name=topic)).partitions.append(entry)
    request = OffsetCommitRequest(
        group_id=group_id,
        generation_id_or_member_epoch=generation,
        member_id=member_id,
        topics=[*topics.values()],
    )
    node = await client.coordinator(GROUP, group_id, deadline)
    answer = await client.send(
        request, node, deadline, least=_WITH_EPOCHS, most=_COMMIT_OF_MEMBER if member_id else _COMMIT
    )
    for _ in entries_of(answer.topics):  # raises for one that was refused
        pass


async def committed(
    client: WireClient,
    group_id: str,
    deadline: float,
    wanted: Mapping[str, list[int]] | None = None,
    *,
    stable: bool = False,
) -> GroupOffsets:
    """Fetch the committed offsets of a group: in all topics, or in the ``wanted`` partitions by topic. ``stable``:
    refused while a commit is pending. An error of a partition is in its entry."""
    group_of = OffsetFetchRequest.OffsetFetchRequestGroup
    topic_of = group_of.OffsetFetchRequestTopics
    topics = None
    if wanted is not None:
        topics = [topic_of(name=topic, partition_indexes=numbers) for topic, numbers in wanted.items()]
    request = OffsetFetchRequest(groups=[group_of(group_id=group_id, topics=topics)], require_stable=stable)
    node = await client.coordinator(GROUP, group_id, deadline)
    answer = await client.send(request, node, deadline, least=_WITH_GROUPS, most=_WITH_GROUPS)
    found = only(answer.groups, f"group {group_id}")
    raise_for(found.error_code)
    return found


async def forget(client: WireClient, group_id: str, topic: str, partitions: Iterable[int], deadline: float) -> None:
    """Delete the committed offsets of a topic from outside of the group: it must have no members."""
    topic_of = OffsetDeleteRequest.OffsetDeleteRequestTopic
    entries = [topic_of.OffsetDeleteRequestPartition(partition_index=number) for number in partitions]
    request = OffsetDeleteRequest(group_id=group_id, topics=[topic_of(name=topic, partitions=entries)])
    node = await client.coordinator(GROUP, group_id, deadline)
    answer = await client.send(request, node, deadline)
    raise_for(answer.error_code)
    for _ in entries_of(answer.topics):
        pass


async def describe_transaction(client: WireClient, transactional_id: str, deadline: float) -> TransactionState | None:
    """Return the transaction as its coordinator describes it; ``None``: there is none."""
    node = await client.coordinator(TRANSACTION, transactional_id, deadline)
    request = DescribeTransactionsRequest(transactional_ids=[transactional_id])
    answer = await client.send(request, node, deadline)
    state = only(answer.transaction_states, transactional_id)
    if state.error_code == Code.TRANSACTIONAL_ID_NOT_FOUND:
        return None
    raise_for(state.error_code)
    return state
