"""A membership and the take-over questions on one client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.membership import GroupMembership
from streams.kafka.group.wire_link import WireLink
from streams.kafka.questions.takeover import WireTakeOver
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.security import PLAINTEXT, Security
from streams.model.group import Assignor


def connect_group(
    bootstrap_servers: str,
    group_id: str,
    topic: str,
    partitions: int,
    instance: str,
    assignors: Mapping[str, Assignor],
    *,
    security: Security = PLAINTEXT,
    alive: Callable[[], bool] = lambda: True,
    **settings: Any,
) -> tuple[GroupMembership, WireTakeOver]:
    """A membership and the take-over questions on one shared client. ``membership.close`` closes both. No I/O yet."""
    changelog = settings.pop("changelog", "")
    checked = GroupSettings(
        group_id=group_id, topic=topic, instance=instance, partitions=partitions, assignors=assignors, **settings
    )
    client = WireClient(bootstrap_servers, instance, security)
    link = WireLink(client, checked)
    return GroupMembership(link, checked, alive), WireTakeOver(client, group_id, topic, changelog=changelog)
