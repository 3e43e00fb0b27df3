"""Brokers on loopback that answer as a script says, to test what a slot of the wire producer makes of each answer."""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from streams.kafka.wire.cluster import Cluster
from streams.kafka.wire.settings import ProducerSettings
from streams.kafka.writing.encoded_transaction import EncodedTransaction
from streams.kafka.writing.slot import WireSlot
from streams.model.group import GroupMetadata
from streams.records import Output

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of kafka-python's own
    from kafka.protocol.admin.configs import DescribeConfigsRequest, DescribeConfigsResponse
    from kafka.protocol.metadata import (
        ApiVersionsRequest,
        ApiVersionsResponse,
        FindCoordinatorRequest,
        FindCoordinatorResponse,
        MetadataRequest,
        MetadataResponse,
    )
    from kafka.protocol.producer import (
        AddOffsetsToTxnRequest,
        AddOffsetsToTxnResponse,
        AddPartitionsToTxnRequest,
        AddPartitionsToTxnResponse,
        EndTxnRequest,
        EndTxnResponse,
        InitProducerIdRequest,
        InitProducerIdResponse,
        ProduceRequest,
        ProduceResponse,
        TxnOffsetCommitRequest,
        TxnOffsetCommitResponse,
    )

_REQUESTS: list[Any] = [
    ApiVersionsRequest,
    DescribeConfigsRequest,
    FindCoordinatorRequest,
    MetadataRequest,
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
]
_BY_KEY = {request.API_KEY: request for request in _REQUESTS}
GONE, MUTE, GARBAGE, TORN, TWICE, SHORT, WEB = "gone", "mute", "garbage", "torn", "twice", "short", "web"
"""In place of a code: the connection is cut; no answer comes; one without sense; half of one, and then the rest; the
same one two times; one that ends after its head; that of another kind of server."""


