"""Requests about the members of one group: describe the group, take a member out of it.

Coroutines of the client's loop.
"""

from __future__ import annotations

from typing import Final

from streams.kafka.wire.client import GROUP, WireClient
from streams.kafka.wire.codes import BrokerRefusal, Code, raise_for
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.schemas.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
)
from streams.kafka.wire.schemas.describe_groups import DescribeGroupsRequest, DescribeGroupsResponse
from streams.kafka.wire.schemas.leave_group import LeaveGroupRequest
from streams.kafka.wire.topic_questions import only

ClassicGroup = DescribeGroupsResponse.DescribedGroup
ClassicMember = ClassicGroup.DescribedGroupMember
BrokerSideGroup = ConsumerGroupDescribeResponse.DescribedGroup
BrokerSideMember = BrokerSideGroup.Member

_WITH_INSTANCES: Final = 4
DESCRIBE_GROUPS: Final = 5
"""The newest version that describes a group that there is not as ``Dead``."""
_WITH_MEMBERS: Final = 3
"""The first version of LeaveGroup that names members."""


async def describe_group(
    client: WireClient, group_id: str, deadline: float
) -> tuple[ClassicGroup | None, BrokerSideGroup | None]:
    """Return the group as a classic one, and as one of the broker's protocol (KIP-848). It is of one kind, and ``None``
    as the other; both are ``None`` if there is no such group."""
    node = await client.coordinator(GROUP, group_id, deadline)
    request = DescribeGroupsRequest(groups=[group_id])
    answer = await client.send(request, node, deadline, least=_WITH_INSTANCES, most=DESCRIBE_GROUPS)
    classic = only(answer.groups, f"group {group_id}")
    raise_for(classic.error_code)
    if classic.group_state != "Dead":
        return classic, None
    try:
        found = await client.send(ConsumerGroupDescribeRequest(group_ids=[group_id]), node, deadline)
        described = only(found.groups, f"group {group_id}")
        raise_for(described.error_code)
    except (BrokerRefusal, LostConnection) as error:
        if error.code in (Code.GROUP_ID_NOT_FOUND, Code.UNSUPPORTED_VERSION.name):  # it has classic groups only
            return None, None
        raise
    return None, described


async def leave_group(
    client: WireClient, group_id: str, member_id: str, instance: str | None, deadline: float, reason: str = ""
) -> bool:
    """Take a member out of the group: by its id, or a static one by its instance. ``False``: it was not in it.
    ``reason`` is for the broker's log."""
    # Not on a member's own connection: a JoinGroup that waits there would hold this up.
    node = await client.coordinator(GROUP, group_id, deadline)
    leaver = LeaveGroupRequest.MemberIdentity(member_id=member_id, group_instance_id=instance, reason=reason or None)
    request = LeaveGroupRequest(group_id=group_id, member_id=member_id, members=[leaver])
    answer = await client.send(request, node, deadline, least=_WITH_MEMBERS)
    raise_for(answer.error_code)
    code = answer.members[0].error_code if answer.members else 0
    if code == Code.UNKNOWN_MEMBER_ID:
        return False
    raise_for(code)
    return True
