"""Read and change the topics of a cluster and the offsets of its groups."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, TypeVar

import msgspec
from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka import admin as _admin
from confluent_kafka.admin import AdminClient

from streams.errors import BrokerUnavailable, TopicError
from streams.kafka import permissions
from streams.kafka.connection import ConnectionLog
from streams.kafka.questions.lags import PartitionLag, Tails
from streams.kafka.settings import ClientSettings, build
from streams.kafka.translate import NO_ANSWER, NO_SUCH_TOPIC, NOT_AUTHORIZED, error_of, refused, request_failed
from streams.model.topics import TopicSpec, askable, missing

logger = logging.getLogger(__name__)

K = TypeVar("K")

_untyped: Any = _admin
"""confluent-kafka's admin module without types: its stubs do not re-export all names that its documentation has."""
_EARLIEST: Final = _untyped.OffsetSpec.earliest()
_LATEST: Final = _untyped.OffsetSpec.latest()
_ATTEMPT_SECONDS: Final = 3.0
"""Seconds of one request; then it is made again, until the call's own time is over."""
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5
"""Seconds between two requests: the first pause, and the longest, each twice as long as the one before."""
_CALLBACK_SECONDS: Final = 0.5
"""Seconds between two calls of error callbacks while an answer is waited for: all connections may be refused."""
_STUCK: Final = frozenset(
    {
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
    }
)
"""An admin client that lived through a restart of the broker may get these every time: it does not refresh its metadata
for the first two, and may go on waiting for connections that are no more. A new one does neither."""


class TopicDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as it is. ``topic_id`` changes when a topic is deleted and recreated."""

    name: str
    topic_id: str
    partitions: int
    replication_factor: int
    configs: dict[str, str]


class Watermarks(msgspec.Struct, frozen=True):
    """Offsets of one partition: the first record that is left, where ``read_committed`` stops (LSO), the end (HW)."""

    start: int
    stable: int
    end: int


class TopicAdmin:
    """Requests about topics and offsets. May be used by any thread; every method blocks.

    Each is bounded by its timeout. What passes (an election, a coordinator that is loading) is tried again until then;
    afterwards ``BrokerUnavailable``, with the addresses and the last error of a connection. ``TopicError``: the request
    itself is refused; ``ConfigError``: the credentials are.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._connection = ConnectionLog(settings.bootstrap_servers, "admin")
        self.tails = Tails(settings)
        self._lock = threading.Lock()
        # Kept until ``close``: a client that is garbage collected fails the requests of other threads (``_DESTROY``).
        self._retired: list[AdminClient] = []
        self._client: AdminClient = build(AdminClient, settings.admin(), self._connection)

    def describe(self, names: Collection[str], timeout_seconds: float = 10.0) -> dict[str, TopicDescription | None]:
        """Describe topics; ``None`` for one that does not exist. Never creates one (as a metadata request may)."""
        deadline = time.monotonic() + timeout_seconds
        found = self._layouts(names, deadline)
        configs = self._configs([name for name in names if found[name] is not None], deadline)
        result: dict[str, TopicDescription | None] = {}
        for name in names:
            topic = found[name]
            if topic is None or name not in configs:
                result[name] = None
            else:
                result[name] = TopicDescription(
                    name=name,
                    topic_id=str(topic.topic_id),
                    partitions=len(topic.partitions),
                    replication_factor=max((len(partition.replicas) for partition in topic.partitions), default=0),
                    configs=configs[name],
                )
        return result

    def identity(self, name: str, timeout_seconds: float = 10.0) -> tuple[str, int] | None:
        """Topic id and number of partitions; ``None``: there is no such topic. Asks for no settings, which a mere
        reader may not be allowed to see."""
        topic = self._layouts([name], time.monotonic() + timeout_seconds)[name]
        return None if topic is None else (str(topic.topic_id), len(topic.partitions))

    def create(self, specs: Sequence[TopicSpec], timeout_seconds: float = 30.0) -> list[str]:
        """Create what is missing, and wait until every partition of all ``specs`` has a leader.

        Returns the names of the topics that this call made. Topics that exist are left as they are (ask
        ``differences``), also when another client makes one at the same moment. Repeating is harmless.
        """
        deadline = time.monotonic() + timeout_seconds
        names = [spec.name for spec in specs]
        there = self._layouts(names, deadline)
        created = []
        for spec in specs:
            if there[spec.name] is None and self._create_one(spec, deadline):
                created.append(spec.name)
        self._wait(names, deadline, "has a leader", lambda topic: topic is not None and all_led(topic))
        return created

    def grow(self, name: str, partitions: int, timeout_seconds: float = 30.0) -> None:
        """Give a topic so many partitions, and wait until all have a leader. They can never be taken away again. One
        that has as many is left as it is. Raises ``TopicError`` for one that has more, or does not exist."""
        deadline = time.monotonic() + timeout_seconds
        if self._partitions(name, deadline) == partitions:
            return

        def attempt(client: AdminClient, seconds: float) -> Mapping[str, Future[Any]]:
            wanted = [_untyped.NewPartitions(name, partitions)]
            return client.create_partitions(wanted, operation_timeout=seconds, request_timeout=seconds)

        # A lost answer: the second attempt finds the partitions there, which is INVALID_PARTITIONS.
        expected = {KafkaError.INVALID_PARTITIONS}
        self._ask("adding partitions to topic", "Alter", attempt, deadline, expected)
        if (found := self._partitions(name, deadline)) > partitions:
            raise TopicError(f"topic {name} has {found} partitions, not {partitions}, and none can be taken away")
        self._wait(
            [name],
            deadline,
            f"has {partitions} partitions with a leader each",
            lambda topic: topic is not None and len(topic.partitions) == partitions and all_led(topic),
        )

    def differences(self, specs: Sequence[TopicSpec], timeout_seconds: float = 10.0) -> list[str]:
        """List the differences of the cluster from ``specs``: one sentence each, naming topic and setting."""
        found = self.describe([spec.name for spec in specs], timeout_seconds)
        return [sentence for spec in specs for sentence in differences(spec, found[spec.name])]

    def delete(self, names: Collection[str], timeout_seconds: float = 30.0) -> None:
        """Delete topics with everything in them, and wait until they are gone. Missing ones are no error."""
        deadline = time.monotonic() + timeout_seconds

        def attempt(client: AdminClient, seconds: float) -> Mapping[str, Future[Any]]:
            return client.delete_topics(list(dict.fromkeys(names)), operation_timeout=seconds, request_timeout=seconds)

        if names:
            self._ask("deleting topic", "Delete", attempt, deadline, NO_SUCH_TOPIC)
            self._wait(names, deadline, "is gone", lambda topic: topic is None)

    def watermarks(
        self, topic: str, partitions: Collection[int] | None = None, timeout_seconds: float = 10.0
    ) -> dict[int, Watermarks]:
        """Return start, LSO and end of partitions (all, if none are named). Three requests per broker."""
        deadline = time.monotonic() + timeout_seconds
        numbers = range(self._partitions(topic, deadline)) if partitions is None else partitions
        wanted = [TopicPartition(topic, number) for number in numbers]
        if not wanted:
            return {}
        # In this order: all three only grow, so start <= stable <= end also of a log that moves meanwhile.
        start = self._offsets(wanted, _EARLIEST, IsolationLevel.READ_UNCOMMITTED, deadline)
        stable = self._offsets(wanted, _LATEST, IsolationLevel.READ_COMMITTED, deadline)
        end = self._offsets(wanted, _LATEST, IsolationLevel.READ_UNCOMMITTED, deadline)
        return {number: Watermarks(start[number], stable[number], end[number]) for number in numbers}

    def offsets_at(self, topic: str, timestamp_ms: int, timeout_seconds: float = 10.0) -> dict[int, int]:
        """Return of each partition the offset of its first record of this time or later; -1: there is none."""
        deadline = time.monotonic() + timeout_seconds
        wanted = [TopicPartition(topic, number) for number in range(self._partitions(topic, deadline))]
        at = _untyped.OffsetSpec.for_timestamp(timestamp_ms)
        return self._offsets(wanted, at, IsolationLevel.READ_UNCOMMITTED, deadline)

    def committed(
        self, group: str, topic: str, timeout_seconds: float = 10.0, partitions: Collection[int] | None = None
    ) -> dict[int, int]:
        """The group's committed offsets; partitions without one are left out. Waits for pending transactions.

        ``partitions`` must be named for a topic that this cluster does not have (a stand-in for another cluster's).
        """
        deadline = time.monotonic() + timeout_seconds
        numbers = range(self._partitions(topic, deadline)) if partitions is None else partitions

        if not numbers:
            return {}
        wanted = [TopicPartition(topic, number) for number in numbers]
        connection = ConnectionLog(self._connection.addresses, "admin")
        # Not by the admin client, whose look-up of a group coordinator that is loading or was restarted never ends,
        # or crashes the process (an assertion about a reference count in librdkafka 2.16).
        config = {**self._settings.consumer(partition_eof=False, role="admin"), "group.id": group}
        consumer = build(Consumer, config, connection)
        try:
            return self._committed(consumer, group, wanted, connection, deadline)
        finally:
            consumer.close()

    def lag(self, group: str, topic: str, timeout_seconds: float = 10.0) -> list[PartitionLag]:
        """Return the group's lag in every partition of ``topic``, by partition."""
        return standing(self.committed(group, topic, timeout_seconds), self.watermarks(topic, None, timeout_seconds))

    def close(self) -> None:
        """Let go of the connections. Does not raise; later calls build them anew."""
        self.tails.close()
        with self._lock:
            self._retired.clear()

    def _committed(
        self,
        consumer: Consumer,
        group: str,
        wanted: list[TopicPartition],
        connection: ConnectionLog,
        deadline: float,
    ) -> dict[int, int]:
        pause = _FIRST_PAUSE
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            try:
                # By name: a question for "all" leaves out what has nothing but a pending offset, and does not wait.
                positions = consumer.committed(wanted, min(left, _ATTEMPT_SECONDS))
            except KafkaException as exception:
                error = error_of(exception)
            else:
                errors = [position.error for position in positions if position.error is not None]
                if not errors:
                    return {position.partition: position.offset for position in positions if position.offset >= 0}
                error = errors[0]
            message = consumer.poll(0)  # serve the error callback
            refusal = message.error() if message is not None else None
            if refusal is not None and refusal.code() in NOT_AUTHORIZED:  # a look-up of the coordinator: only seen here
                error = refusal
            left = deadline - time.monotonic()
            if error.code() not in NO_ANSWER or left <= 0:
                step = f"reading the committed offsets of group {group}"
                reason = connection.reason or "a transaction with offsets of the group may still be open"
                needed = permissions.on_group("Describe", group), permissions.on_topic("Describe", wanted[0].topic)
                raise request_failed(step, connection.addresses, error, reason, needed)
            time.sleep(min(pause, left))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _create_one(self, spec: TopicSpec, deadline: float) -> bool:
        new = _untyped.NewTopic(spec.name, spec.partitions, spec.replication_factor, config=dict(spec.configs))

        def attempt(client: AdminClient, seconds: float) -> Mapping[str, Future[Any]]:
            return client.create_topics([new], operation_timeout=seconds, request_timeout=seconds)

        # Another client may have made it meanwhile, or our own first attempt, whose answer was lost.
        answer = self._ask("creating topic", "Create", attempt, deadline, {KafkaError.TOPIC_ALREADY_EXISTS})
        return not isinstance(answer[spec.name], KafkaError)

    def _layouts(self, names: Collection[str], deadline: float) -> dict[str, Any]:
        if not names:
            return {}
        known = askable(names)

        def attempt(client: AdminClient, seconds: float) -> Mapping[str, Future[Any]]:
            return client.describe_topics(TopicCollection(known), request_timeout=seconds)

        answer = self._ask("describing topic", "Describe", attempt, deadline, NO_SUCH_TOPIC)
        return {name: None if isinstance(topic, KafkaError) else topic for name, topic in answer.items()}

    def _configs(self, names: Collection[str], deadline: float) -> dict[str, dict[str, str]]:
        if not names:
            return {}

        def attempt(client: AdminClient, seconds: float) -> Mapping[str, Future[Any]]:
            resources = [_untyped.ConfigResource(_untyped.ResourceType.TOPIC, name) for name in dict.fromkeys(names)]
            futures = client.describe_configs(resources, request_timeout=seconds)
            return {resource.name: future for resource, future in futures.items()}

        answer = self._ask("reading the settings of topic", "DescribeConfigs", attempt, deadline, NO_SUCH_TOPIC)
        return {
            name: {key: entry.value for key, entry in entries.items() if entry.value is not None}
            for name, entries in answer.items()
            if not isinstance(entries, KafkaError)
        }

    def _partitions(self, topic: str, deadline: float) -> int:
        layout = self._layouts([topic], deadline)[topic]
        if layout is None:
            raise TopicError(f"topic {topic} does not exist at {self._connection.addresses}")
        return len(layout.partitions)

    def _offsets(
        self, wanted: list[TopicPartition], spec: Any, level: IsolationLevel, deadline: float
    ) -> dict[int, int]:
        def attempt(client: AdminClient, seconds: float) -> Mapping[TopicPartition, Future[Any]]:
            request = {position: spec for position in wanted}  # noqa: C420  # dict.fromkeys loses the type
            return client.list_offsets(request, isolation_level=level, request_timeout=seconds)

        answer = self._ask("asking for the offsets of", "Describe", attempt, deadline)
        return {position.partition: result.offset for position, result in answer.items()}

    def _wait(self, names: Collection[str], deadline: float, condition: str, holds: Callable[[Any], bool]) -> None:
        pause = _FIRST_PAUSE
        while True:
            waiting = [name for name, topic in self._layouts(names, deadline).items() if not holds(topic)]
            if not waiting:
                return
            if time.monotonic() + pause > deadline:
                # The cluster has taken the request and is slow: that is no refusal.
                raise BrokerUnavailable(
                    f"topic {waiting[0]} at {self._connection.addresses}: waited in vain until it {condition}"
                )
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _ask(
        self,
        step: str,
        operation: str,
        attempt: Callable[[AdminClient, float], Mapping[K, Future[Any]]],
        deadline: float,
        expected: Collection[int] = (),
    ) -> dict[K, Any]:
        """Results by key; errors with an ``expected`` code take their place. Others are tried again or raised.
        ``operation``: the right that it takes, on the topic of the key."""
        pause = _FIRST_PAUSE
        while True:
            client = self._client
            seconds = min(max(deadline - time.monotonic(), 0.1), _ATTEMPT_SECONDS)
            results: dict[K, Any] = {}
            failed: tuple[K, KafkaError] | None = None
            for key, result in _gather(attempt, client, seconds).items():
                if isinstance(result, KafkaError) and result.code() not in expected:
                    failed = (key, result)
                results[key] = result
            if failed is None:
                self._connection.on_answer()
                return results
            key, error = failed
            client.poll(0)  # serve the error callback
            left = deadline - time.monotonic()
            # Before the first answer credentials and certificates may be wrong: trying again would only hide that.
            hopeless = not self._connection.answered and refused(self._connection.reason, "") is not None
            if error.code() not in NO_ANSWER or left <= 0 or hopeless:
                needed = permissions.on_topic(operation, key.topic if isinstance(key, TopicPartition) else str(key))
                doing, reason = f"{step} {_shown(key)}", self._connection.reason
                raise request_failed(doing, self._connection.addresses, error, reason, [needed])
            if error.code() in _STUCK:
                self._replace(client)  # at most once per attempt, that is every three seconds
            time.sleep(min(pause, left))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _replace(self, stuck: AdminClient) -> None:
        with self._lock:
            if self._client is stuck:
                logger.info("admin: connecting to %s anew", self._connection.addresses)
                self._retired.append(stuck)
                self._client = build(AdminClient, self._settings.admin(), self._connection)


