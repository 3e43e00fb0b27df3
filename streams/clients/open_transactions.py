"""Transactions that are open in a partition, and whether a coordinator is going to end them.

A *hanging* transaction is open in the log, and no coordinator lists it: a produce request that came after the end of
its transaction began another one, which no producer and no coordinator commits, aborts or times out. Readers of
committed records stop there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection
from typing import Any

import msgspec

from streams.clients import permissions
from streams.clients.kafka_python import (
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
    MetadataRequest,
    WriteTxnMarkersRequest,
)
from streams.clients.kafka_python import errors as kafka_errors
from streams.clients.kafka_python_client import TRANSACTION, KafkaPythonClient, entries_of, raise_for
from streams.clients.questions import Questions
from streams.errors import BrokerUnavailable, OffsetError
from streams.group import HANGING_SECONDS, ListedTransaction, OpenTransaction

_LOG = "__transaction_state"
_OPEN_STATES = ["Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"]
_MARKERS = [permissions.on_cluster("ClusterAction")]


class OpenTransactions(Questions):
    """All methods block, and may be called from any thread but the client's IO thread.

    Each raises ``BrokerUnavailable`` when there is no answer before ``deadline`` (seconds on ``time.monotonic``),
    ``TopicError`` for a partition that does not exist, and ``ConfigError`` without the rights to ask.
    """

    def find(self, topic: str, partitions: Collection[int], deadline: float) -> list[OpenTransaction]:
        """Find the open transactions in these partitions, ordered by partition and offset. All brokers have to answer:
        a coordinator that is silent may be the one that knows."""
        numbers = sorted(set(partitions))

        async def work() -> list[OpenTransaction]:
            await self._connected(deadline)
            return await self._find(topic, numbers, deadline)

        return self._client.call(work, deadline)

    def listed(self, deadline: float) -> list[ListedTransaction]:
        """List the transactions that coordinators have open, by transactional id; those that this principal may not
        describe are left out. All brokers have to answer."""

        async def work() -> list[ListedTransaction]:
            await self._connected(deadline)
            found: list[ListedTransaction] = []
            for number, names in (await self._lists(_OPEN_STATES, [], deadline)).items():
                for name in names:
                    step, needed = f"describing the transaction of {name}", _describe_right(name)
                    ask = functools.partial(describe_transaction, self._client, name)
                    state = await self._until(deadline, step, ask, needed)
                    if state is not None and state.transaction_state in _OPEN_STATES:
                        found.append(_listed(name, number, state))
            return sorted(found, key=lambda txn: txn.transactional_id)

        return self._client.call(work, deadline)

    def find_all(self, deadline: float) -> list[OpenTransaction]:
        """Find the open transactions in all topics, Kafka's own too. Needs the right to read all of them."""

        async def work() -> list[OpenTransaction]:
            await self._connected(deadline)
            every = MetadataRequest(topics=None, allow_auto_topic_creation=False, min_version=10)
            ask = functools.partial(self._client.send, every, None)
            topics = (await self._until(deadline, "asking for all topics", ask)).topics
            found: list[OpenTransaction] = []
            for topic in sorted(topics, key=lambda topic: str(topic.name)):
                numbers = sorted(entry.partition_index for entry in topic.partitions)
                found += await self._find(topic.name, numbers, deadline)
            return found

        return self._client.call(work, deadline)

    def hanging(
        self,
        topic: str,
        partition: int,
        start_offset: int,
        deadline: float,
        *,
        min_age_seconds: float = HANGING_SECONDS,
    ) -> OpenTransaction:
        """Return the hanging transaction that ``abort`` would end. Raises as that one, and changes nothing."""
        found = self.find(topic, [partition], deadline)
        return _only(topic, partition, start_offset, found, min_age_seconds)

    def abort(
        self,
        topic: str,
        partition: int,
        start_offset: int,
        deadline: float,
        *,
        min_age_seconds: float = HANGING_SECONDS,
    ) -> OpenTransaction:
        """End the hanging transaction that began at this offset, by an abort marker in this partition; returns it.

        ``OffsetError``: there is none, or a coordinator lists it, so that it ends by itself, or its last record is
        younger than ``min_age_seconds``. Needs the right to act as the cluster (``ClusterAction``), and to describe all
        transactional ids: what the principal must not see looks as if no coordinator knew of it.
        """

        async def work() -> OpenTransaction:
            await self._connected(deadline)
            found = await self._find(topic, [partition], deadline)
            hanging = _only(topic, partition, start_offset, found, min_age_seconds)
            step = f"ending a transaction in {topic}[{partition}]"
            await self._until(deadline, step, lambda limit: self._write_marker(hanging, limit), _MARKERS)
            return hanging

        return self._client.call(work, deadline)

    # ------------------------------------------------------------------ IO thread

    async def _find(self, topic: str, partitions: list[int], deadline: float) -> list[OpenTransaction]:
        step = f"asking for open transactions in topic {topic}"
        needed = [permissions.on_topic("Read", topic)]
        found = await self._until(deadline, step, lambda limit: self._open(topic, partitions, limit), needed)
        if not found:
            return []
        known = await self._known(frozenset(txn.producer_id for txn in found), deadline)
        before = {_place(txn) for txn in found}
        # In this order: a transaction open before and after the coordinators answered was open when they did.
        still = await self._until(deadline, step, lambda limit: self._open(topic, partitions, limit), needed)
        return [
            msgspec.structs.replace(txn, transactional_id=owner, state=state)
            for txn in still
            if _place(txn) in before
            for owner, state in [known.get((txn.producer_id, topic, txn.partition), ("", ""))]
        ]

    async def _open(self, topic: str, partitions: list[int], deadline: float) -> list[OpenTransaction]:
        by_leader = await self._by_leader(topic, partitions, deadline)
        if -1 in by_leader:
            raise kafka_errors.LeaderNotAvailableError()
        topic_of = DescribeProducersRequest.TopicRequest
        found: list[OpenTransaction] = []
        for leader, numbers in by_leader.items():
            request = DescribeProducersRequest(topics=[topic_of(name=topic, partition_indexes=numbers)])
            answer = await self._client.send(request, leader, deadline)
            for entry in entries_of(answer.topics):
                found += [
                    OpenTransaction(
                        topic=topic,
                        partition=entry.partition_index,
                        producer_id=producer.producer_id,
                        producer_epoch=producer.producer_epoch,
                        coordinator_epoch=producer.coordinator_epoch,
                        start_offset=producer.current_txn_start_offset,
                        last_timestamp_ms=producer.last_timestamp,
                    )
                    for producer in entry.active_producers
                    if producer.current_txn_start_offset >= 0
                ]
        return sorted(found, key=lambda txn: (txn.partition, txn.start_offset))

    async def _known(self, producers: frozenset[int], deadline: float) -> dict[tuple[int, str, int], tuple[str, str]]:
        """(producer id, topic, partition) -> (transactional id, state), of what coordinators are going to end."""

        lists = await self._lists([], sorted(producers), deadline)
        # A coordinator whose log has no leader is on no list, and goes on with its transactions when it is back.
        step, needed = "asking for coordinators", [permissions.on_topic("Describe", _LOG)]
        log = await self._until(deadline, step, self._log_partitions, needed)
        away = sorted(entry.partition_index for entry in log if entry.leader_id not in lists)
        if away:
            raise BrokerUnavailable(f"the coordinators of {_LOG}{away} are away: their transactions cannot be listed")
        known: dict[tuple[int, str, int], tuple[str, str]] = {}
        for name in (name for names in lists.values() for name in names):
            step = f"describing the transaction of {name}"
            known |= await self._until(deadline, step, functools.partial(self._describe, name), _describe_right(name))
        return known

    async def _log_partitions(self, deadline: float) -> list[Any]:
        try:
            return list((await self._metadata(_LOG, deadline)).partitions)
        except kafka_errors.UnknownTopicOrPartitionError:  # no coordinator has ever had a transaction
            return []

    async def _lists(self, states: list[str], producers: list[int], deadline: float) -> dict[int, list[str]]:
        """Broker -> transactional ids that it coordinates, of these states and producers (none named: of all)."""

        async def ids(node: int, limit: float) -> list[str]:
            request = ListTransactionsRequest(state_filters=states, producer_id_filters=producers, max_version=0)
            answer = await self._client.send(request, node, limit)
            raise_for(answer.error_code)
            return [entry.transactional_id for entry in answer.transaction_states]

        lists, silent = await self._each_broker("listing transactions", deadline, ids)
        for number, error in silent.items():
            raise BrokerUnavailable(f"broker {number} does not report whether it knows a transaction: {error}")
        return lists

    async def _describe(self, name: str, deadline: float) -> dict[tuple[int, str, int], tuple[str, str]]:
        state = await describe_transaction(self._client, name, deadline)
        if state is None:
            return {}
        return {
            (state.producer_id, entry.topic, number): (name, state.transaction_state)
            for entry in state.topics
            for number in entry.partitions
        }

    async def _write_marker(self, txn: OpenTransaction, deadline: float) -> None:
        marker_of = WriteTxnMarkersRequest.WritableTxnMarker
        topic = marker_of.WritableTxnMarkerTopic(name=txn.topic, partition_indexes=[txn.partition])
        marker = marker_of(
            producer_id=txn.producer_id,
            producer_epoch=txn.producer_epoch,
            transaction_result=False,
            topics=[topic],
            coordinator_epoch=txn.coordinator_epoch,
        )
        [leader] = await self._by_leader(txn.topic, [txn.partition], deadline)
        if leader < 0:
            raise kafka_errors.LeaderNotAvailableError()
        answer = await self._client.send(WriteTxnMarkersRequest(markers=[marker]), leader, deadline)
        for each in answer.markers:
            list(entries_of(each.topics))  # raises for one that was refused


