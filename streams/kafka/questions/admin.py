"""Read and change the topics of a cluster and the offsets of its groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from streams.errors import BrokerUnavailable, StreamsError, TopicError
from streams.kafka import permissions
from streams.kafka.permissions import Right, denied, is_denial
from streams.kafka.questions.asking import Questions, milliseconds_until
from streams.kafka.questions.lags import PartitionLag, Tails
from streams.kafka.questions.requests import committed
from streams.kafka.settings import ClientSettings
from streams.kafka.translate import broker_unavailable, refused
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import NO_SUCH_TOPIC, BrokerRefusal, Code, entries_of, raise_for
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.lines import is_hopeless
from streams.kafka.wire.schemas.create_partitions import CreatePartitionsRequest
from streams.kafka.wire.schemas.create_topics import CreateTopicsRequest
from streams.kafka.wire.schemas.delete_topics import DeleteTopicsRequest
from streams.kafka.wire.schemas.describe_configs import DescribeConfigsRequest
from streams.kafka.wire.security import Security
from streams.kafka.wire.topic_questions import EARLIEST, LATEST, TopicMetadata, metadata, only, topic_id_text
from streams.model.topics import TopicSpec, askable, missing

T = TypeVar("T")

_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5
"""Seconds between two looks at a topic: the first pause, and the longest, each twice as long as the one before."""
_CHANGE_SECONDS: Final = 9.0
"""Seconds that a broker may take for a change of topics: a second request would not tell who made the change. Less than
those after which a connection is taken for dead."""
_TOPIC: Final = 2
"""The number of topics among the resources that have settings."""
_OWN_REPLICATION: Final = 4
"""The version of CreateTopics from which a topic may have the broker's own replication factor (-1)."""


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


