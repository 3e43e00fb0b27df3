"""The cluster as the slots of one event source share it: brokers, leaders of partitions, coordinators, topics.

On the loop. Questions go to any broker that answers, one at a time, over a connection of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final
from uuid import UUID

from streams.errors import TransactionFailed
from streams.kafka.wire.codes import Code, is_retriable, name_of
from streams.kafka.wire.connection import BrokerConnection, LostConnection, connect
from streams.kafka.wire.lines import Address, address_of
from streams.kafka.wire.message import AnswerT, Request
from streams.kafka.wire.messages import LEAST_VERSIONS
from streams.kafka.wire.placement import BATCH_HEAD, DeclaredPlacement, Placement
from streams.kafka.wire.schemas.describe_configs import DescribeConfigsRequest
from streams.kafka.wire.schemas.find_coordinator import FindCoordinatorRequest
from streams.kafka.wire.schemas.metadata import MetadataRequest, MetadataResponse
from streams.kafka.wire.settings import ProducerSettings
from streams.model.partitioners import NO_NULL_KEYS, NO_PARTITIONERS, NullKeys, PlaceOf

GROUP: Final = 0
TRANSACTION: Final = 1
REFRESH_SECONDS: Final = 300.0
"""Age in seconds at which metadata are fetched again: that is how added partitions are found. librdkafka has the same
(``topic.metadata.refresh.interval.ms``)."""
UNKNOWN_SECONDS: Final = 2.0
"""Seconds for which a topic may be unknown before its records are blocked: one just made is not known everywhere."""
ANSWER_SECONDS: Final = 2.0
"""Seconds that a broker has for one request, with the connection; then the next broker gets it."""
FIRST_BATCH_LIMIT: Final = 1_000_000 - BATCH_HEAD
"""Bytes of a batch: below the broker's default of 1,048,588 for a topic's ``max.message.bytes``."""
_PAUSE_SECONDS: Final = 0.05
"""Seconds of pause behind each request for the metadata of a topic that is looked for."""
_TOPIC_SECONDS: Final = 10.0
"""Seconds for a request in the background."""
_METADATA, _FIND_COORDINATOR = 12, 4  # the versions of Kafka 4.1 that name topics by name, and keys in a list
_DESCRIBE_CONFIGS, _TOPIC, _BATCH_LIMIT = 4, 2, "max.message.bytes"


class Cluster:
    """The state of the cluster, as far as the slots need it. ``wall_seconds`` returns the time for records that have
    none of their own. ``needed`` and ``kind``: as of ``connect``."""

    def __init__(
        self,
        settings: ProducerSettings,
        wall_seconds: Callable[[], float] = time.time,
        needed: Mapping[int, tuple[str, int]] = LEAST_VERSIONS,
        kind: type[BrokerConnection] = BrokerConnection,
    ) -> None:
        self.settings, self._wall_seconds, self._needed, self._kind = settings, wall_seconds, needed, kind
        self._bootstrap = [address_of(part) for part in settings.bootstrap_servers.split(",")]
        self._brokers: dict[int, Address] = {}
        self._any: BrokerConnection | None = None
        self._asking = asyncio.Lock()
        self._turn = -1
        self._refreshes: dict[str, asyncio.Task[None]] = {}
        self._refreshed_at = 0.0
        self.partitioner_of: Callable[[str], PlaceOf | None] = NO_PARTITIONERS.get
        self.null_keys_of: Callable[[str], NullKeys | None] = NO_NULL_KEYS.get
        """The function that places the keys of a topic; ``None``: murmur2. Set before the first metadata."""
        self.placements: dict[str, Placement] = {}
        """The topics that are known, for encoding."""
        self.leaders: dict[str, list[int]] = {}
        """The leader of each partition; -1: none."""
        self.epochs: dict[str, list[int]] = {}
        """The epoch of the leader of each partition."""
        self.ids: dict[str, UUID] = {}
        """The id of each topic; of a broker that has none, 0."""
        self.noted_at: dict[str, float] = {}
        """The loop's time of the newest metadata of each topic."""
        self._unknown: dict[str, tuple[int, float]] = {}
        self._wanted: dict[str, float] = {}
        self._refresh_failure: LostConnection | None = None

    def now_ms(self) -> int:
        """Return the time for records without one of their own."""
        return int(self._wall_seconds() * 1000)

    async def connect(self, node: int) -> BrokerConnection:
        """Make a connection to a broker. Raises ``LostConnection``."""
        if node not in self._brokers:
            raise LostConnection(f"no broker {node} is known")
        return await self._connect(*self._brokers[node])

    def leader_of(self, topic: str, partition: int) -> int:
        """Return the broker that leads a partition; -1: none does, or the partition is not known."""
        leaders = self.leaders.get(topic, [])  # recreated, or a broker that lags
        return leaders[partition] if partition < len(leaders) else -1

    async def refresh(self, topics: Collection[str]) -> None:
        """Fetch the metadata of topics. Raises ``LostConnection``."""
        has_all = self.placements.keys() <= set(topics)
        named = [MetadataRequest.MetadataRequestTopic(name=topic) for topic in topics]
        answer = await self._ask(MetadataRequest(topics=named, allow_auto_topic_creation=False), _METADATA)
        # Before any of it is noted: with a gap the number of partitions is wrong, and keys would go to other ones.
        for topic in answer.topics:
            if {entry.partition_index for entry in topic.partitions} != {*range(len(topic.partitions))}:
                raise LostConnection(f"the metadata of {topic.name} skip partitions, or name them twice", "_BAD_MSG")
        self._brokers |= {broker.node_id: (broker.host, broker.port) for broker in answer.brokers}
        for topic in answer.topics:
            self._note(topic.name or "", topic)
        if has_all:
            self._refreshed_at = asyncio.get_running_loop().time()

    def forget(self, topic: str) -> None:
        """Forget a topic, so that the next metadata say whether it is still there."""
        self.placements.pop(topic, None)
        self.leaders.pop(topic, None)

    def refresh_if_old(self) -> None:
        """Fetch everything again, in the background, if it is old."""
        if self.placements and asyncio.get_running_loop().time() - self._refreshed_at > REFRESH_SECONDS:
            self._refresh_behind("", list(self.placements))

    def refresh_topic(self, topic: str) -> None:
        """Fetch the metadata of a topic that is not known yet, in the background, some times a second."""
        self._wanted.setdefault(topic, asyncio.get_running_loop().time())
        self._refresh_behind(topic, [topic])

    def check_patience(self, topic: str, seconds: float) -> None:
        """Raise ``TransactionFailed`` if no broker has said anything of a topic that is looked for, for so long."""
        if asyncio.get_running_loop().time() - self._wanted[topic] > seconds:
            self._wanted.pop(topic)
            failure = self._refresh_failure or LostConnection("no answer", "_TIMED_OUT")
            reason = f"no metadata of {topic} for {seconds:g} seconds: {failure}"
            raise TransactionFailed("produce", failure.code, "unknown", reason)

    def unknown_since(self, topic: str) -> tuple[int, float] | None:
        """Return the broker's code for a topic that cannot be used, and for how many seconds it has been so."""
        found = self._unknown.get(topic)
        return None if found is None else (found[0], asyncio.get_running_loop().time() - found[1])

    async def batch_limit(self, topic: str) -> int:
        """Return the bytes of the largest batch that a topic takes (its ``max.message.bytes``); 0: not known, the
        principal may not read the settings of topics. Raises ``LostConnection``."""
        resource = DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=_TOPIC, resource_name=topic, configuration_keys=[_BATCH_LIMIT]
        )
        answer = await self._ask(DescribeConfigsRequest(resources=[resource]), _DESCRIBE_CONFIGS)
        for result in answer.results:
            for config in result.configs:
                if config.name == _BATCH_LIMIT:
                    return int(config.value or 0)
        return 0

    def too_large(self, topic: str, size: int, limit: int) -> None:
        """Note that a topic refused a batch of ``size`` bytes, of which no record is too large for ``limit``: the next
        ones are smaller, in the end of one record each."""
        placement = self.placements[topic]
        fits = limit - BATCH_HEAD
        # A quarter, where the limit may not be read: a transaction is sent few times before its source stops.
        placement.limit = max(1, min(placement.limit, fits if 0 < fits < size else size // 4))

    async def coordinator(self, kind: int, key: str) -> int:
        """Return the broker that coordinates a group or a transactional id, as soon as there is one.

        Raises ``LostConnection``; its code is the broker's name of an error that waiting does not cure.
        """
        while True:
            request = FindCoordinatorRequest(key=key, key_type=kind, coordinator_keys=[key])
            answer = await self._ask(request, _FIND_COORDINATOR)
            found = answer.coordinators[0] if answer.coordinators else answer  # before v4 it is the answer itself
            if not found.error_code:
                if not found.host:
                    raise LostConnection(f"no coordinator for {key}: the answer names none", "_BAD_MSG")
                self._brokers[found.node_id] = (found.host, found.port)
                return found.node_id
            if not is_retriable(found.error_code):
                name = name_of(found.error_code)
                raise LostConnection(f"no coordinator for {key}: {name}", name)
            await asyncio.sleep(0.02)  # the call that this is a part of has a deadline

    def close(self) -> None:
        """Close the connection for questions, and end those in the background; the next question makes another one."""
        for task in self._refreshes.values():
            task.cancel()
        self._drop()

    async def _ask(self, request: Request[AnswerT], version: int) -> AnswerT:
        async with self._asking:  # else two questions would each make a connection, and one be forgotten
            failures = []
            addresses = [*dict.fromkeys([*self._brokers.values(), *self._bootstrap])]
            for left in reversed(range(len(addresses) + 1)):
                try:
                    async with asyncio.timeout(ANSWER_SECONDS if left else None):  # the last one may take its time
                        if self._any is None:
                            # Another one each time: the caller's time may end while a frozen broker has the request.
                            self._turn += 1
                            self._any = await self._connect(*addresses[self._turn % len(addresses)])
                        return await self._any.ask(request, version)
                except (LostConnection, TimeoutError) as failure:
                    self._drop()
                    if isinstance(failure, LostConnection) and failure.code != "_TRANSPORT":
                        raise  # credentials or certificates: the next broker will not take them either
                    failures.append(str(failure) or f"no answer within {ANSWER_SECONDS:g} seconds")
                except BaseException:  # cancelled: an answer that comes late must not meet the next question
                    self._drop()
                    raise
            raise LostConnection("; ".join(dict.fromkeys(failures)))

    def _drop(self) -> None:
        if self._any is not None:
            self._any.close()
            self._any = None

    async def _connect(self, host: str, port: int) -> BrokerConnection:
        settings = self.settings
        return await connect(host, port, settings.client_id, settings.security, needed=self._needed, kind=self._kind)

    def _note(self, topic: str, said: MetadataResponse.MetadataResponseTopic) -> None:
        partitions = said.partitions
        now = asyncio.get_running_loop().time()
        self._wanted.pop(topic, None)
        self.noted_at[topic] = now
        if not partitions:
            if topic not in self.placements:  # else it is known, and this broker does not know it yet
                since = self._unknown.get(topic, (0, now))[1]
                self._unknown[topic] = (said.error_code or Code.UNKNOWN_TOPIC_OR_PARTITION, since)
            return
        self._unknown.pop(topic, None)
        leaders, epochs = [-1] * len(partitions), [-1] * len(partitions)
        for entry in partitions:
            leaders[entry.partition_index] = entry.leader_id
            epochs[entry.partition_index] = entry.leader_epoch
        known = self.placements.get(topic)
        if known is None or known.count != len(leaders):  # a transaction under way keeps the one it has
            self.placements[topic] = self._placement(topic, len(leaders))
        self.leaders[topic], self.epochs[topic], self.ids[topic] = leaders, epochs, said.topic_id

    def _placement(self, topic: str, count: int) -> Placement:
        place_of, null_keys = self.partitioner_of(topic), self.null_keys_of(topic) or "sticky"
        if place_of is None:
            return Placement(topic, count, FIRST_BATCH_LIMIT, null_keys)
        return DeclaredPlacement(topic, count, FIRST_BATCH_LIMIT, place_of, null_keys)

    def _refresh_behind(self, name: str, topics: Collection[str]) -> None:
        task = self._refreshes.get(name)
        if task is None or task.done():
            self._refreshes[name] = asyncio.get_running_loop().create_task(self._refresh_quietly(topics))

    async def _refresh_quietly(self, topics: Collection[str]) -> None:
        try:
            # No call bounds this one: without a bound of its own, a frozen broker could keep the connection for
            # questions from all others.
            async with asyncio.timeout(_TOPIC_SECONDS):
                await self.refresh(topics)
            self._refresh_failure = None
        except LostConnection as failure:
            self._refresh_failure = failure
        except TimeoutError:
            self._refresh_failure = LostConnection(f"no answer within {_TOPIC_SECONDS:g} seconds", "_TIMED_OUT")
        await asyncio.sleep(_PAUSE_SECONDS)


class SlotConnections:
    """The connections of one slot. A broker handles one request of a connection at a time, and a slow Produce of one
    slot must not hold up the end of another's transaction."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._by_broker: dict[int, BrokerConnection] = {}
        self._were_lost = False  # some that are replaced

    async def get(self, node: int) -> BrokerConnection:
        """Return the connection to a broker; a new one if it is lost, or must authenticate again soon."""
        connection = self._by_broker.get(node)
        if connection is not None:
            if connection.lost is None and asyncio.get_running_loop().time() < connection.expires_at:
                return connection
            self._were_lost = self._were_lost or connection.lost is not None
            connection.close()
        connection = self._by_broker[node] = await self._cluster.connect(node)
        return connection

    @property
    def are_lost(self) -> bool:
        """Check whether one was lost since ``forget_lost``, or there is none."""
        lost = any(connection.lost is not None for connection in self._by_broker.values())
        return self._were_lost or lost or not self._by_broker

    def forget_lost(self) -> None:
        """Forget those that were lost. A broker that is gone, or not needed any more, gets no other one."""
        # Also those of brokers that are not needed any more: they would count as lost forever, and each transaction
        # would be ended twice.
        self._by_broker = {node: found for node, found in self._by_broker.items() if found.lost is None}
        self._were_lost = False

    def values(self) -> list[BrokerConnection]:
        """Return all of them."""
        return list(self._by_broker.values())

    def close(self) -> None:
        """Close all of them, and the one for questions."""
        for connection in self._by_broker.values():
            connection.close()
        self._by_broker.clear()
        self._were_lost = True  # what was under way on them has no answer
        self._cluster.close()
