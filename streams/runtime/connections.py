"""The real ``ports.Connections``: librdkafka reads, our own requests are membership, questions and transactions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from streams.core.strategies import PlanSettings, assignor
from streams.kafka.group.broker_membership import connect_broker_group
from streams.kafka.group.connect import connect_group
from streams.kafka.group.status_board import StatusBoard
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.takeover import SourceLog
from streams.kafka.reading.consumer import LogConsumer
from streams.kafka.reading.fetch_session import FOLLOWING
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.cluster import Cluster
from streams.kafka.wire.security import Security
from streams.kafka.wire.settings import ProducerSettings
from streams.kafka.writing.encoded_transaction import EncodedTransaction
from streams.kafka.writing.plain_producer import PlainProducer
from streams.kafka.writing.slot import WireSlot
from streams.model.group import Membership, TakeOver
from streams.model.partitioners import NullKeys, PlaceOf
from streams.model.topics import SentTo
from streams.records import DEFAULT_MESSAGE_LIMIT
from streams.runtime.bridge import Worker, in_process, wait_for
from streams.runtime.ports import Input
from streams.runtime.reading.followed_topic import LogConnections
from streams.runtime.reading.log_follower import Tail
from streams.runtime.reading.poller import Poller
from streams.settings.config import EventSourceConfig

T = TypeVar("T")

ROOM_POLLS = 8
"""So many polls' worth of records may be on their way to handlers, over all partitions: enough to never run dry."""


