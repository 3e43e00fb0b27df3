"""The broker requests of a take-over: ``streams.model.group.TakeOver`` over our own wire.

Why not librdkafka: its clients cannot list or fence transactions, wait for stable offsets in steps of 100 to 500 ms,
and one that lived through a broker restart may answer FENCED_LEADER_EPOCH to every request. Here each request reads
the cluster's metadata first.

Threads: all methods block and may be called from any thread but the client's, several at once.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Collection, Mapping

from streams.errors import BrokerUnavailable, StreamsError
from streams.kafka import permissions
from streams.kafka.questions.asking import Questions
from streams.kafka.questions.groups import leave_group
from streams.kafka.questions.hanging_transactions import HangingTransactions
from streams.kafka.questions.open_transactions import OPEN_STATES, OpenTransactions, list_transactions
from streams.kafka.questions.requests import OffsetEntry, commit, committed
from streams.kafka.wire.client import GROUP, TRANSACTION, WireClient
from streams.kafka.wire.codes import BrokerRefusal, Code, entries_of, raise_for
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.schemas.describe_log_dirs import DescribeLogDirsRequest
from streams.kafka.wire.schemas.heartbeat import HeartbeatRequest
from streams.kafka.wire.schemas.init_producer_id import InitProducerIdRequest
from streams.kafka.wire.security import Security
from streams.kafka.wire.topic_questions import EARLIEST, LATEST, check_complete
from streams.model.group import GroupMetadata, HangingEnd, OpenTransaction, instance_of
from streams.model.topics import TopicIdentity

log = logging.getLogger(__name__)

_FENCE_TIMEOUT_MS = 5000
"""Milliseconds: the transaction timeout of the throw-away producer, which never begins a transaction."""

_FENCE, _LOG_DIRS = 4, 4  # the newest versions: above them InitProducerId is of clients that speak v2

_NOT_A_MEMBER = (
    Code.UNKNOWN_MEMBER_ID,
    Code.ILLEGAL_GENERATION,
    Code.FENCED_INSTANCE_ID,
    Code.REBALANCE_IN_PROGRESS,
    Code.STALE_MEMBER_EPOCH,  # of the broker's protocol (KIP-848)
)
FENCE_SECONDS = 3.0
"""Seconds for ending one open transaction: its coordinator may have to be found, and the markers to be written."""


class WireTakeOver(Questions):
    """Questions of one group about its source ``topic``, on a client that it shares and does not close.
    ``streams.model.group.TakeOver`` documents the methods."""

    def __init__(self, client: WireClient, group_id: str, topic: str, *, changelog: str = "") -> None:
        super().__init__(client)
        self._group_id, self._topic = group_id, topic
        self._changelog = changelog
        self._membership = [permissions.on_group("Read", group_id)]

    def fence_departed(self, members: Collection[str], deadline: float) -> list[str]:
        """End open transactions of this group's instances that are not in ``members``; returns their transactional ids.

        Done by a throw-away InitProducerId: it aborts what is open, and fences the producer that held it. Raises
        ``ConfigError`` without the right to describe and write transactional ids.

        Brokers are queried side by side. One that does not answer within ``BROKER_SECONDS``, or an abort that takes
        longer than ``FENCE_SECONDS``, is left out with a warning: **a missed fence costs time, no record**.
        """

        async def work() -> list[str]:
            # In this order: an instance that joins and begins a transaction in between would else be taken for one that
            # has departed.
            found = await self._open_ids(deadline)
            owners = {name: instance_of(self._group_id, name) for name in found}
            if not any(owners.values()):
                return []
            present = await self._present(members, deadline)
            departed = [name for name, owner in owners.items() if owner and owner not in present]
            ended = await asyncio.gather(*(self._is_ended(name, deadline) for name in departed))
            return sorted(name for name, is_ended in zip(departed, ended, strict=True) if is_ended)

        return self._run(deadline, work)

    async def _present(self, members: Collection[str], deadline: float) -> frozenset[str]:
        """The instances that are alive, as the group's plan has them."""
        return frozenset(members)

    def stable_offsets(self, partitions: Collection[int], deadline: float, topic: str = "") -> dict[int, int | None]:
        return self._asked_offsets(topic or self._topic, partitions, deadline, stable=True)

    def committed_offsets(self, partitions: Collection[int], deadline: float, topic: str) -> dict[int, int | None]:
        return self._asked_offsets(topic, partitions, deadline, stable=False)

    def _asked_offsets(
        self, topic: str, partitions: Collection[int], deadline: float, *, stable: bool
    ) -> dict[int, int | None]:
        numbers, step = sorted(set(partitions)), f"reading the offsets of group {self._group_id}"
        needed = permissions.on_group("Describe", self._group_id), permissions.on_topic("Describe", topic)
        return self._ask(step, deadline, lambda limit: self._offsets(topic, numbers, limit, stable=stable), needed)

    def notes(self, partitions: Collection[int], deadline: float) -> dict[int, str]:
        numbers, step = sorted(set(partitions)), f"reading the notes of group {self._group_id}"
        needed = permissions.on_group("Describe", self._group_id), permissions.on_topic("Describe", self._changelog)

        async def attempt(limit: float) -> dict[int, str]:
            entries = await self._committed(self._changelog, numbers, limit, stable=False)
            return {entry.partition_index: entry.metadata for entry in entries if entry.metadata}

        return self._ask(step, deadline, attempt, needed)

    def note(self, partition: int, text: str, member: GroupMetadata, deadline: float) -> bool:
        if member.generation < 0:  # -1 is never fenced: the note could be written by a member that has been lost
            return False
        place = {(self._changelog, partition): (0, text)}
        needed = [*self._membership, permissions.on_topic("Read", self._changelog)]

        async def attempt(limit: float) -> bool:
            try:
                await commit(
                    self._client,
                    self._group_id,
                    place,
                    limit,
                    generation=member.generation,
                    member_id=member.member_id,
                )
            except BrokerRefusal as refusal:
                if refusal.code not in _NOT_A_MEMBER:
                    raise
                return False
            return True

        return self._ask(f"writing a note of group {self._group_id}", deadline, attempt, needed)

    def is_member(self, member_id: str, generation: int, deadline: float, settled: bool = False) -> bool:
        """Check whether the group has this member in this generation, and no newer one: by a heartbeat.

        ``False``: it has not, or its protocol has no such heartbeat (KIP-848). A static member needs no instance here:
        a successor in its place gets another id, and this one is unknown from then on.
        """
        request = HeartbeatRequest(group_id=self._group_id, generation_id=generation, member_id=member_id)

        async def attempt(limit: float) -> bool:
            node = await self._client.coordinator(GROUP, self._group_id, limit)
            code = (await self._client.send(request, node, limit)).error_code
            # A rebalance that is being prepared has taken nothing from a member yet, but may at any moment from now on.
            return code == Code.NONE or (not settled and code == Code.REBALANCE_IN_PROGRESS)

        return self._ask(f"asking group {self._group_id} for {member_id}", deadline, attempt, self._membership)

    def log_range(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, tuple[int, int]]:
        numbers, step = sorted(set(partitions)), f"reading the offsets of topic {topic}"
        needed = [permissions.on_topic("Describe", topic)]
        return self._ask(step, deadline, lambda limit: self._range(topic, numbers, limit), needed)

    def stable_end(self, topic: str, partition: int, deadline: float) -> int:
        return self._offset(topic, partition, LATEST, deadline, stable=True)

    def offset_of_time(self, topic: str, partition: int, timestamp_ms: int, deadline: float) -> int | None:
        found = self._offset(topic, partition, timestamp_ms, deadline, stable=False)
        return found if found >= 0 else None

    def _offset(self, topic: str, partition: int, timestamp: int, deadline: float, *, stable: bool) -> int:

        async def attempt(limit: float) -> int:
            ((leader, numbers),) = (await self._by_leader(topic, [partition], limit)).items()
            return (await self._list_offsets(topic, numbers, leader, timestamp, limit, stable=stable))[partition]

        step, needed = f"reading the offsets of topic {topic}", [permissions.on_topic("Describe", topic)]
        return self._ask(step, deadline, attempt, needed)

    def identity(self, topic: str, deadline: float) -> TopicIdentity:

        async def attempt(limit: float) -> TopicIdentity:
            answer, cluster = await self._described(topic, limit)
            name = base64.urlsafe_b64encode(answer.topic_id.bytes).decode().rstrip("=")
            return TopicIdentity(name, len(answer.partitions), cluster)

        return self._ask(f"asking for topic {topic}", deadline, attempt, [permissions.on_topic("Describe", topic)])

    def delete_records(self, topic: str, before: Mapping[int, int], deadline: float) -> None:
        step, needed = f"deleting records of topic {topic}", [permissions.on_topic("Delete", topic)]
        self._ask(step, deadline, lambda limit: self._delete_records(topic, before, limit), needed)

    def remove_member(self, member_id: str, instance: str | None, deadline: float) -> bool:
        if not member_id:  # by the instance alone it would hit the successor of the dead member
            raise ValueError("remove_member needs a member id")

        async def attempt(limit: float) -> bool:
            try:
                return await leave_group(self._client, self._group_id, member_id, instance, limit)
            except BrokerRefusal as refusal:
                if refusal.code not in (Code.FENCED_INSTANCE_ID, Code.UNKNOWN_MEMBER_ID):
                    raise
                return False

        step = f"removing {member_id} from group {self._group_id}"
        return self._ask(step, deadline, attempt, self._membership)

    def open_transactions(self, topic: str, partitions: Collection[int], deadline: float) -> list[OpenTransaction]:
        return OpenTransactions(self._client).find(topic, partitions, deadline)

    def judge_hanging(self, txn: OpenTransaction, deadline: float) -> HangingEnd:
        return HangingTransactions(self._client).judge(txn.topic, txn.partition, txn.start_offset, deadline)

    def end_hanging(self, end: HangingEnd, deadline: float) -> None:
        HangingTransactions(self._client).end(end, deadline)

    def log_sizes(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, int]:
        # Brokers may refuse all of it: the request takes the right to describe the cluster.

        async def work() -> dict[int, int]:
            step = f"asking for the leaders of topic {topic}"
            numbers = sorted(set(partitions))
            by_leader = await self._until(deadline, step, lambda limit: self._by_any_leader(topic, numbers, limit))
            asking = [self._log_dirs(topic, led, leader, deadline) for leader, led in by_leader.items()]
            sizes: dict[int, int] = {}
            for answer in await asyncio.gather(*asking, return_exceptions=True):
                if isinstance(answer, BrokerRefusal | LostConnection):
                    log.debug("sizes of topic %s on disk: %r", topic, answer)
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    sizes |= answer
            return sizes

        try:
            return self._run(deadline, work) if partitions else {}
        except StreamsError as error:
            log.debug("sizes of topic %s on disk: %s", topic, error)
            return {}

    # ------------------------------------------------------------------ the client's loop

    async def _open_ids(self, deadline: float) -> list[str]:
        """Transactional ids with an open transaction, of all groups: each broker knows those that it coordinates."""
        lists, silent = await self._each_broker(
            "listing transactions",
            deadline,
            lambda node, limit: list_transactions(self._client, node, limit, states=OPEN_STATES),
        )
        for number, error in silent.items():
            log.warning("broker %d is left out, what departed members left open there ends later: %s", number, error)
        return [name for names in lists.values() for name in names]

    async def _is_ended(self, name: str, deadline: float) -> bool:
        try:
            await self._fence(name, deadline)
        except BrokerUnavailable as error:
            # A missed fence costs time, no record. If it has sent its offsets, the barrier (``stable_offsets``) waits
            # for its end. If not, the broker refuses them, because the generation is over, and without offsets no
            # producer commits it. Its records keep ``read_committed`` readers below them, so they hold up the
            # partitions that it wrote to, and no others; a take-over that is held up fences again.
            log.warning("the open transaction of %s is not ended yet: %s", name, error)
            return False
        return True

    async def _fence(self, transactional_id: str, deadline: float) -> None:
        """Fence one transactional id. After CONCURRENT_TRANSACTIONS (the abort is under way) it is tried again."""
        deadline = min(deadline, asyncio.get_running_loop().time() + FENCE_SECONDS)
        step, needed = f"fencing {transactional_id}", [permissions.on_transactional_id("Write", transactional_id)]
        await self._until(deadline, step, lambda limit: self._fence_once(transactional_id, limit), needed)

    async def _fence_once(self, transactional_id: str, deadline: float) -> None:
        node = await self._client.coordinator(TRANSACTION, transactional_id, deadline)
        request = InitProducerIdRequest(
            transactional_id=transactional_id,
            transaction_timeout_ms=_FENCE_TIMEOUT_MS,
            producer_id=-1,
            producer_epoch=-1,
        )
        raise_for((await self._client.send(request, node, deadline, most=_FENCE)).error_code)

    async def _offsets(
        self, topic: str, partitions: list[int], deadline: float, *, stable: bool
    ) -> dict[int, int | None]:
        found = {
            entry.partition_index: entry.committed_offset
            for entry in await self._committed(topic, partitions, deadline, stable=stable)
        }
        # A partition that the answer leaves out may have an offset; without it, it would be read from its start.
        check_complete(found, topic, partitions)
        return {number: found[number] if found[number] >= 0 else None for number in partitions}

    async def _committed(
        self, topic: str, partitions: list[int], deadline: float, *, stable: bool
    ) -> list[OffsetEntry]:
        if not partitions:
            return []
        found = await committed(self._client, self._group_id, deadline, {topic: partitions}, stable=stable)
        return list(entries_of(found.topics))

    async def _range(self, topic: str, partitions: list[int], deadline: float) -> dict[int, tuple[int, int]]:
        if not partitions:
            return {}
        by_leader = await self._by_leader(topic, partitions, deadline)
        # All of them at once: a take-over waits for the slowest leader, not for their sum.
        first, last = await asyncio.gather(
            *(self._offsets_by_leader(topic, by_leader, at, deadline) for at in (EARLIEST, LATEST))
        )
        return {number: (first[number], last[number]) for number in partitions}

    async def _log_dirs(self, topic: str, partitions: list[int], leader: int, deadline: float) -> dict[int, int]:
        if leader < 0:
            raise BrokerRefusal(Code.LEADER_NOT_AVAILABLE)
        topic_of = DescribeLogDirsRequest.DescribableLogDirTopic
        request = DescribeLogDirsRequest(topics=[topic_of(topic=topic, partitions=partitions)])
        answer = await self._client.send(request, leader, deadline, most=_LOG_DIRS)
        raise_for(answer.error_code)  # older brokers answer a refusal with nothing
        sizes: dict[int, int] = {}
        for folder in answer.results:  # one that is offline has an error, and no topics
            for entry in (entry for found in folder.topics for entry in found.partitions):
                if not entry.is_future_key:  # a copy on its way to another folder
                    sizes[entry.partition_index] = entry.partition_size
        return sizes


class SourceLog(WireTakeOver):
    """``runtime.ports.SourceLog``: questions about a source topic that lives on another cluster, on a connection of its
    own. Making one starts a thread and does no I/O. Raises ``ConfigError`` for
    addresses that are none."""

    def __init__(self, bootstrap_servers: str, client_id: str, security: Security) -> None:
        client = WireClient(bootstrap_servers, client_id, security)
        client.start()
        super().__init__(client, "", "")

    def close(self) -> None:
        """End the thread and the connection; blocks for a moment."""
        self._client.close()


def remove_dead_member(
    bootstrap_servers: str, security: Security, group_id: str, topic: str, member_id: str, seconds: float
) -> bool:
    """Take a member that is known to be dead out of a group, by a client of its own: see ``TakeOver.remove_member``.
    Blocks, at most so long. Raises ``BrokerUnavailable``, ``ConfigError``."""
    with WireClient(bootstrap_servers, "kes-remove", security) as client:
        return WireTakeOver(client, group_id, topic).remove_member(member_id, None, time.monotonic() + seconds)
