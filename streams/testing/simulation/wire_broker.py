"""The simulated broker as clients on the wire see it: nodes, each of which takes requests and gives answers, in bytes.

State and effects are those of ``broker.Broker``. What only the wire has is here: leaders and coordinators that move,
sequences, partitions that are enlisted by the client or (transactions v2) by their leaders, and error codes.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from streams.kafka.reading.record_batches import FetchedBatches
from streams.testing.simulation.broker import CLUSTER, TOPIC_LIMIT, Broker, LogEntry, Refuses
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.wire_requests import FURTHER, REQUESTS, Request, name_of

FIRST_PORT: Final = 9000
EPOCHS: Final = 40
"""After so many epochs a transactional id gets another producer id."""
_BATCHES_KNOWN: Final = 5  # of a producer in a partition, by the broker, to know what it has already
_V2: Final = 5  # the version of EndTxn and TxnOffsetCommit from which on transactions are v2
_PRODUCE_V2: Final = 12
_PRODUCER: Final = struct.Struct(">qhii")  # producer id, epoch, first sequence and number of records, ...
_PRODUCER_AT: Final = 43  # ... in the head of a batch
_COORDINATORS: Final = 4  # the version of FindCoordinator from which on it takes several keys
_MOST: Final = {"Metadata": 12, "InitProducerId": 5, "OffsetCommit": 9, "OffsetFetch": 9}  # later: topics by their ids
_CODES: Final = {
    "_FENCED": 90,
    "INVALID_TXN_STATE": 48,
    "UNKNOWN_MEMBER_ID": 25,
    "ILLEGAL_GENERATION": 22,
}
_STRUCK: Final = {
    Strike.ABORTABLE: 120,
    Strike.FORGOTTEN: 25,
    Strike.MOVED: 16,
    Strike.NOT_YET: 14,
}
_AT_A_LEADER: Final = {Strike.ABORTABLE: 120, Strike.MOVED: 6, Strike.NOT_YET: 19}
_CONCURRENT, _NOT_LEADER, _NOT_COORDINATOR, _FENCED_AT_A_LEADER, _UNKNOWN_TOPIC = 51, 6, 16, 47, 3
_OUT_OF_ORDER, _DUPLICATE, _NOT_ENLISTED, _TOO_LARGE = 45, 46, 48, 10
_REFUSED: Final = {32: "Timestamp is out of range", 87: "the record is not valid"}  # by their codes
Answer = bytes | asyncio.Future[bytes]
"""An answer, or one that comes later: until then the connection that asks gets no other one."""
Serves = Callable[[int, Request, Strike | None], Answer]
"""Answers one kind of request at a node."""


@dataclass
class _Seen:
    """The newest batches of a producer in one partition: first and last sequence. ``bases``: their offsets."""

    epoch: int
    batches: list[tuple[int, int]] = field(default_factory=list)
    bases: dict[tuple[int, int], int] = field(default_factory=dict)


class WireBroker:
    """``nodes``: how many. ``transaction_version``: finalized, 2 or below. ``verifies``: under v1, a leader asks
    whether a partition is enlisted before it takes records (KIP-890, part 1)."""

    def __init__(self, broker: Broker, *, nodes: int = 1, transaction_version: int = 2, verifies: bool = True) -> None:
        self.broker, self.nodes = broker, nodes
        self._transaction_version, self._verifies = transaction_version, verifies
        self._moves: Counter[object] = Counter()
        self._producer_ids: dict[str, int] = {}
        self._seen: dict[tuple[str, str, int], _Seen] = {}
        self._base = -1  # the offset of the batch that is being answered
        self.hosts = itertools.count(1)
        self.on_move: Callable[[str], None] = lambda name: None
        """Called with a group or a transactional id whose coordinator has become another node."""
        self._served: dict[str, Serves] = {}

    def serve(self, answers: Mapping[str, Serves]) -> None:
        """Have further requests answered, by their names; without it the broker has none of them."""
        self._served.update(answers)

    def node_of(self, *what: object) -> int:
        """Return the node that leads a partition (topic and number), or coordinates a group or an id (its name)."""
        return (zlib.crc32(repr(what).encode()) + self._moves[what]) % self.nodes

    def move(self, name: str) -> None:
        """Have another node coordinate a group or a transactional id."""
        self._moves[(name,)] += 1
        self.on_move(name)

    def not_here(self, name: str, node: int, strike: Strike | None) -> int:
        """Return the code of a node that does not coordinate this name, or that is struck now; 0: it does."""
        if self.node_of(name) != node:
            return _NOT_COORDINATOR
        if strike not in _STRUCK:
            return 0
        if strike is Strike.MOVED:
            self.move(name)
        return _STRUCK[strike]

    def not_led(self, topic: str, partition: int, node: int, strike: Strike | None) -> int:
        """Return the code of a node that does not lead this partition, or that is struck now; 0: it does."""
        if self.broker.unusable(topic) is not None or partition >= self.broker.identity(topic).partitions:
            return _UNKNOWN_TOPIC
        if self.node_of(topic, partition) != node:
            return _NOT_LEADER
        if strike not in _AT_A_LEADER:
            return 0
        if strike is Strike.MOVED:
            self._moves[topic, partition] += 1
        return _AT_A_LEADER[strike]

    def answer(self, node: int, host: str, request: Request, strike: Strike | None) -> Answer:
        """Do what a request asks for, at one node, and answer. ``host``: the name that its sender has for all nodes."""
        if request.name in self._served:
            return self._served[request.name](node, request, strike)
        match request.name:
            case "ApiVersions":
                return self._versions(request)
            case "Metadata":
                return self._metadata(request, host)
            case "FindCoordinator":
                return self._coordinator(request, host)
            case "DescribeConfigs":
                return self._configs(request)
            case "Produce":
                return self._produced(request, node, strike)
        code, result = self._coordinated(request, node, strike)
        match request.name:
            case "InitProducerId":
                producer_id, epoch = self.on_the_wire(request.transactional_id, result)
                return request.encoded(error_code=code, producer_id=producer_id, producer_epoch=epoch)
            case "EndTxn" if request.version >= _V2:
                producer_id, epoch = self.on_the_wire(request.transactional_id, result)
                return request.encoded(error_code=code, producer_id=producer_id, producer_epoch=epoch)
            case "AddPartitions":
                of = request.answer_class.AddPartitionsToTxnTopicResult
                topics = [
                    of(
                        name=topic.name,
                        results_by_partition=[
                            of.AddPartitionsToTxnPartitionResult(partition_index=number, partition_error_code=code)
                            for number in topic.partitions
                        ],
                    )
                    for topic in request.body.v3_and_below_topics
                ]
                return request.encoded(results_by_topic_v3_and_below=topics)
            case "TxnOffsetCommit":
                of = request.answer_class.TxnOffsetCommitResponseTopic
                topics = [
                    of(
                        name=topic.name,
                        partitions=[
                            of.TxnOffsetCommitResponsePartition(partition_index=part.partition_index, error_code=code)
                            for part in topic.partitions
                        ],
                    )
                    for topic in request.body.topics
                ]
                return request.encoded(topics=topics)
        return request.encoded(error_code=code)

    def has_release(self, name: str) -> bool:
        """Check whether the open transaction of an id has a release marker."""
        state = self.broker.ids.get(name)
        return state is not None and state.txn is not None and bool(state.txn.releases)

    # -- any node -----------------------------------------------------------------------------------------------------

    def _versions(self, request: Request) -> bytes:
        of = request.answer_class
        keys = [
            of.ApiVersion(api_key=kind.API_KEY, min_version=0, max_version=_MOST.get(name_of(kind), 99))
            for kind in REQUESTS + [kind for kind in FURTHER if name_of(kind) in self._served]
        ]
        feature = of.FinalizedFeatureKey(
            name="transaction.version", max_version_level=self._transaction_version, min_version_level=0
        )
        return request.encoded(error_code=0, api_keys=keys, finalized_features=[feature], finalized_features_epoch=1)

    def _metadata(self, request: Request, host: str) -> bytes:
        answer = request.answer_class
        of = answer.MetadataResponseTopic
        topics = []
        for name in self._topics_of(request.body.topics):
            if (code := self.broker.unusable(name)) is not None:
                topics.append(of(name=name, error_code=code, partitions=[]))
                continue
            count = self.broker.identity(name).partitions
            partitions = [
                of.MetadataResponsePartition(
                    partition_index=number,
                    leader_id=self.node_of(name, number),
                    leader_epoch=0,
                    replica_nodes=[],
                    isr_nodes=[],
                    offline_replicas=[],
                )
                for number in range(count)
            ]
            topics.append(of(name=name, topic_id=self.broker.topic_id(name), error_code=0, partitions=partitions))
        brokers = [
            answer.MetadataResponseBroker(node_id=node, host=host, port=FIRST_PORT + node) for node in range(self.nodes)
        ]
        return request.encoded(brokers=brokers, cluster_id=CLUSTER, controller_id=0, topics=topics)

    def _topics_of(self, topics: list[Any] | None) -> list[str]:
        """Return the names of the topics of a metadata request; ``None``: all that there are."""
        if topics is None:
            return sorted({*self.broker.topics, *(topic for topic, _ in self.broker.logs)})
        return [topic.name for topic in topics]

    def _coordinator(self, request: Request, host: str) -> bytes:
        by_list = request.version >= _COORDINATORS
        (key,) = request.body.coordinator_keys if by_list else [request.body.key]
        node = self.node_of(key)
        found = {"node_id": node, "host": host, "port": FIRST_PORT + node, "error_code": 0, "error_message": ""}
        if not by_list:
            return request.encoded(**found)
        return request.encoded(coordinators=[request.answer_class.Coordinator(key=key, **found)])

    def _configs(self, request: Request) -> bytes:
        of = request.answer_class.DescribeConfigsResult
        results = []
        for resource in request.body.resources:
            limit = self.broker.limits.get(resource.resource_name, TOPIC_LIMIT)
            config = of.DescribeConfigsResourceResult(name="max.message.bytes", value=str(limit), config_source=1)
            results.append(of(error_code=0, resource_name=resource.resource_name, resource_type=2, configs=[config]))
        return request.encoded(results=results)

    # -- a leader ------------------------------------------------------------------------------------------------------

    def _produced(self, request: Request, node: int, strike: Strike | None) -> bytes:
        of = request.answer_class.TopicProduceResponse
        topics = []
        for topic in request.body.topic_data:
            parts = []
            for part in topic.partition_data:
                self._base = -1
                code, index = self._write(request, node, topic.name, part.index, part.records, strike)
                strike = None  # one partition of the request only
                errors = []
                if index is not None:
                    at_fault = of.PartitionProduceResponse.BatchIndexAndErrorMessage
                    errors = [at_fault(batch_index=index, batch_index_error_message=_REFUSED[code])]
                parts.append(
                    of.PartitionProduceResponse(
                        index=part.index,
                        error_code=code,
                        base_offset=self._base,
                        record_errors=errors,
                        error_message=None,
                    )
                )
            topics.append(of(name=topic.name, partition_responses=parts))
        return request.encoded(responses=topics)

    def _write(
        self, request: Request, node: int, topic: str, partition: int, records: Any, strike: Strike | None
    ) -> tuple[int, int | None]:
        """Append a batch. Returns the code, and the index of the record that is refused, if it is named."""
        broker, name = self.broker, request.transactional_id
        if self.node_of(topic, partition) != node:
            return _NOT_LEADER, None
        if strike in _AT_A_LEADER:
            if strike is Strike.MOVED:
                self._moves[topic, partition] += 1
            return _AT_A_LEADER[strike], None
        if (missing := broker.blocked.get(topic)) is not None:
            return missing, None
        batch = bytes(records)
        if len(batch) > broker.limits.get(topic, TOPIC_LIMIT):
            return _TOO_LARGE, None
        producer_id, producer_epoch, sequence, count = _PRODUCER.unpack_from(batch, _PRODUCER_AT)
        epoch = self._in_the_broker(producer_id, producer_epoch)
        entries = [
            LogEntry(record.key, record.value, list(record.headers or ()) or None, None, False, record.timestamp_ms)
            for record in FetchedBatches(topic, partition, 0, batch, None).take(count)
        ]
        try:
            code, index = self._append(request, name, epoch, topic, partition, sequence, entries)
        except Refuses:
            return _FENCED_AT_A_LEADER, None
        if not code and strike is Strike.MOVED_AFTER:  # replicated, but not to everybody yet when it moved
            self._moves[topic, partition] += 1
            return _NOT_LEADER, None
        if not code and strike is Strike.UNSURE:
            return broker.rng.choice((7, 13, 20)), None
        return code, index

    def _append(
        self, request: Request, name: str, epoch: int, topic: str, partition: int, first: int, entries: list[LogEntry]
    ) -> tuple[int, int | None]:
        broker = self.broker
        log = broker.log(topic, partition)
        is_enlisted = broker.is_enlisted(name, epoch, log)
        span = (first, first + len(entries) - 1)
        seen = self._seen.get((name, topic, partition))
        if seen is not None and seen.epoch == epoch:
            if span in seen.batches:
                broker.met.add("duplicate")
                self._base = seen.bases[span]
                return broker.rng.choice((0, _DUPLICATE)), None
            if span[0] != seen.batches[-1][1] + 1:
                broker.met.add("out of order")
                return _OUT_OF_ORDER, None
        elif span[0]:
            broker.met.add("out of order")
            return _OUT_OF_ORDER, None
        if not is_enlisted and request.version < _PRODUCE_V2 and self._verifies:
            return _NOT_ENLISTED, None
        collides = not is_enlisted and self.nodes > 1 and broker.rng.random() < 0.2
        if collides or broker.ongoing(name, epoch) is None:  # the coordinator takes one leader at a time
            broker.met.add("concurrent")
            return _CONCURRENT, None
        for index, entry in enumerate(entries):
            if (refusal := broker.refusal(topic, entry)) is not None:
                return refusal, index
        self._base = log.end
        for entry in entries:
            broker.produce(name, epoch, topic, partition, entry)
        if seen is None or seen.epoch != epoch:
            seen = self._seen[name, topic, partition] = _Seen(epoch)
        seen.batches = [*seen.batches, span][-_BATCHES_KNOWN:]
        seen.bases[span] = self._base
        broker.on_append(topic)
        return 0, None

    # -- a coordinator -------------------------------------------------------------------------------------------------

    def _coordinated(self, request: Request, node: int, strike: Strike | None) -> tuple[int, int]:
        """Do a request to a coordinator. Returns the code, and the epoch that it gives out, else 0."""
        body = request.body
        coordinates = body.group_id if request.name == "TxnOffsetCommit" else request.transactional_id
        if code := self.not_here(coordinates, node, strike):
            return code, 0
        try:
            result = self._done(request)
        except Refuses as refuses:
            return _CODES[refuses.code], 0
        return (_CONCURRENT, 0) if result is None else (0, result)

    def _done(self, request: Request) -> int | None:
        """Return the epoch that is given out, else 0; ``None``: try again."""
        broker, body, name = self.broker, request.body, request.transactional_id
        if request.name == "InitProducerId":
            return broker.init(name, body.transaction_timeout_ms / 1000)
        epoch = self._in_the_broker(*request.producer)
        match request.name:
            case "AddPartitions":
                logs = [broker.log(topic.name, n) for topic in body.v3_and_below_topics for n in topic.partitions]
                return 0 if broker.enlist(name, epoch, logs) else None
            case "AddOffsets":
                return 0 if broker.enlist(name, epoch, offsets=True) else None
            case "TxnOffsetCommit":
                if request.version < _V2 and self._verifies and not broker.is_enlisted(name, epoch):
                    raise Refuses("INVALID_TXN_STATE", "unknown")
                offsets = {
                    broker.offset_key(topic.name, part.partition_index): part.committed_offset
                    for topic in body.topics
                    for part in topic.partitions
                }
                sent = broker.send_offsets(name, epoch, body.generation_id, body.member_id, offsets)
                return 0 if sent else None
            case _ if request.version >= _V2:
                return broker.end_epoch(name, epoch, body.committed)
        return 0 if broker.end(name, epoch, body.committed) else None

    def producers(self, topic: str, partition: int) -> list[tuple[str, int, int, int]]:
        """Return the producers that the leader of a partition knows: transactional id, producer id and epoch of its
        last batch there, and the last sequence."""
        return [
            (name, *self.on_the_wire(name, seen.epoch), seen.batches[-1][1])
            for (name, in_topic, number), seen in self._seen.items()
            if (in_topic, number) == (topic, partition)
        ]

    def on_the_wire(self, name: str, epoch: int) -> tuple[int, int]:
        """Translate an epoch, which has no limit, to a producer id and an epoch of its own."""
        number = self._producer_ids.setdefault(name, len(self._producer_ids) + 1)
        return (number << 32) + epoch // EPOCHS, epoch % EPOCHS

    @staticmethod
    def _in_the_broker(producer_id: int, epoch: int) -> int:
        return (producer_id & 0xFFFFFFFF) * EPOCHS + epoch
