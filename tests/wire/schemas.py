"""Kafka's message definitions, as far as this package speaks them, from which ``streams/kafka/wire/schemas`` is made.

The definitions are the JSON files that kafka-python ships, which are Kafka's own. Those that it does not ship yet
stand here. Run ``python -m tests.wire.generate`` after a change of the table.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

APIS: Final = (
    "AddOffsetsToTxn",
    "AddPartitionsToTxn",
    "ApiVersions",
    "ConsumerGroupDescribe",
    "ConsumerGroupHeartbeat",
    "CreatePartitions",
    "CreateTopics",
    "DeleteGroups",
    "DeleteRecords",
    "DeleteTopics",
    "DescribeCluster",
    "DescribeConfigs",
    "DescribeGroups",
    "DescribeLogDirs",
    "DescribeProducers",
    "DescribeQuorum",
    "DescribeTransactions",
    "EndTxn",
    "Fetch",
    "FindCoordinator",
    "Heartbeat",
    "InitProducerId",
    "JoinGroup",
    "LeaveGroup",
    "ListGroups",
    "ListOffsets",
    "ListTransactions",
    "Metadata",
    "OffsetCommit",
    "OffsetDelete",
    "OffsetFetch",
    "Produce",
    "SaslAuthenticate",
    "SaslHandshake",
    "SyncGroup",
    "TxnOffsetCommit",
    "WriteTxnMarkers",
)
"""The requests in use. Each has a module of its name, so that a program pays for those that it uses."""
PLAIN: Final = {"consumer_protocol": ("ConsumerProtocolAssignment", "ConsumerProtocolSubscription")}
"""Messages that members of a group send each other, by module."""
DEFAULTS: Final = {
    ("CreatePartitionsRequest", "Assignments"): "null",
    ("ListOffsetsRequest", "ReplicaId"): "-1",
}
"""Defaults that Kafka's definitions leave to the caller. A list of assignments would have to name every replica; a
replica's id of 0 would ask as broker 0 does."""


def _field(name: str, kind: str, *fields: Schema, versions: str = "0+", **more: str) -> Schema:
    return {"name": name, "type": kind, "versions": versions, **({"fields": list(fields)} if fields else {}), **more}


def _api(key: int, name: str, *fields: Schema) -> Schema:
    kind = "request" if name.endswith("Request") else "response"
    head = {"apiKey": key, "type": kind, "name": name, "validVersions": "0-1", "flexibleVersions": "0+"}
    return {**head, "fields": list(fields)}


_NULL: Final = {"nullableVersions": "0+", "default": "null"}
_THROTTLE: Final = _field("ThrottleTimeMs", "int32")
_ERROR: Final = (_field("ErrorCode", "int16"), _field("ErrorMessage", "string", **_NULL))
_OWNED: Final = (_field("TopicId", "uuid"), _field("Partitions", "[]int32"))
_DESCRIBED: Final = _field(
    "TopicPartitions",
    "[]TopicPartitions",
    _field("TopicId", "uuid"),
    _field("TopicName", "string"),
    _field("Partitions", "[]int32"),
)
_MEMBER: Final = (
    _field("MemberId", "string"),
    _field("InstanceId", "string", **_NULL),
    _field("RackId", "string", **_NULL),
    _field("MemberEpoch", "int32"),
    _field("ClientId", "string"),
    _field("ClientHost", "string"),
    _field("SubscribedTopicNames", "[]string"),
    _field("SubscribedTopicRegex", "string", **_NULL),
    _field("Assignment", "Assignment", _DESCRIBED),
    _field("TargetAssignment", "Assignment", _DESCRIBED),
    _field("MemberType", "int8", versions="1+", default="-1"),
)
_GROUP: Final = (
    *_ERROR,
    _field("GroupId", "string"),
    _field("GroupState", "string"),
    _field("GroupEpoch", "int32"),
    _field("AssignmentEpoch", "int32"),
    _field("AssignorName", "string"),
    _field("Members", "[]Member", *_MEMBER),
    _field("AuthorizedOperations", "int32", default="-2147483648"),
)
OWN: Final = {
    schema["name"]: schema
    for schema in (
        _api(
            68,
            "ConsumerGroupHeartbeatRequest",
            _field("GroupId", "string"),
            _field("MemberId", "string"),
            _field("MemberEpoch", "int32"),
            _field("InstanceId", "string", **_NULL),
            _field("RackId", "string", **_NULL),
            _field("RebalanceTimeoutMs", "int32", default="-1"),
            _field("SubscribedTopicNames", "[]string", **_NULL),
            _field("SubscribedTopicRegex", "string", versions="1+", nullableVersions="1+", default="null"),
            _field("ServerAssignor", "string", **_NULL),
            _field("TopicPartitions", "[]TopicPartitions", *_OWNED, **_NULL),
        ),
        _api(
            68,
            "ConsumerGroupHeartbeatResponse",
            _THROTTLE,
            *_ERROR,
            _field("MemberId", "string", **_NULL),
            _field("MemberEpoch", "int32"),
            _field("HeartbeatIntervalMs", "int32"),
            _field("Assignment", "Assignment", _field("TopicPartitions", "[]TopicPartitions", *_OWNED), **_NULL),
        ),
        _api(
            69,
            "ConsumerGroupDescribeRequest",
            _field("GroupIds", "[]string"),
            _field("IncludeAuthorizedOperations", "bool"),
        ),
        _api(69, "ConsumerGroupDescribeResponse", _THROTTLE, _field("Groups", "[]DescribedGroup", *_GROUP)),
    )
}
"""The group protocol of KIP-848, as Kafka 4.0 released it."""
