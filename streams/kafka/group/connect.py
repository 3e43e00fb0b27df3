"""A membership and the take-over questions on one client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.membership import GroupMembership
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
    """A membership and the take-over questions. ``membership.start`` starts the client of both, ``membership.close``
    closes it. No I/O yet.

    ``assignors``: strategy name -> how it shares, the preferred one first. ``settings`` are ``changelog``, timeouts and
    ``static`` (``GroupSettings``). ``alive``: see ``GroupMembership``. Raises ``ConfigError``.
    """
    changelog = settings.pop("changelog", "")
    checked = GroupSettings(
        group_id=group_id, topic=topic, instance=instance, partitions=partitions, assignors=assignors, **settings
    )
    client = WireClient(bootstrap_servers, instance, security)
    take_over = WireTakeOver(client, group_id, topic, changelog=changelog)
    return GroupMembership(client, checked, alive), take_over
