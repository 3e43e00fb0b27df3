"""Transactions that are open in a partition, and whether a coordinator is going to end them.

A *hanging* transaction is open in the log, and no coordinator lists it: a produce request came after the end of its
transaction and began another one, or a broker completed it without its marker here. No producer and no coordinator
commits, aborts or times it out. Readers of committed records stop there.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, Final

import msgspec

from streams.errors import BrokerUnavailable
from streams.kafka import permissions
from streams.kafka.questions.asking import Questions
from streams.kafka.wire.kafka_python import (
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
    MetadataRequest,
)
from streams.kafka.wire.kafka_python import errors as kafka_errors
from streams.kafka.wire.kafka_python_client import TRANSACTION, KafkaPythonClient, entries_of, raise_for
from streams.model.group import ListedTransaction, OpenTransaction

STATE_LOG: Final = "__transaction_state"
_OPEN_STATES = ["Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"]


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
            found: list[OpenTransaction] = []
            for topic, partitions in (await self._all_topics(deadline)).items():
                found += await self._find(topic, partitions, deadline)
            return found

        return self._client.call(work, deadline)

    # ------------------------------------------------------------------ IO thread

    async def _find(self, topic: str, partitions: list[int], deadline: float) -> list[OpenTransaction]:
        step = f"asking for open transactions in topic {topic}"
        needed = [permissions.on_topic("Read", topic)]
        found = await self._until(deadline, step, lambda limit: self._open(topic, partitions, limit), needed)
        if not found:
            return []
        known = await self._known(frozenset(txn.producer_id for txn in found), deadline)
        before = {txn.identity for txn in found}
        # In this order: a transaction open before and after the coordinators answered was open when they did.
        still = await self._until(deadline, step, lambda limit: self._open(topic, partitions, limit), needed)
        return [
            msgspec.structs.replace(txn, transactional_id=owner, state=state)
            for txn in still
            if txn.identity in before
            for owner, state in [known.get((txn.producer_id, topic, txn.partition), ("", ""))]
        ]

    async def _all_topics(self, deadline: float) -> dict[str, list[int]]:
        """Topic -> partitions, of all topics that this principal may see."""
        every = MetadataRequest(topics=None, allow_auto_topic_creation=False, min_version=10)
        ask = functools.partial(self._client.send, every, None)
        topics = (await self._until(deadline, "asking for all topics", ask)).topics
        return {
            str(topic.name): sorted(entry.partition_index for entry in topic.partitions)
            for topic in sorted(topics, key=lambda topic: str(topic.name))
        }

    async def _open(self, topic: str, partitions: list[int], deadline: float) -> list[OpenTransaction]:
        return [txn for txn in await self._producers(topic, partitions, deadline) if txn.start_offset >= 0]

    async def _producers(self, topic: str, partitions: list[int], deadline: float) -> list[OpenTransaction]:
        """The producers that the leaders remember, each with its open transaction: at -1, if there is none."""
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
                ]
        return sorted(found, key=lambda txn: (txn.partition, txn.start_offset))

    async def _known(self, producers: frozenset[int], deadline: float) -> dict[tuple[int, str, int], tuple[str, str]]:
        """(producer id, topic, partition) -> (transactional id, state), of what coordinators are going to end."""

        lists = await self._lists([], sorted(producers), deadline)
        # A coordinator whose log has no leader is on no list, and goes on with its transactions when it is back.
        step, needed = "asking for coordinators", [permissions.on_topic("Describe", STATE_LOG)]
        log = await self._until(deadline, step, self._log_partitions, needed)
        away = sorted(entry.partition_index for entry in log if entry.leader_id not in lists)
        if away:
            raise BrokerUnavailable(
                f"the coordinators of {STATE_LOG}{away} are away: their transactions cannot be listed"
            )
        known: dict[tuple[int, str, int], tuple[str, str]] = {}
        for name in (name for names in lists.values() for name in names):
            step = f"describing the transaction of {name}"
            known |= await self._until(deadline, step, functools.partial(self._describe, name), _describe_right(name))
        return known

    async def _log_partitions(self, deadline: float) -> list[Any]:
        try:
            return list((await self._metadata(STATE_LOG, deadline)).partitions)
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
        # A silent broker may coordinate it: without its answer a live transaction would look as if it were hanging.
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
