"""Kafka's wire protocol as far as a proxy has to read it: request headers, and the answers that name brokers.

Everything else passes byte for byte. A frame is given here without the four bytes of its length. Layouts are those of
``streams/kafka/wire/schemas``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from streams.kafka.wire.codec import MalformedAnswer, WireBytes, decode, encode
from streams.kafka.wire.message import Request, is_flexible
from streams.kafka.wire.schemas.describe_cluster import DescribeClusterRequest
from streams.kafka.wire.schemas.fetch import FetchRequest
from streams.kafka.wire.schemas.find_coordinator import FindCoordinatorRequest
from streams.kafka.wire.schemas.metadata import MetadataRequest
from streams.kafka.wire.schemas.produce import ProduceRequest

Address = tuple[str, int]
"""(host, port)"""

Rename = Callable[[int, Address], Address]
"""(node number, its address) -> the address that clients shall get."""

Api = IntEnum(
    "Api",
    "Produce Fetch ListOffsets Metadata LeaderAndIsr StopReplica UpdateMetadata ControlledShutdown OffsetCommit "
    "OffsetFetch FindCoordinator JoinGroup Heartbeat LeaveGroup SyncGroup DescribeGroups ListGroups SaslHandshake "
    "ApiVersions CreateTopics DeleteTopics DeleteRecords InitProducerId OffsetForLeaderEpoch AddPartitionsToTxn "
    "AddOffsetsToTxn EndTxn WriteTxnMarkers TxnOffsetCommit DescribeAcls CreateAcls DeleteAcls DescribeConfigs "
    "AlterConfigs AlterReplicaLogDirs DescribeLogDirs SaslAuthenticate CreatePartitions CreateDelegationToken "
    "RenewDelegationToken ExpireDelegationToken DescribeDelegationToken DeleteGroups ElectLeaders "
    "IncrementalAlterConfigs AlterPartitionReassignments ListPartitionReassignments OffsetDelete "
    "DescribeClientQuotas AlterClientQuotas DescribeUserScramCredentials AlterUserScramCredentials Vote "
    "BeginQuorumEpoch EndQuorumEpoch DescribeQuorum AlterPartition UpdateFeatures Envelope FetchSnapshot "
    "DescribeCluster DescribeProducers BrokerRegistration BrokerHeartbeat UnregisterBroker DescribeTransactions "
    "ListTransactions AllocateProducerIds ConsumerGroupHeartbeat ConsumerGroupDescribe ControllerRegistration "
    "GetTelemetrySubscriptions PushTelemetry AssignReplicasToDirs ListConfigResources DescribeTopicPartitions "
    "ShareGroupHeartbeat ShareGroupDescribe ShareFetch ShareAcknowledge AddRaftVoter RemoveRaftVoter "
    "UpdateRaftVoter InitializeShareGroupState ReadShareGroupState WriteShareGroupState DeleteShareGroupState "
    "ReadShareGroupStateSummary StreamsGroupHeartbeat StreamsGroupDescribe DescribeShareGroupOffsets "
    "AlterShareGroupOffsets DeleteShareGroupOffsets",
    start=0,
)
"""Request kinds by their names in the protocol."""


def api_name(key: int) -> str:
    """``EndTxn`` for 26; the number as text for one that is not in ``Api``."""
    try:
        return str(Api(key).name)
    except ValueError:
        return str(key)


class MalformedFrame(ValueError):
    """A frame that is not of Kafka's protocol, or of a layout that is not known here."""


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """The fields in front of every request. ``client_id`` is empty for a client that gives none."""

    api: int
    version: int
    correlation: int
    client_id: str

    @property
    def name(self) -> str:
        """Name of the request."""
        return api_name(self.api)


def request_header(frame: bytes) -> RequestHeader:
    """Parse the header of a request. Raises ``MalformedFrame``."""
    try:
        api, version, correlation, length = struct.unpack_from(">hhih", frame)
    except struct.error as error:
        raise MalformedFrame(f"a request of {len(frame)} bytes has no header") from error
    if length > len(frame) - 10:
        raise MalformedFrame(f"a client id of {length} bytes in a request of {len(frame)}")
    client_id = frame[10 : 10 + max(length, 0)].decode("utf-8", "replace")
    return RequestHeader(api, version, correlation, client_id)


def reply_correlation(frame: bytes) -> int:
    """The number of the request that this answers. Raises ``MalformedFrame``."""
    if len(frame) < 4:
        raise MalformedFrame(f"a reply of {len(frame)} bytes")
    return int.from_bytes(frame[:4], "big", signed=True)


@dataclass(frozen=True, slots=True)
class _Naming:
    """A reply that may name brokers: from this version on, in these structures."""

    request: type[Request[Any]]
    brokers: Callable[[Any], Sequence[Any]]
    node: str = "node_id"
    since: int = 0


_NAMING: Final = {
    MetadataRequest.API_KEY: _Naming(MetadataRequest, lambda reply: reply.brokers),
    FindCoordinatorRequest.API_KEY: _Naming(FindCoordinatorRequest, lambda reply: reply.coordinators or [reply]),
    DescribeClusterRequest.API_KEY: _Naming(DescribeClusterRequest, lambda reply: reply.brokers, "broker_id"),
    # the leaders, of a NOT_LEADER reply
    ProduceRequest.API_KEY: _Naming(ProduceRequest, lambda reply: reply.node_endpoints, since=10),
    FetchRequest.API_KEY: _Naming(FetchRequest, lambda reply: reply.node_endpoints, since=16),
}


def with_addresses(api: int, version: int, reply: bytes, rename: Rename) -> bytes:
    """The reply with every broker address renamed. Raises ``MalformedFrame`` if its layout is another one."""
    naming = _NAMING.get(api)
    if naming is None or version < naming.since:
        return reply
    request = naming.request
    try:
        if not request.FIRST_VERSION <= version <= request.LAST_VERSION:
            raise ValueError("the version is not known")
        source = WireBytes(reply, 4)
        if is_flexible(request, version):
            source.tags()
        head, message = reply[: source.at], decode(request.ANSWER, reply, version, source.at)
        named: Any = [each for each in naming.brokers(message) if each.host and each.port >= 0]  # else "there is none"
        if not named:
            return reply
        if head + encode(message, version) != reply:
            raise ValueError("read and written again, it is another one")
    except (MalformedAnswer, ValueError) as error:
        raise MalformedFrame(f"{api_name(api)} v{version}: the reply is not of this layout: {error}") from error
    for each in named:
        each.host, each.port = rename(getattr(each, naming.node), (each.host, each.port))
    return head + encode(message, version)
