"""The departure of a member: the others need not wait for a session. On the loop of the client."""

from __future__ import annotations

from functools import partial

from streams.kafka import permissions
from streams.kafka.questions.groups import leave_group
from streams.kafka.wire.client import WireClient


async def depart(
    client: WireClient, group_id: str, member_id: str, instance: str | None, deadline: float, reason: str = ""
) -> bool:
    """Take a member out of a group (``leave_group``), however often it takes. Raises ``StreamsError``."""
    attempt = partial(leave_group, client, group_id, member_id, instance, deadline, reason)
    return await client.until(deadline, f"leaving group {group_id}", attempt, [permissions.on_group("Read", group_id)])