def standing(committed: Mapping[int, int], marks: Mapping[int, Watermarks]) -> list[PartitionLag]:
    """Committed offsets beside the ends of the log, by partition; they may come from different clusters."""
    return [
        PartitionLag(
            number,
            committed.get(number),
            mark.start,
            mark.stable,
            mark.end,
            max(mark.end - committed.get(number, mark.start), 0),
        )
        for number, mark in sorted(marks.items())
    ]


def all_led(topic: Any) -> bool:
    """Check whether every partition of a described topic has a leader."""
    return all(partition.leader is not None and partition.leader.id >= 0 for partition in topic.partitions)


def differences(spec: TopicSpec, found: TopicDescription | None) -> list[str]:
    """List the differences of a topic from ``spec``, one sentence each. Of its settings only ``spec.configs`` count."""
    if found is None:
        return [missing(spec.name)]
    sentences = []
    if found.partitions != spec.partitions and not (spec.may_have_more and found.partitions > spec.partitions):
        sentences.append(f"topic {spec.name} has {found.partitions} partitions, settings say {spec.partitions}")
    if spec.replication_factor > 0 and found.replication_factor != spec.replication_factor:
        sentences.append(
            f"topic {spec.name} has replication factor {found.replication_factor},"
            f" settings say {spec.replication_factor}"
        )
    for key, value in spec.configs.items():
        actual = found.configs.get(key)
        if actual is None or _parts(actual) not in (_parts(value), _parts(value) | spec.further_policies(key)):
            sentences.append(f"topic {spec.name} has {key}={actual}, settings say {value}")
    return sentences


def _parts(value: str) -> set[str]:
    return {part.strip() for part in value.split(",")}  # lists like cleanup.policy have no order


def _shown(key: object) -> str:
    return f"{key.topic}[{key.partition}]" if isinstance(key, TopicPartition) else str(key)


def _gather(
    attempt: Callable[[AdminClient, float], Mapping[K, Future[Any]]], client: AdminClient, seconds: float
) -> dict[K, Any]:
    results: dict[K, Any] = {}
    try:
        futures = attempt(client, seconds)
    except SystemError as error:
        if isinstance(error.__cause__, KeyboardInterrupt | SystemExit):
            raise error.__cause__ from None  # a signal arrived within the C client, which hides what its handler raised
        raise
    deadline = time.monotonic() + seconds + 1.0  # the client's own error comes first, and says more
    for key, future in futures.items():
        while not future.done() and time.monotonic() < deadline:
            wait([future], min(_CALLBACK_SECONDS, seconds))
            client.poll(0)
        try:
            results[key] = future.result(0)
        except KafkaException as exception:
            results[key] = error_of(exception)
        except FutureTimeout:
            results[key] = KafkaError(KafkaError._TIMED_OUT, "no answer to the request")
    return results
