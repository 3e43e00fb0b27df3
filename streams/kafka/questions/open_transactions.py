"""Transactions that are open in a partition, and whether a coordinator is going to end them.

A *hanging* transaction is open in the log, and no coordinator lists it: a produce request came after the end of its
transaction and began another one, or a broker completed it without its marker here. No producer and no coordinator
commits, aborts or times it out. Readers of committed records stop there.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from streams.errors import BrokerUnavailable
from streams.kafka import permissions
from streams.kafka.questions.asking import Questions
from streams.kafka.questions.requests import TransactionState, describe_transaction
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import BrokerRefusal, Code, entries_of, raise_for
from streams.kafka.wire.schemas.describe_producers import DescribeProducersRequest
from streams.kafka.wire.schemas.list_transactions import ListTransactionsRequest
from streams.kafka.wire.topic_questions import metadata
from streams.model.group import ListedTransaction, OpenTransaction

STATE_LOG: Final = "__transaction_state"
OPEN_STATES: Final = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
_LIST: Final = 0  # the newest version: later ones have filters that are not needed here


class OpenTransactions(Questions):
    """All methods block, and may be called from any thread but the client's.

    Each raises ``BrokerUnavailable`` when there is no answer before ``deadline`` (seconds on ``time.monotonic``),
    ``TopicError`` for a partition that does not exist, and ``ConfigError`` without the rights to ask.
    """

    def find(self, topic: str, partitions: Collection[int], deadline: float) -> list[OpenTransaction]:
        """Find the open transactions in these partitions, ordered by partition and offset. All brokers have to answer:
        a coordinator that is silent may be the one that knows."""
        return self._run(deadline, lambda: self._find(topic, sorted(set(partitions)), deadline))

    def listed(self, deadline: float) -> list[ListedTransaction]:
        """List the transactions that coordinators have open, by transactional id; those that this principal may not
        describe are left out. All brokers have to answer."""

        async def work() -> list[ListedTransaction]:
            found: list[ListedTransaction] = []
            for number, names in (await self._lists(OPEN_STATES, [], deadline)).items():
                for name in names:
                    step, needed = f"describing the transaction of {name}", _describe_right(name)
                    ask = functools.partial(describe_transaction, self._client, name)
                    state = await self._until(deadline, step, ask, needed)
                    if state is not None and state.transaction_state in OPEN_STATES:
                        found.append(_listed(name, number, state))
            return sorted(found, key=lambda txn: txn.transactional_id)

        return self._run(deadline, work)

    def find_all(self, deadline: float) -> list[OpenTransaction]:
        """Find the open transactions in all topics, Kafka's own too. Needs the right to read all of them."""

        async def work() -> list[OpenTransaction]:
            found: list[OpenTransaction] = []
            for topic, partitions in (await self._all_topics(deadline)).items():
                found += await self._find(topic, partitions, deadline)
            return found

        return self._run(deadline, work)

    # ------------------------------------------------------------------ the client's loop

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
        ask = functools.partial(metadata, self._client, None)
        found = {
            topic.name or "": sorted(entry.partition_index for entry in topic.partitions)
            for topic in (await self._until(deadline, "asking for all topics", ask)).topics
        }
        return dict(sorted(found.items()))

    async def _open(self, topic: str, partitions: list[int], deadline: float) -> list[OpenTransaction]:
        return [txn for txn in await self._producers(topic, partitions, deadline) if txn.start_offset >= 0]

    async def _producers(self, topic: str, partitions: list[int], deadline: float) -> list[OpenTransaction]:
        """The producers that the leaders remember, each with its open transaction: at -1, if there is none."""
        topic_of = DescribeProducersRequest.TopicRequest
        found: list[OpenTransaction] = []
        for leader, numbers in (await self._by_leader(topic, partitions, deadline)).items():
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
        log = await self._until(deadline, step, self._log_leaders, needed)
        away = sorted(number for number, leader in log.items() if leader not in lists)
        if away:
            raise BrokerUnavailable(
                f"the coordinators of {STATE_LOG}{away} are away: their transactions cannot be listed"
            )
        known: dict[tuple[int, str, int], tuple[str, str]] = {}
        for name in (name for names in lists.values() for name in names):
            step = f"describing the transaction of {name}"
            known |= await self._until(deadline, step, functools.partial(self._describe, name), _describe_right(name))
        return known

    async def _log_leaders(self, deadline: float) -> dict[int, int]:
        """Return the leader of each partition of the coordinators' log."""
        try:
            found = await self._metadata(STATE_LOG, deadline)
        except BrokerRefusal as refusal:
            if refusal.code != Code.UNKNOWN_TOPIC_OR_PARTITION:
                raise
            return {}  # no coordinator has ever had a transaction
        return {entry.partition_index: entry.leader_id for entry in found.partitions}

    async def _lists(self, states: Sequence[str], producers: Sequence[int], deadline: float) -> dict[int, list[str]]:
        """Broker -> transactional ids that it coordinates, of these states and producers (none named: of all)."""

        async def ids(node: int, limit: float) -> list[str]:
            return await list_transactions(self._client, node, limit, states=states, producers=producers)

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


async def list_transactions(
    client: WireClient, node: int, deadline: float, *, states: Sequence[str] = (), producers: Sequence[int] = ()
) -> list[str]:
    """Return the transactional ids that a broker coordinates, of these states and producers (none named: of all)."""
    request = ListTransactionsRequest(state_filters=[*states], producer_id_filters=[*producers])
    answer = await client.send(request, node, deadline, most=_LIST)
    raise_for(answer.error_code)
    return [entry.transactional_id for entry in answer.transaction_states]


def _describe_right(name: str) -> list[permissions.Right]:
    return [permissions.on_transactional_id("Describe", name)]


def _listed(name: str, coordinator: int, state: TransactionState) -> ListedTransaction:
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
