"""Requests in bytes, as they come to a node of the simulated broker: their names, their faults, their answers."""

from __future__ import annotations

from typing import Any, Final

from streams.kafka.wire import kafka_python

REQUESTS: Final[list[Any]] = [
    kafka_python.ApiVersionsRequest,
    kafka_python.DescribeConfigsRequest,
    kafka_python.FindCoordinatorRequest,
    kafka_python.MetadataRequest,
    kafka_python.AddOffsetsToTxnRequest,
    kafka_python.AddPartitionsToTxnRequest,
    kafka_python.EndTxnRequest,
    kafka_python.InitProducerIdRequest,
    kafka_python.ProduceRequest,
    kafka_python.TxnOffsetCommitRequest,
]
FURTHER: Final[list[Any]] = [
    kafka_python.DeleteRecordsRequest,
    kafka_python.DescribeLogDirsRequest,
    kafka_python.DescribeProducersRequest,
    kafka_python.DescribeTransactionsRequest,
    kafka_python.HeartbeatRequest,
    kafka_python.JoinGroupRequest,
    kafka_python.LeaveGroupRequest,
    kafka_python.ListOffsetsRequest,
    kafka_python.ListTransactionsRequest,
    kafka_python.OffsetCommitRequest,
    kafka_python.OffsetFetchRequest,
    kafka_python.SyncGroupRequest,
]
"""Requests that a broker knows by ``WireBroker.serve`` only."""
_BY_KEY: Final = {request.API_KEY: request for request in (*REQUESTS, *FURTHER)}


def name_of(request: Any) -> str:
    """Name a class of requests."""
    return str(request.__name__).removesuffix("Request").removesuffix("ToTxn")


_OF_A_TRANSACTION: Final = {"InitProducerId": "init", "Produce": "flush", "TxnOffsetCommit": "send_offsets"}
POINTS: Final = (
    *("init", "flush", "send_offsets", "commit", "abort"),
    *("ApiVersions", "FindCoordinator", "Metadata", "AddOffsets", "AddPartitions"),
)
"""Names of requests as points of a process; rare ones are left out."""


class Request:
    """A request as it came. ``kind``: of its faults (``faults.POSSIBLE``). ``point``: its name as a point."""

    def __init__(self, frame: bytes) -> None:
        self.version = int.from_bytes(frame[2:4], "big")
        request = _BY_KEY[int.from_bytes(frame[:2], "big")]
        self.name = name_of(request)
        self.body: Any = request.decode(frame, version=self.version, header=True)
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
        return self.kind if self.name == "EndTxn" else _OF_A_TRANSACTION.get(self.name, self.name)

    def encoded(self, **fields: Any) -> bytes:
        """Encode an answer to it."""
        answer = self.answer_class(version=self.version, **fields)
        answer.API_VERSION = self.version
        answer.with_header(correlation_id=self.body.header.correlation_id)
        return bytes(answer.encode(header=True, framed=True))

    @property
    def answer_class(self) -> Any:
        """The class of answers to it."""
        return self.body.header.get_response_class()


_KINDS: Final = {
    "InitProducerId": "init",
    "AddPartitions": "flush",
    "AddOffsets": "flush",
    "Produce": "flush",
    "TxnOffsetCommit": "send",
    **dict.fromkeys(("JoinGroup", "SyncGroup", "Heartbeat", "LeaveGroup", "OffsetCommit", "OffsetFetch"), "member"),
    **dict.fromkeys(("ListOffsets", "DeleteRecords", "DescribeProducers"), "leader"),
}