class TopicAdmin(Questions):
    """Requests about topics and offsets. May be used by any thread; every method blocks.

    Each is bounded by its timeout. What passes (an election, a coordinator that is loading) is tried again until then;
    afterwards ``BrokerUnavailable``, with the addresses and the last error of a connection. ``TopicError``: the request
    itself is refused; ``ConfigError``: the credentials are. Making one does no I/O, and raises ``ConfigError`` for
    settings that are wrong; the first request connects.
    """

    def __init__(self, settings: ClientSettings) -> None:
        settings.check()
        self._settings, self._security = settings, Security.of(settings.overrides)
        self.tails = Tails(settings)
        self._closing = threading.Lock()
        super().__init__(self._new_client())

    def describe(self, names: Collection[str], timeout_seconds: float = 10.0) -> dict[str, TopicDescription | None]:
        """Describe topics; ``None`` for one that does not exist. Never creates one (as a metadata request may)."""
        names = askable(names)

        async def attempt(limit: float) -> dict[str, TopicDescription | None]:
            layouts = await self._layouts(names, limit)
            there = {name: topic for name, topic in layouts.items() if topic is not None}
            configs = await self._configs(there, limit)
            # One that was deleted between the two requests has no settings any more.
            found = {name: _described(name, there[name], configs[name]) for name in there if name in configs}
            return {name: found.get(name) for name in names}

        step = f"describing topic {', '.join(names)}"
        return self._asked(step, time.monotonic() + timeout_seconds, attempt) if names else {}

    def identity(self, name: str, timeout_seconds: float = 10.0) -> tuple[str, int] | None:
        """Topic id and number of partitions; ``None``: there is no such topic. Asks for no settings, which a mere
        reader may not be allowed to see."""
        topic = self._look([name], time.monotonic() + timeout_seconds)[name]
        return None if topic is None else (topic_id_text(topic.topic_id), len(topic.partitions))

    def create(self, specs: Sequence[TopicSpec], timeout_seconds: float = 30.0) -> list[str]:
        """Create what is missing, and wait until every partition of all ``specs`` has a leader.

        Returns the names of the topics that this call made. Topics that exist are left as they are (ask
        ``differences``), also when another client makes one at the same moment. Repeating is harmless.
        """
        deadline = time.monotonic() + timeout_seconds
        names = [spec.name for spec in specs]
        there = self._look(names, deadline)
        new = {spec.name: spec for spec in specs if there[spec.name] is None}
        created = self._create(new, deadline) if new else set()
        self._wait(names, deadline, "has a leader", lambda topic: topic is not None and all_led(topic))
        return [name for name in dict.fromkeys(names) if name in created]

    def grow(self, name: str, partitions: int, timeout_seconds: float = 30.0) -> None:
        """Give a topic so many partitions, and wait until all have a leader. They can never be taken away again. One
        that has as many is left as it is. Raises ``TopicError`` for one that has more, or does not exist."""
        deadline = time.monotonic() + timeout_seconds
        step = f"adding partitions to topic {name}"

        async def attempt(limit: float) -> int:
            found = len((await self._metadata(name, limit)).partitions)
            if found >= partitions:  # also after an answer that was lost
                return found
            wanted = CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=partitions)
            node, limit = await self._controller(limit), _limit_of_change(deadline)
            request = CreatePartitionsRequest(topics=[wanted], timeout_ms=milliseconds_until(limit))
            answer = await self._client.send(request, node, limit)
            result = only(answer.results, f"topic {name}")
            # Another client, or our own first attempt, was faster than the metadata.
            if result.error_code != Code.INVALID_PARTITIONS:
                raise_for(result.error_code, result.error_message)
                return partitions
            return len((await self._metadata(name, limit)).partitions)

        if (found := self._asked(step, deadline, attempt, [permissions.on_topic("Alter", name)])) > partitions:
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
        deadline, wanted = time.monotonic() + timeout_seconds, askable(names)

        async def attempt(limit: float) -> None:
            node, limit = await self._controller(limit), _limit_of_change(deadline)
            states = [DeleteTopicsRequest.DeleteTopicState(name=name) for name in wanted]
            request = DeleteTopicsRequest(topics=states, topic_names=wanted, timeout_ms=milliseconds_until(limit))
            answer = await self._client.send(request, node, limit)
            for result in answer.responses:
                if result.error_code not in NO_SUCH_TOPIC:
                    _check("deleting topic", "Delete", result.name or "", result.error_code, result.error_message)

        if wanted:
            self._asked(f"deleting topic {', '.join(wanted)}", deadline, attempt)
            self._wait(wanted, deadline, "is gone", lambda topic: topic is None)

    def watermarks(
        self, topic: str, partitions: Collection[int] | None = None, timeout_seconds: float = 10.0
    ) -> dict[int, Watermarks]:
        """Return start, LSO and end of partitions (all, if none are named). Three requests per broker."""
        numbers = None if partitions is None else list(partitions)
        if numbers == []:
            return {}

        async def attempt(limit: float) -> dict[int, Watermarks]:
            by_leader = await self._by_leader(topic, numbers, limit)
            # In this order: all three only grow, so start <= stable <= end also of a log that moves meanwhile.
            start = await self._offsets_by_leader(topic, by_leader, EARLIEST, limit)
            stable = await self._offsets_by_leader(topic, by_leader, LATEST, limit, stable=True)
            end = await self._offsets_by_leader(topic, by_leader, LATEST, limit)
            return {number: Watermarks(start[number], stable[number], end[number]) for number in numbers or sorted(end)}

        return self._asked_about(topic, time.monotonic() + timeout_seconds, attempt)

    def offsets_at(self, topic: str, timestamp_ms: int, timeout_seconds: float = 10.0) -> dict[int, int]:
        """Return of each partition the offset of its first record of this time or later; -1: there is none."""

        async def attempt(limit: float) -> dict[int, int]:
            return await self._offsets_by_leader(topic, await self._by_leader(topic, None, limit), timestamp_ms, limit)

        return self._asked_about(topic, time.monotonic() + timeout_seconds, attempt)

    def committed(
        self, group: str, topic: str, timeout_seconds: float = 10.0, partitions: Collection[int] | None = None
    ) -> dict[int, int]:
        """The group's committed offsets; partitions without one are left out. Waits for pending transactions.

        ``partitions`` must be named for a topic that this cluster does not have (a stand-in for another cluster's).
        """

        async def attempt(limit: float) -> dict[int, int]:
            numbers = partitions
            if numbers is None:
                numbers = range(len((await self._metadata(topic, limit)).partitions))
            # By number: a question for "all" leaves out what has nothing but a pending offset, and does not wait.
            found = await committed(self._client, group, limit, {topic: [*numbers]}, stable=True)
            offsets = {entry.partition_index: entry.committed_offset for entry in entries_of(found.topics)}
            return {number: offset for number, offset in offsets.items() if offset >= 0}

        if partitions is not None and not partitions:
            return {}
        needed = [permissions.on_group("Describe", group), permissions.on_topic("Describe", topic)]
        step = f"reading the committed offsets of group {group}"
        return self._asked(step, time.monotonic() + timeout_seconds, attempt, needed)

    def note(self, group: str, topic: str, partition: int, timeout_seconds: float = 10.0) -> tuple[int, str] | None:
        """Return the offset that a group has committed in one partition, and the text beside it; ``None``: none. As it
        is now: what a transaction holds is not waited for."""

        async def attempt(limit: float) -> tuple[int, str] | None:
            try:
                found = await committed(self._client, group, limit, {topic: [partition]})
                entry = only([*entries_of(found.topics)], f"{topic}[{partition}]")
            except BrokerRefusal as refusal:
                if refusal.code == Code.GROUP_ID_NOT_FOUND:
                    return None
                raise
            return None if entry.committed_offset < 0 else (entry.committed_offset, entry.metadata or "")

        needed = [permissions.on_group("Describe", group), permissions.on_topic("Describe", topic)]
        step = f"reading the committed offset of group {group}"
        return self._asked(step, time.monotonic() + timeout_seconds, attempt, needed)

    def lag(self, group: str, topic: str, timeout_seconds: float = 10.0) -> list[PartitionLag]:
        """Return the group's lag in every partition of ``topic``, by partition."""
        return standing(self.committed(group, topic, timeout_seconds), self.watermarks(topic, None, timeout_seconds))

    def close(self) -> None:
        """Let go of the connections. Does not raise; later calls build them anew."""
        self.tails.close()
        with self._closing:
            self._client.close()
            self._client = self._new_client()

    def _new_client(self) -> WireClient:
        settings = self._settings
        return WireClient(settings.bootstrap_servers, f"{settings.client_id}.admin", self._security)

    def _asked(
        self, step: str, deadline: float, attempt: Callable[[float], Awaitable[T]], needed: Sequence[Right] = ()
    ) -> T:
        self._client.start()
        try:
            return self._ask(step, deadline, attempt)
        except StreamsError as error:
            raise self._explained(step, error, needed) from error.__cause__

    def _asked_about(self, topic: str, deadline: float, attempt: Callable[[float], Awaitable[T]]) -> T:
        needed = [permissions.on_topic("Describe", topic)]
        return self._asked(f"asking for the offsets of {topic}", deadline, attempt, needed)

    def _explained(self, step: str, error: StreamsError, needed: Sequence[Right]) -> StreamsError:
        """Make the error of an administrative request: for want of an answer, of permission (it needs ``needed``), or
        because of the request itself."""
        cause, addresses = error.__cause__, self._client.addresses
        if isinstance(cause, LostConnection):
            reason = f"{cause.code}: {cause}"
            if is_hopeless(cause):
                return refused(reason, addresses) or error
            return broker_unavailable(step, addresses, reason=reason)
        if not isinstance(cause, BrokerRefusal):
            return BrokerUnavailable(f"{step}: {error}") if isinstance(error, BrokerUnavailable) else error
        if cause.code == Code.UNSTABLE_OFFSET_COMMIT:
            return BrokerUnavailable(
                f"{step}: a transaction that holds offsets is still open at {addresses} ({cause}); it ends when its"
                " producer comes back or its transaction timeout is over"
            )
        if cause.retriable and cause.code not in NO_SUCH_TOPIC:
            return broker_unavailable(step, addresses, reason=str(cause))
        return _refused(step, cause, needed)

    def _look(self, names: Collection[str], deadline: float) -> dict[str, TopicMetadata | None]:
        wanted = askable(names)
        step = f"describing topic {', '.join(wanted)}"
        return self._asked(step, deadline, lambda limit: self._layouts(wanted, limit)) if wanted else {}

    def _create(self, specs: Mapping[str, TopicSpec], deadline: float) -> set[str]:
        """Create topics; returns the names of those that it made."""
        created: set[str] = set()
        of = CreateTopicsRequest.CreatableTopic
        wanted = [
            of(
                name=spec.name,
                num_partitions=spec.partitions,
                replication_factor=spec.replication_factor,
                configs=[of.CreatableTopicConfig(name=key, value=value) for key, value in spec.configs.items()],
            )
            for spec in specs.values()
        ]

        async def attempt(limit: float) -> None:
            node, limit = await self._controller(limit), _limit_of_change(deadline)
            request = CreateTopicsRequest(topics=wanted, timeout_ms=milliseconds_until(limit))
            answer = await self._client.send(request, node, limit, least=_OWN_REPLICATION)
            created.update(result.name for result in answer.topics if not result.error_code)
            for result in answer.topics:
                # Another client may have made it meanwhile, or our own first attempt, whose answer was lost.
                if result.error_code != Code.TOPIC_ALREADY_EXISTS:
                    _check("creating topic", "Create", result.name, result.error_code, result.error_message)

        self._asked(f"creating topic {', '.join(specs)}", deadline, attempt)
        return created

    async def _layouts(self, names: Collection[str], limit: float) -> dict[str, TopicMetadata | None]:
        found: dict[str, TopicMetadata | None] = {}
        for topic in (await metadata(self._client, askable(names), limit)).topics:
            if topic.error_code not in NO_SUCH_TOPIC:
                _check("describing topic", "Describe", topic.name or "", topic.error_code)
            found[topic.name or ""] = None if topic.error_code else topic
        for name in names:
            only([name] if name in found else [], f"topic {name}")
        return found

    async def _metadata(self, topic: str, deadline: float) -> TopicMetadata:
        found = (await self._layouts([topic], deadline))[topic]
        if found is None:
            raise TopicError(f"topic {topic} does not exist at {self._client.addresses}")
        return found

    async def _configs(self, names: Iterable[str], limit: float) -> dict[str, dict[str, str]]:
        """Read the settings of topics; those that are gone are left out."""
        of = DescribeConfigsRequest.DescribeConfigsResource
        resources = [of(resource_type=_TOPIC, resource_name=name, configuration_keys=None) for name in names]
        if not resources:
            return {}
        answer = await self._client.send(DescribeConfigsRequest(resources=resources), None, limit)
        found: dict[str, dict[str, str]] = {}
        for result in answer.results:
            if result.error_code not in NO_SUCH_TOPIC:
                step = "reading the settings of topic"
                _check(step, "DescribeConfigs", result.resource_name, result.error_code, result.error_message)
                found[result.resource_name] = {
                    entry.name: entry.value for entry in result.configs if entry.value is not None
                }
        return found

    async def _controller(self, limit: float) -> int | None:
        """Find the broker that changes topics. Any does where brokers pass requests on, which is where none is named
        (KRaft); of others the wrong one refuses, and it is looked for again."""
        found = (await metadata(self._client, (), limit)).controller_id
        return None if found < 0 else found

    def _wait(
        self,
        names: Collection[str],
        deadline: float,
        condition: str,
        holds: Callable[[TopicMetadata | None], bool],
    ) -> None:
        pause = _FIRST_PAUSE
        while True:
            waiting = [name for name, topic in self._look(names, deadline).items() if not holds(topic)]
            if not waiting:
                return
            if time.monotonic() + pause > deadline:
                # The cluster has taken the request and is slow: that is no refusal.
                raise BrokerUnavailable(
                    f"topic {waiting[0]} at {self._client.addresses}: waited in vain until it {condition}"
                )
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)


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