async def describe_transaction(client: KafkaPythonClient, transactional_id: str, deadline: float) -> Any:
    """The transaction as its coordinator describes it; ``None``: there is none."""
    node = await client.coordinator(TRANSACTION, transactional_id, deadline)
    request = DescribeTransactionsRequest(transactional_ids=[transactional_id])
    state = (await client.send(request, node, deadline)).transaction_states[0]
    if state.error_code == kafka_errors.TransactionalIdNotFoundError.errno:
        return None
    raise_for(state.error_code)
    return state


def _describe_right(name: str) -> list[permissions.Right]:
    return [permissions.on_transactional_id("Describe", name)]


def _listed(name: str, coordinator: int, state: Any) -> ListedTransaction:
    return ListedTransaction(
        transactional_id=name,
        state=state.transaction_state,
        producer_id=state.producer_id,
        producer_epoch=state.producer_epoch,
        coordinator=coordinator,
        started_ms=state.transaction_start_time_ms,
        timeout_ms=state.transaction_timeout_ms,
        partitions=tuple((entry.topic, number) for entry in state.topics for number in entry.partitions),
    )


def _place(txn: OpenTransaction) -> tuple[int, int, int, int]:
    return txn.partition, txn.producer_id, txn.producer_epoch, txn.start_offset


def _only(
    topic: str, partition: int, start_offset: int, found: list[OpenTransaction], min_age_seconds: float
) -> OpenTransaction:
    """Return the transaction that began there. ``OffsetError`` if it must not be ended by hand."""
    where = f"{topic}[{partition}]"
    txn = next((txn for txn in found if txn.start_offset == start_offset), None)
    if txn is None:
        begun = ", ".join(str(txn.start_offset) for txn in found) or "none"
        raise OffsetError(f"{where}: no open transaction began at offset {start_offset} (open ones: {begun})")
    if not txn.is_hanging:
        raise OffsetError(
            f"{where}: the transaction at offset {start_offset} is not hanging: {txn.transactional_id} has it "
            f"({txn.state}), and its coordinator ends it, by its time-out at the latest"
        )
    left = min_age_seconds - (time.time() - txn.last_timestamp_ms / 1000)
    if left > 0:
        raise OffsetError(
            f"{where}: the last record of the transaction at offset {start_offset} is younger than "
            f"{min_age_seconds:g} s, so it may be alive, unknown to this principal; try again in {left:.0f} s"
        )
    return txn
