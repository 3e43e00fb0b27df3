"""Requests about the members of one group: describe the group, take a member out of it.

Threads: coroutines of the client's IO thread.
"""

from __future__ import annotations

import warnings
from typing import Any, Final

from streams.kafka.wire.kafka_python import ApiMessage, DescribeGroupsRequest, LeaveGroupRequest, errors
from streams.kafka.wire.kafka_python_client import GROUP, KafkaPythonClient, raise_for


async def describe_group(client: KafkaPythonClient, group_id: str, node: int, deadline: float) -> tuple[Any, Any]:
    """Return the group as a classic one, and as one of the broker's protocol (KIP-848). It is of one kind, and ``None``
    as the other; both are ``None`` if there is no such group."""
    request = DescribeGroupsRequest(groups=[group_id], min_version=4, max_version=5)
    classic = (await client.send(request, node, deadline)).groups[0]
    raise_for(classic.error_code)
    if classic.group_state != "Dead":
        return classic, None
    request = _ConsumerGroupDescribeRequest(group_ids=[group_id], include_authorized_operations=False)
    try:
        described = (await client.send(request, node, deadline)).groups[0]
    except errors.UnsupportedVersionError:  # a broker that has classic groups only
        return None, None
    if described.error_code == errors.GroupIdNotFoundError.errno:
        return None, None
    raise_for(described.error_code)
    return None, described


async def leave_group(
    client: KafkaPythonClient, group_id: str, member_id: str, instance: str | None, deadline: float
) -> bool:
    """Take a member out of the group: by its id, or a static one by its instance. ``False``: it was not in it. On the
    IO thread."""
    # Not on the connection that the coordinator client has of its own: a JoinGroup that waits there would hold this up.
    node = await client.coordinator(GROUP, group_id, deadline)
    leaver = LeaveGroupRequest.MemberIdentity(member_id=member_id, group_instance_id=instance)
    answer = await client.send(
        LeaveGroupRequest(group_id=group_id, member_id=member_id, members=[leaver]), node, deadline
    )
    raise_for(answer.error_code)
    code = answer.members[0].error_code if answer.members else 0
    if code == errors.UnknownMemberIdError.errno:
        return False
    raise_for(code)
    return True


# ---------------------------------------------------------------------- API 69, which kafka-python does not have yet


def _field(name: str, kind: str, *fields: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "versions": "0+", **({"fields": list(fields)} if fields else {}), **more}


def _api(kind: str, *fields: dict[str, Any]) -> dict[str, Any]:
    name = f"ConsumerGroupDescribe{kind.title()}"
    return {
        "apiKey": 69,
        "type": kind,
        "name": name,
        "validVersions": "0",
        "flexibleVersions": "0+",
        "fields": list(fields),
    }


_NULLABLE: Final = {"nullableVersions": "0+", "default": "null"}
_PLACES: Final = _field(
    "TopicPartitions",
    "[]TopicPartitions",
    _field("TopicId", "uuid"),
    _field("TopicName", "string"),
    _field("Partitions", "[]int32"),
)
_REQUEST: Final = _api("request", _field("GroupIds", "[]string"), _field("IncludeAuthorizedOperations", "bool"))
_MEMBER: Final = (
    _field("MemberId", "string"),
    _field("InstanceId", "string", **_NULLABLE),
    _field("RackId", "string", **_NULLABLE),
    _field("MemberEpoch", "int32"),
    _field("ClientId", "string"),
    _field("ClientHost", "string"),
    _field("SubscribedTopicNames", "[]string"),
    _field("SubscribedTopicRegex", "string", **_NULLABLE),
    _field("Assignment", "Assignment", _PLACES),
    _field("TargetAssignment", "Assignment", _PLACES),
)
_GROUP: Final = (
    _field("ErrorCode", "int16"),
    _field("ErrorMessage", "string", **_NULLABLE),
    _field("GroupId", "string"),
    _field("GroupState", "string"),
    _field("GroupEpoch", "int32"),
    _field("AssignmentEpoch", "int32"),
    _field("AssignorName", "string"),
    _field("Members", "[]Member", *_MEMBER),
    _field("AuthorizedOperations", "int32", default="-2147483648"),
)
_RESPONSE: Final = _api("response", _field("ThrottleTimeMs", "int32"), _field("Groups", "[]DescribedGroup", *_GROUP))


def _message(base_name: str, schema: dict[str, Any]) -> Any:
    """A message class of kafka-python for a schema that it does not ship. It finds schemas by the name of the class,
    and lets the class change what it found."""

    def json_patch(_metaclass: Any, _shipped: Any) -> dict[str, Any]:
        return schema

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # kafka-python's own use of importlib.resources
        return type(ApiMessage)(base_name, (ApiMessage,), {"json_patch": classmethod(json_patch)})


_ConsumerGroupDescribeRequest: Any = _message("DescribeGroupsRequest", _REQUEST)
_ConsumerGroupDescribeResponse: Any = _message("DescribeGroupsResponse", _RESPONSE)