def all_led(topic: TopicMetadata) -> bool:
    """Check whether every partition of a described topic has a leader."""
    return all(partition.leader_id >= 0 for partition in topic.partitions)


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


def _described(name: str, topic: TopicMetadata, configs: dict[str, str]) -> TopicDescription:
    return TopicDescription(
        name=name,
        topic_id=topic_id_text(topic.topic_id),
        partitions=len(topic.partitions),
        replication_factor=max((len(partition.replica_nodes) for partition in topic.partitions), default=0),
        configs=configs,
    )


def _limit_of_change(deadline: float) -> float:
    return min(time.monotonic() + _CHANGE_SECONDS, deadline)


def _check(doing: str, operation: str, topic: str, code: int, message: str | None = None) -> None:
    """Raise ``TopicError`` for a code that trying again does not cure, and ``BrokerRefusal`` for others. ``operation``:
    the right that it takes, on the topic."""
    try:
        raise_for(code, message)
    except BrokerRefusal as refusal:
        if refusal.retriable:
            raise
        raise _refused(f"{doing} {topic}", refusal, [permissions.on_topic(operation, topic)]) from None


def _refused(step: str, refusal: BrokerRefusal, needed: Sequence[Right]) -> TopicError:
    return TopicError(f"{step}: {denied(refusal.name, needed) if is_denial(refusal.name) else refusal}")
