"""Questions to a cluster of which some brokers may not answer: no question waits for one of them for long."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from streams.errors import BrokerUnavailable, TopicError
from streams.kafka.permissions import Right
from streams.kafka.wire.kafka_python import ListOffsetsRequest, MetadataRequest
from streams.kafka.wire.kafka_python_client import KafkaPythonClient, entries_of, raise_for

T = TypeVar("T")

BROKER_SECONDS = 2.0
"""Seconds for one answer of one broker. A frozen one costs as much, not the time of the whole step."""


class Questions:
    """Requests to brokers, on a client that is shared and not closed here. Coroutines run on the client's IO thread."""

    def __init__(self, client: KafkaPythonClient) -> None:
        self._client = client
        self._lost = False  # the last question found no answer at the addresses that the cluster names

    def _ask(
        self, step: str, deadline: float, attempt: Callable[[float], Awaitable[T]], needed: Sequence[Right] = ()
    ) -> T:
        """Connect, and ``attempt`` it until it works, on any thread but the client's."""

        async def work() -> T:
            await self._connected(deadline)
            return await self._until(deadline, step, attempt, needed)

        return self._client.call(work, deadline)

    async def _connected(self, deadline: float) -> None:
        """Wait until a broker has answered, for the first time or after a question in vain."""
        # Otherwise the cluster's own list is used: ``connected`` begins at one of the configured addresses again, by
        # chance at a frozen one (18 s were seen).
        if self._lost or not self._client.manager.cluster.brokers():
            await self._client.connected(deadline)
            self._lost = False

    async def _until(
        self, deadline: float, step: str, attempt: Callable[[float], Awaitable[T]], needed: Sequence[Right] = ()
    ) -> T:
        """Try as the client's ``until`` does; but no try waits longer for a broker than ``BROKER_SECONDS``: another one
        may lead by then."""
        patience = BROKER_SECONDS

        async def one_try() -> T:
            nonlocal patience
            limit = min(time.monotonic() + patience, deadline)
            try:
                return await attempt(limit)
            finally:
                if time.monotonic() >= limit:
                    patience *= 1.5  # it may only be slow, and would never be done in time otherwise

        try:
            return await self._client.until(deadline, step, one_try, needed)
        except BrokerUnavailable:
            self._lost = True  # all of its addresses may be others by now
            raise

    async def _each_broker(
        self, step: str, deadline: float, question: Callable[[int, float], Awaitable[T]]
    ) -> tuple[dict[int, T], dict[int, BrokerUnavailable]]:
        """Ask all brokers side by side: the answers, and those that gave none within ``BROKER_SECONDS``. Raises
        ``BrokerUnavailable`` when none answers."""
        metadata = _metadata_request([])
        cluster = await self._until(deadline, step, lambda limit: self._client.send(metadata, None, limit))
        # Side by side, so a frozen broker costs ``BROKER_SECONDS`` once, however many there are.
        limit = time.monotonic() + BROKER_SECONDS
        asking = {
            number: self._client.manager.call_soon(
                self._client.until, limit, step, functools.partial(question, number, limit)
            )
            for number in (broker.node_id for broker in cluster.brokers)
        }
        answers: dict[int, T] = {}
        silent: dict[int, BrokerUnavailable] = {}
        for number, answer in asking.items():
            try:
                answers[number] = await answer
            except BrokerUnavailable as error:
                silent[number] = error
        if not answers:
            raise BrokerUnavailable(f"{step} at {self._client.addresses}: no broker answers")
        return answers, silent

    async def _by_leader(self, topic: str, partitions: list[int], deadline: float) -> dict[int, list[int]]:
        """Sort partitions by the broker that leads them; -1: none does for now."""
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

    async def _list_offsets(
        self, topic: str, partitions: list[int], leader: int, timestamp: int, deadline: float, *, stable: bool = False
    ) -> dict[int, int]:
        """Read uncommitted, so the high watermark, unless it is to be ``stable``."""
        topic_of = ListOffsetsRequest.ListOffsetsTopic
        # Without a leader epoch: an old one would be refused (FENCED_LEADER_EPOCH) after a broker's restart.
        queries = [
            topic_of.ListOffsetsPartition(partition_index=number, current_leader_epoch=-1, timestamp=timestamp)
            for number in partitions
        ]
        request = ListOffsetsRequest(
            replica_id=-1, isolation_level=int(stable), max_version=5, topics=[topic_of(name=topic, partitions=queries)]
        )
        answer = await self._client.send(request, leader, deadline)
        return {entry.partition_index: entry.offset for entry in entries_of(answer.topics)}

    async def _metadata(self, topic: str, deadline: float) -> Any:
        return (await self._described(topic, deadline))[0]

    async def _described(self, topic: str, deadline: float) -> tuple[Any, str]:
        """Return a topic's metadata, and the id of the cluster that answers."""
        answer = await self._client.send(_metadata_request([topic]), None, deadline)
        raise_for(answer.topics[0].error_code)
        return answer.topics[0], answer.cluster_id or ""


def _metadata_request(topics: list[str]) -> Any:
    return MetadataRequest(
        topics=[MetadataRequest.MetadataRequestTopic(name=name) for name in topics],
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
        min_version=10,
    )