class ScriptedBroker:
    """So many brokers; partition n of each topic is led by number n modulo so many, coordinators are number 0.

    ``script[api]`` has the codes (or words above, or functions of the answer) of the next answers to requests of that
    name; without any the answer is a success. ``requests`` has all that was asked, with the number of the broker.
    """

    def __init__(self, *, brokers: int = 1, transaction_version: int = 2, topics: dict[str, int] | None = None) -> None:
        self.topics = {"t": 4} if topics is None else topics
        self.requests: list[tuple[int, str, Any]] = []
        self.script: dict[str, deque[Any]] = {}
        self.most: dict[str, int] = {"Metadata": 12, "InitProducerId": 5}
        self.group_coordinator = 0
        self.batch_limit = 1_048_588
        self._count, self._transaction_version = brokers, transaction_version
        self._servers: list[asyncio.Server] = []
        self._ports: list[int] = []
        self._epoch = -1
        self._has_begun = False
        self._living = list(range(brokers))
        self._writers: list[tuple[int, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> ScriptedBroker:
        for number in range(self._count):
            server = await asyncio.start_server(
                lambda reader, writer, number=number: self._serve(number, reader, writer), "127.0.0.1", 0
            )
            self._servers.append(server)
            self._ports.append(server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def answer(self, api: str, *answers: Any) -> None:
        self.script.setdefault(api, deque()).extend(answers)

    def asked(self, *apis: str) -> list[str]:
        """The names of the requests of these kinds, in order."""
        return [name for _, name, _ in self.requests if name in apis]

    def lead_by(self, number: int) -> None:
        """Make this broker the leader of the first partition."""
        self._living.sort(key=lambda living: living != number)

    def kill(self, number: int) -> None:
        """End a broker: the others lead its partitions, and metadata do not list it any more."""
        self._living.remove(number)
        self._servers[number].close()
        for at, writer in self._writers:
            if at == number:
                writer.close()

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append((number, writer))
        try:
            while True:
                frame = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
                key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
                request = _BY_KEY[key].decode(frame, version=version, header=True)
                name = type(request).__name__.removesuffix("Request").removesuffix("ToTxn")
                self.requests.append((number, name, request))
                scripted = self.script.get(name)
                said = scripted.popleft() if scripted else 0
                if said == MUTE:  # and all behind it: a broker handles one request of a connection at a time
                    await reader.read(-1)
                    break
                if said == GONE:
                    break
                answer = _ANSWERS[type(request)](self, request, version, said if isinstance(said, int) else 0)
                if callable(said):
                    said(answer)
                answer.API_VERSION = version
                answer.with_header(correlation_id=request.header.correlation_id)
                data = bytes(answer.encode(header=True, framed=True))
                spoiled = {GARBAGE: b"\0\0\0\x08not Kafk", SHORT: b"\0\0\0\x05" + data[4:9], WEB: b"HTTP/1.1 400"}
                data = data * 2 if said == TWICE else spoiled.get(said, data) if isinstance(said, str) else data
                half = len(data) // 2 if said == TORN else len(data)
                writer.write(data[:half])
                await writer.drain()
                writer.write(data[half:])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _versions(self, _request: Any, version: int, code: int) -> Any:
        keys = [
            ApiVersionsResponse.ApiVersion(
                api_key=request.API_KEY,
                min_version=0,
                max_version=self.most.get(request.__name__.removesuffix("Request").removesuffix("ToTxn"), 99),
            )
            for request in _REQUESTS
        ]
        feature = ApiVersionsResponse.FinalizedFeatureKey(
            name="transaction.version", max_version_level=self._transaction_version, min_version_level=0
        )
        return ApiVersionsResponse(
            error_code=code, api_keys=keys, finalized_features=[feature], finalized_features_epoch=1
        )

    def _metadata(self, request: Any, version: int, code: int) -> Any:
        topics = []
        for topic in request.topics:
            known = 0 if code else self.topics.get(topic.name, 0)
            partitions = [
                MetadataResponse.MetadataResponseTopic.MetadataResponsePartition(
                    partition_index=n,
                    leader_id=self._living[n % len(self._living)],
                    leader_epoch=0,
                    replica_nodes=[],
                    isr_nodes=[],
                    offline_replicas=[],
                )
                for n in range(known)
            ]
            topics.append(
                MetadataResponse.MetadataResponseTopic(
                    name=topic.name, error_code=0 if known else code or 3, partitions=partitions
                )
            )
        brokers = [
            MetadataResponse.MetadataResponseBroker(node_id=n, host="127.0.0.1", port=port)
            for n, port in enumerate(self._ports)
            if n in self._living
        ]
        return MetadataResponse(brokers=brokers, cluster_id="c", controller_id=0, topics=topics)

    def _configs(self, request: Any, version: int, code: int) -> Any:
        of = DescribeConfigsResponse.DescribeConfigsResult
        config = of.DescribeConfigsResourceResult(name="max.message.bytes", value=str(self.batch_limit))
        topic = request.resources[0].resource_name
        configs = [] if code else [config]
        return DescribeConfigsResponse(
            results=[of(error_code=code, resource_name=topic, resource_type=2, configs=configs)]
        )

    def _coordinator(self, request: Any, version: int, code: int) -> Any:
        node = self.group_coordinator if request.key_type == 0 else 0
        found = {
            "node_id": node,
            "host": "127.0.0.1",
            "port": self._ports[node],
            "error_code": code,
            "error_message": "",
        }
        if version < 4:
            return FindCoordinatorResponse(**found)
        return FindCoordinatorResponse(
            coordinators=[FindCoordinatorResponse.Coordinator(key=request.coordinator_keys[0], **found)]
        )

    def _identity(self, request: Any, version: int, code: int) -> Any:
        if not code:
            self._epoch += 1 + self._has_begun  # the abort of what is open takes one, too
            self._has_begun = False
        return InitProducerIdResponse(error_code=code, producer_id=7, producer_epoch=self._epoch)

    def _produced(self, request: Any, version: int, code: int) -> Any:
        self._has_begun = self._has_begun or not code
        of = ProduceResponse.TopicProduceResponse

        def entry(part: Any) -> Any:
            return of.PartitionProduceResponse(
                index=part.index, error_code=code, base_offset=0, record_errors=[], error_message=None
            )

        answers = [
            of(name=topic.name, partition_responses=[entry(part) for part in topic.partition_data])
            for topic in request.topic_data
        ]
        return ProduceResponse(responses=answers)

    def _partitions_added(self, request: Any, version: int, code: int) -> Any:
        self._has_begun = self._has_begun or not code
        of = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
        entry = of.AddPartitionsToTxnPartitionResult
        answers = [
            of(
                name=topic.name,
                results_by_partition=[entry(partition_index=n, partition_error_code=code) for n in topic.partitions],
            )
            for topic in request.v3_and_below_topics
        ]
        return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=answers)

    def _offsets_added(self, request: Any, version: int, code: int) -> Any:
        return AddOffsetsToTxnResponse(error_code=code)

    def _offsets_committed(self, request: Any, version: int, code: int) -> Any:
        of = TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic
        return TxnOffsetCommitResponse(topics=by_topic(request, of, of.TxnOffsetCommitResponsePartition, code))

    def _ended(self, request: Any, version: int, code: int) -> Any:
        self._epoch += not code and version >= 5
        self._has_begun = self._has_begun and bool(code)
        return EndTxnResponse(error_code=code, producer_id=7, producer_epoch=self._epoch)


_ANSWERS: dict[Any, Any] = {
    ApiVersionsRequest: ScriptedBroker._versions,
    MetadataRequest: ScriptedBroker._metadata,
    DescribeConfigsRequest: ScriptedBroker._configs,
    FindCoordinatorRequest: ScriptedBroker._coordinator,
    InitProducerIdRequest: ScriptedBroker._identity,
    ProduceRequest: ScriptedBroker._produced,
    AddPartitionsToTxnRequest: ScriptedBroker._partitions_added,
    AddOffsetsToTxnRequest: ScriptedBroker._offsets_added,
    TxnOffsetCommitRequest: ScriptedBroker._offsets_committed,
    EndTxnRequest: ScriptedBroker._ended,
}


def by_topic(
    request: Any, of: Any, entry: Any, code: int, fields: Callable[[Any], dict[str, Any]] = lambda _: {}
) -> Any:
    """The topics of an answer as those of its request: ``fields`` of each partition, beside its number and the code."""
    return [
        of(
            name=topic.name,
            partitions=[
                entry(partition_index=part.partition_index, error_code=code, **fields(part))
                for part in topic.partitions
            ],
        )
        for topic in request.topics
    ]


def speak(request: Any, answer: Callable[[Any, Any, int, int], Any]) -> None:
    """Let scripted brokers take one more request: a class of kafka-python's, and a method that makes the answer from
    the broker, the request, its version, and a code."""
    if request.API_KEY not in _BY_KEY:
        _REQUESTS.append(request)
        _BY_KEY[request.API_KEY] = request
    _ANSWERS[request] = answer


def named(index: int, reason: str) -> Callable[[Any], None]:
    """An answer to Produce that refuses the record with this index (87, INVALID_RECORD)."""

    def change(answer: Any) -> None:
        of = ProduceResponse.TopicProduceResponse.PartitionProduceResponse
        part = answer.responses[0].partition_responses[0]
        part.error_code = 87
        part.record_errors = [of.BatchIndexAndErrorMessage(batch_index=index, batch_index_error_message=reason)]

    return change


PARTITIONS = 4
STEPS = ("Produce", "AddPartitions", "AddOffsets", "TxnOffsetCommit", "EndTxn", "InitProducerId")
METADATA = GroupMetadata(1, 5, "member", "instance")


def output(number: int, partition: int = -1, topic: str = "t", size: int = 1) -> Output:
    return Output(topic, b"v" * size, b"k%d" % number, None, partition, 0, 0, number)


@asynccontextmanager
async def opened(broker: ScriptedBroker, timeout: float = 5.0, *, alone: bool = False) -> AsyncIterator[WireSlot]:
    cluster = Cluster(ProducerSettings.of(broker.bootstrap_servers, "client", {}))
    slot = WireSlot("id", cluster, "group", call_timeout_seconds=timeout, transaction_timeout_seconds=60, alone=alone)
    await slot.reopen(["t"])
    try:
        yield slot
    finally:
        slot.abandon()


async def encoded(slot: WireSlot, *outputs: Output) -> EncodedTransaction:
    records = EncodedTransaction(slot._cluster, slot._timeout)
    await records.complete(outputs)
    return records


async def flush(slot: WireSlot, *outputs: Output, fence: Callable[[], GroupMetadata] = lambda: METADATA) -> None:
    await slot.flush(await encoded(slot, *outputs), {"in": {0: 7}}, fence)


async def transact(slot: WireSlot, outputs: list[Output] | None = None) -> list[str]:
    """Run one transaction; returns what happened on the way."""
    happened: set[str] = set()
    await flush(slot, *(outputs or [output(n, n % PARTITIONS) for n in range(8)]))
    await slot.commit(lambda: happened.add("requested"))
    return [*happened]
