"""LeaveGroup: the others need not wait for a session. On the loop of the client."""

from __future__ import annotations

from streams.kafka import permissions
from streams.kafka.wire.client import GROUP, WireClient
from streams.kafka.wire.codes import Code, raise_for
from streams.kafka.wire.schemas.leave_group import LeaveGroupRequest

_REASON_FROM = 5  # the version from which on a leaver says why


async def leave_group(
    client: WireClient, group_id: str, member_id: str, instance: str | None, deadline: float, reason: str = ""
) -> bool:
    """Take a member out of a group: by its id, or a static one by its instance. ``False``: it was not in it. ``reason``
    is for the broker's log. Raises ``StreamsError``."""
    # Not on the member's own connection: a JoinGroup that waits there would hold this up.
    request = LeaveGroupRequest(
        group_id=group_id,
        member_id=member_id,
        members=[
            LeaveGroupRequest.MemberIdentity(member_id=member_id, group_instance_id=instance, reason=reason or None)
        ],
    )

    async def attempt() -> bool:
        node = await client.coordinator(GROUP, group_id, deadline)
        answer = await client.send(request, node, deadline, most=_REASON_FROM)
        raise_for(answer.error_code)
        code = answer.members[0].error_code if answer.members else 0
        if code == Code.UNKNOWN_MEMBER_ID:
            return False
        raise_for(code)
        return True

    return await client.until(deadline, f"leaving group {group_id}", attempt, [permissions.on_group("Read", group_id)])