class KafkaConnections:
    """The clients of one event source (``ports.Connections`` documents the methods). Building a client does no I/O but
    may take milliseconds."""

    worker = staticmethod(Worker)
    in_process = staticmethod(in_process)
    wait_for = staticmethod(wait_for)

    def __init__(self, config: EventSourceConfig) -> None:
        self._config = config
        ours: dict[str, Any] = {"client_id": f"{config.group_id}.{config.instance_id}", "group_id": config.group_id}
        self._settings = self._source_settings = ClientSettings(
            config.bootstrap_servers, config.client_settings, **ours
        )
        if config.source_is_elsewhere:
            # The settings of our own cluster are left out: its passwords are no business of another one.
            self._source_settings = ClientSettings(
                config.source_bootstrap_servers, config.source_client_settings, **ours
            )
        self._cluster: Cluster | None = None  # of the slots, which share it
        self._inputs = 1  # topics that are read
        self._security = Security.of(config.client_settings)

    @property
    def message_limit(self) -> int:
        """Return the size of the largest record that a producer takes, in bytes."""
        return int(self._config.client_settings.get("message.max.bytes", DEFAULT_MESSAGE_LIMIT))

    def cluster(self) -> Cluster:
        """Return the cluster as the slots share it."""
        # All slots have one: they share connections, and what is known of leaders.
        if self._cluster is None:
            settings = self._settings
            self._cluster = Cluster(
                ProducerSettings.of(settings.bootstrap_servers, settings.client_id, self._config.client_settings)
            )
        return self._cluster

    def place_by(self, partitioners: Mapping[str, PlaceOf], null_keys: Mapping[str, NullKeys]) -> None:
        self.cluster().partitioner_of, self.cluster().null_keys_of = partitioners.get, null_keys.get

    def records(self, topics: SentTo | None = None) -> EncodedTransaction:
        return EncodedTransaction(self.cluster(), self._config.timeouts.call_timeout_seconds, topics)

    def slot(self, transactional_id: str) -> WireSlot:
        config = self._config
        return WireSlot(
            transactional_id,
            self.cluster(),
            config.group_id,
            call_timeout_seconds=config.timeouts.call_timeout_seconds,
            transaction_timeout_seconds=config.timeouts.transaction_timeout_seconds,
        )

    def plain_producer(
        self,
        bootstrap_servers: str,
        client_settings: Mapping[str, object],
        delivery_timeout_seconds: float,
    ) -> PlainProducer:
        config = self._config
        settings = ClientSettings(
            bootstrap_servers or config.bootstrap_servers,
            # Of another cluster nothing here is known, not even its security.
            client_settings if bootstrap_servers else {**config.client_settings, **client_settings},
            client_id=self._settings.client_id,
        )
        timeout_ms = int(delivery_timeout_seconds * 1000)
        return PlainProducer(settings, delivery_timeout_ms=timeout_ms)

    def consumer(self) -> LogConsumer:
        """Build the consumer of the source topic."""
        # Each of several inputs waits for the others, so their consumers report ends.
        return LogConsumer(self._source_settings, self._config.topic, ends=self._inputs > 1)

    def input(self) -> Poller:
        return self._poller(self.consumer)

    def further_inputs(self, topics: Sequence[str]) -> list[Input]:
        # This is set before the consumer of the source is built, which depends on it.
        self._inputs = 1 + len(topics)
        return [self._poller(partial(LogConsumer, self._settings, topic, ends=True)) for topic in topics]

    def _poller(self, connect: Callable[[], LogConsumer]) -> Poller:
        """Build the thread that reads one input; all of a process share the room."""
        queues, inputs = self._config.queues, self._inputs
        return Poller(
            connect,
            max_poll_records=queues.max_poll_records,
            # Of several inputs one waits for the other: so there is room until a full queue is paused, and behind it.
            room=ROOM_POLLS * queues.max_poll_records if inputs == 1 else 2 * queues.max_queued_records,
            # It is never 0, however small the setting: the poll thread would wait for room without end.
            room_bytes=max(1, min(queues.max_queued_bytes, (queues.max_queued_bytes_total + 1) // 2) // inputs),
        )

    def reader(self) -> PartitionReader:
        return PartitionReader(self._settings)

    def tail(self) -> Tail:
        """Build the tail thread and its consumer, for warm copies and restores from the changelog."""
        # The changelog is on our own cluster, wherever the source is.
        return Tail(lambda: LogFetcher(self._settings, self._config.changelog, FOLLOWING))

    def followed(self, topic: str) -> LogConnections:
        return LogConnections(self._settings, topic)

    def topics(self) -> TopicAdmin:
        return TopicAdmin(self._settings)

    def source_topics(self) -> TopicAdmin:
        return TopicAdmin(self._source_settings)

    def source_log(self) -> SourceLog:
        config = self._config
        security = Security.of(config.source_client_settings)
        return SourceLog(config.source_bootstrap_servers, config.instance_id, security)

    def status_board(self) -> StatusBoard:
        config = self._config
        return StatusBoard(config.bootstrap_servers, config.instance_id, self._security, config.group_id)

    def group(self, alive: Callable[[], bool]) -> tuple[Membership, TakeOver]:
        """Build the membership and the requests of a take-over; ``Membership.close`` closes both."""
        config = self._config
        common: dict[str, Any] = {
            "session_timeout_ms": int(config.timeouts.session_timeout_seconds * 1000),
            "heartbeat_interval_ms": int(config.timeouts.heartbeat_interval_seconds * 1000),
            "rebalance_timeout_ms": int(config.timeouts.rebalance_timeout_seconds * 1000),
            "static": config.group.static_membership,
            "security": Security.of(config.client_settings),
            "alive": alive,
            "changelog": config.changelog,
        }
        place = (
            config.bootstrap_servers, config.group_id, config.offsets_topic, config.num_partitions, config.instance_id
        )  # fmt: skip
        if config.group.membership == "broker":
            transaction_ms = int(config.timeouts.transaction_timeout_seconds * 1000)
            return connect_broker_group(
                *place, config.group.strategies, transaction_timeout_ms=transaction_ms, **common
            )
        settings = PlanSettings(
            num_standbys=config.group.num_standbys,
            max_moves=config.group.max_moves,
            max_move_bytes=config.group.max_move_bytes,
        )
        return connect_group(*place, {name: assignor(name, settings) for name in config.group.strategies}, **common)
