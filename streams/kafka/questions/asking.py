"""Questions to a cluster of which some brokers may not answer: no question waits for one of them for long."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from streams.errors import BrokerUnavailable, TopicError
from streams.kafka.permissions import Right
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import BrokerRefusal, Code, entries_of, raise_for
from streams.kafka.wire.schemas.delete_records import DeleteRecordsRequest
from streams.kafka.wire.topic_questions import TopicMetadata, check_complete, list_offsets, metadata, only

T = TypeVar("T")
BROKER_SECONDS = 2.0
"""Seconds for one answer of one broker. A frozen one costs as much, not the time of the whole step."""


class Questions:
    """Requests to brokers, on a client that is shared and not closed here. Coroutines run on the client's loop."""

    def __init__(self, client: WireClient) -> None:
        self._client = client
        self._lost = False  # the last question found no answer at the addresses that the cluster names

    def _ask(
        self, step: str, deadline: float, attempt: Callable[[float], Awaitable[T]], needed: Sequence[Right] = ()
    ) -> T:
        """Connect, and ``attempt`` it until it works, on any thread but the client's."""
        return self._run(deadline, lambda: self._until(deadline, step, attempt, needed))

    def _run(self, deadline: float, work: Callable[[], Awaitable[T]]) -> T:
        """Connect, and do it, on any thread but the client's."""

        async def connected() -> T:
            await self._connected(deadline)
            return await work()

        return self._client.call(connected, deadline)

    async def _connected(self, deadline: float) -> None:
        """Wait until a broker has answered, for the first time or after a question in vain."""
        # Otherwise the cluster's own list is used: ``connected`` begins at one of the configured addresses again, by
        # chance at a frozen one (18 s were seen).
        if self._lost or not self._client.brokers():
            await self._client.connected(deadline)
            self._lost = False

    async def _until(
        self, deadline: float, step: str, attempt: Callable[[float], Awaitable[T]], needed: Sequence[Right] = ()
    ) -> T:
        """Try as the client's ``until`` does; but no try waits longer for a broker than ``BROKER_SECONDS``: another one
        may lead by then."""
        patience, now = BROKER_SECONDS, asyncio.get_running_loop().time

        async def one_try() -> T:
            nonlocal patience
            limit = min(now() + patience, deadline)
            try:
                return await attempt(limit)
            finally:
                if now() >= limit:
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
        cluster = await self._until(deadline, step, functools.partial(metadata, self._client, ()))
        # Side by side, so a frozen broker costs ``BROKER_SECONDS`` once, however many there are.
        limit = asyncio.get_running_loop().time() + BROKER_SECONDS

        async def one(number: int) -> T | BrokerUnavailable:
            try:
                return await self._client.until(limit, step, functools.partial(question, number, limit), ())
            except BrokerUnavailable as error:
                return error

        numbers = [broker.node_id for broker in cluster.brokers]
        answers: dict[int, T] = {}
        silent: dict[int, BrokerUnavailable] = {}
        for number, answer in zip(numbers, await asyncio.gather(*map(one, numbers)), strict=True):
            if isinstance(answer, BrokerUnavailable):
                silent[number] = answer
            else:
                answers[number] = answer
        if not answers:
            raise BrokerUnavailable(f"{step} at {self._client.addresses}: no broker answers")
        return answers, silent

    async def _by_leader(self, topic: str, partitions: Sequence[int] | None, deadline: float) -> dict[int, list[int]]:
        """Sort partitions (``None``: all) by the broker that leads them. Raises ``BrokerRefusal`` when one has no
        leader."""
        by_leader = await self._by_any_leader(topic, partitions, deadline)
        if -1 in by_leader:
            raise BrokerRefusal(Code.LEADER_NOT_AVAILABLE)
        return by_leader

    async def _by_any_leader(
        self, topic: str, partitions: Sequence[int] | None, deadline: float
    ) -> dict[int, list[int]]:
        """Sort partitions (``None``: all) by the broker that leads them; -1: none does for now."""
        leaders = {
            entry.partition_index: entry.leader_id for entry in (await self._metadata(topic, deadline)).partitions
        }
        if partitions is None:
            partitions = sorted(leaders)
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
        times = {topic: dict.fromkeys(partitions, timestamp)}
        return (await list_offsets(self._client, times, leader, deadline, stable=stable))[topic]

    async def _offsets_by_leader(
        self, topic: str, by_leader: Mapping[int, list[int]], timestamp: int, deadline: float, *, stable: bool = False
    ) -> dict[int, int]:
        """``_list_offsets`` of all leaders at once."""
        answers = await asyncio.gather(
            *(
                self._list_offsets(topic, numbers, leader, timestamp, deadline, stable=stable)
                for leader, numbers in by_leader.items()
            )
        )
        return {number: offset for answer in answers for number, offset in answer.items()}

    async def _delete_records(self, topic: str, before: Mapping[int, int], deadline: float) -> dict[int, int]:
        """Delete the records before these offsets, by partition. Returns where the logs begin then."""
        topic_of = DeleteRecordsRequest.DeleteRecordsTopic
        begins: dict[int, int] = {}
        for leader, numbers in (await self._by_leader(topic, sorted(before), deadline)).items():
            partitions = [
                topic_of.DeleteRecordsPartition(partition_index=number, offset=before[number]) for number in numbers
            ]
            request = DeleteRecordsRequest(
                topics=[topic_of(name=topic, partitions=partitions)], timeout_ms=milliseconds_until(deadline)
            )
            answer = await self._client.send(request, leader, deadline)
            begins |= {entry.partition_index: entry.low_watermark for entry in entries_of(answer.topics)}
        check_complete(begins, topic, before)
        return begins

    async def _metadata(self, topic: str, deadline: float) -> TopicMetadata:
        return (await self._described(topic, deadline))[0]

    async def _described(self, topic: str, deadline: float) -> tuple[TopicMetadata, str]:
        """Return a topic's metadata, and the id of the cluster that answers."""
        answer = await metadata(self._client, [topic], deadline)
        found = only(answer.topics, f"topic {topic}")
        raise_for(found.error_code)
        return found, answer.cluster_id or ""


def milliseconds_until(deadline: float) -> int:
    """Return the time that a broker may take for a request, so that its own answer comes before the deadline."""
    return int(1000 * max(deadline - asyncio.get_running_loop().time(), 0.1))
