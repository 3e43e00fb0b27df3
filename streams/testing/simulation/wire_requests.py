"""Requests in bytes, as they come to a node of the simulated broker: their names, their faults, their answers."""

from __future__ import annotations

import struct
from typing import Any, Final

from streams.kafka.wire import message
from streams.kafka.wire.codec import WireBytes, decode, encode
from streams.kafka.wire.message import is_flexible
from streams.kafka.wire.schemas.add_offsets_to_txn import AddOffsetsToTxnRequest
from streams.kafka.wire.schemas.add_partitions_to_txn import AddPartitionsToTxnRequest
from streams.kafka.wire.schemas.api_versions import ApiVersionsRequest
from streams.kafka.wire.schemas.consumer_group_describe import ConsumerGroupDescribeRequest
from streams.kafka.wire.schemas.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from streams.kafka.wire.schemas.delete_records import DeleteRecordsRequest
from streams.kafka.wire.schemas.describe_configs import DescribeConfigsRequest
from streams.kafka.wire.schemas.describe_groups import DescribeGroupsRequest
from streams.kafka.wire.schemas.describe_log_dirs import DescribeLogDirsRequest
from streams.kafka.wire.schemas.describe_producers import DescribeProducersRequest
from streams.kafka.wire.schemas.describe_transactions import DescribeTransactionsRequest
from streams.kafka.wire.schemas.end_txn import EndTxnRequest
from streams.kafka.wire.schemas.find_coordinator import FindCoordinatorRequest
from streams.kafka.wire.schemas.heartbeat import HeartbeatRequest
from streams.kafka.wire.schemas.init_producer_id import InitProducerIdRequest
from streams.kafka.wire.schemas.join_group import JoinGroupRequest
from streams.kafka.wire.schemas.leave_group import LeaveGroupRequest
from streams.kafka.wire.schemas.list_offsets import ListOffsetsRequest
from streams.kafka.wire.schemas.list_transactions import ListTransactionsRequest
from streams.kafka.wire.schemas.metadata import MetadataRequest
from streams.kafka.wire.schemas.offset_commit import OffsetCommitRequest
from streams.kafka.wire.schemas.offset_fetch import OffsetFetchRequest
from streams.kafka.wire.schemas.produce import ProduceRequest
from streams.kafka.wire.schemas.sync_group import SyncGroupRequest
from streams.kafka.wire.schemas.txn_offset_commit import TxnOffsetCommitRequest

RequestClass = type[message.Request[Any]]
REQUESTS: Final[list[RequestClass]] = [
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
FURTHER: Final[list[RequestClass]] = [
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    DescribeGroupsRequest,
    DeleteRecordsRequest,
    DescribeLogDirsRequest,
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListOffsetsRequest,
    ListTransactionsRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
    SyncGroupRequest,
]
"""Requests that a broker knows by ``WireBroker.serve`` only."""
_BY_KEY: Final = {request.API_KEY: request for request in (*REQUESTS, *FURTHER)}
_HEAD: Final = struct.Struct(">hhih")  # key, version, correlation id, length of the client's id


def name_of(request: RequestClass) -> str:
    """Name a class of requests."""
    return request.__name__.removesuffix("Request").removesuffix("ToTxn")


_POINTS: Final = {
    "InitProducerId": "init",
    "Produce": "flush",
    "TxnOffsetCommit": "send_offsets",
    "JoinGroup": "join",
    "DeleteRecords": "purge",
}
POINTS: Final = (
    *("init", "flush", "send_offsets", "commit", "abort", "join", "SyncGroup", "OffsetFetch"),
    *("ApiVersions", "FindCoordinator", "Metadata", "AddOffsets", "AddPartitions"),
)
"""Names of requests as points of a process; rare ones are left out."""


class Request:
    """A request as it came. ``kind``: of its faults (``faults.POSSIBLE``). ``point``: its name as a point."""

    def __init__(self, frame: bytes) -> None:
        key, self.version, self._correlation, length = _HEAD.unpack_from(frame)
        self._class = request = _BY_KEY[key]
        self.name = name_of(request)
        source = WireBytes(frame, _HEAD.size)
        self.client_id = frame[source.at : source.at + length].decode()
        source.skip(max(length, 0))
        if is_flexible(request, self.version):
            source.tags()
        self.body: Any = decode(request, frame, self.version, source.at)
        self.throttle_ms = 0
        """The time to be silent, in the answer."""
        prefix = "v3_and_below_" if self.name == "AddPartitions" else ""
        self.transactional_id = str(getattr(self.body, f"{prefix}transactional_id", ""))
        self.producer = (
            getattr(self.body, f"{prefix}producer_id", -1),
            getattr(self.body, f"{prefix}producer_epoch", -1),
        )

    @property
    def kind(self) -> str:
        if self.name == "EndTxn":
            return "commit" if self.body.committed else "abort"
        return _KINDS.get(self.name, "ask")

    @property
    def point(self) -> str:
        return self.kind if self.name == "EndTxn" else _POINTS.get(self.name, self.name)

    def encoded(self, **fields: Any) -> bytes:
        """Encode an answer to it."""
        head = struct.pack(">i", self._correlation)
        if is_flexible(self._class, self.version) and self._class is not ApiVersionsRequest:  # KIP-511
            head += b"\0"
        if self.throttle_ms:
            fields["throttle_time_ms"] = self.throttle_ms
        frame = head + encode(self.answer_class(**fields), self.version)
        return struct.pack(">i", len(frame)) + frame

    @property
    def answer_class(self) -> Any:
        """The class of answers to it."""
        return self._class.ANSWER


_KINDS: Final = {
    "InitProducerId": "init",
    "AddPartitions": "flush",
    "AddOffsets": "flush",
    "Produce": "flush",
    "TxnOffsetCommit": "send",
    **dict.fromkeys(("JoinGroup", "SyncGroup", "Heartbeat", "LeaveGroup", "OffsetCommit", "OffsetFetch"), "member"),
    "ConsumerGroupHeartbeat": "member",
    **dict.fromkeys(("ListOffsets", "DeleteRecords", "DescribeProducers"), "leader"),
}
