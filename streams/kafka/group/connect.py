"""A membership and the take-over questions on one client: which stack speaks the group protocol is decided here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from streams.kafka.group.coordinator import KafkaPythonLink
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.membership import GroupMembership
from streams.kafka.questions.takeover import KafkaPythonTakeOver
from streams.kafka.wire import kafka_python_settings
from streams.kafka.wire.kafka_python_client import KafkaPythonClient
from streams.kafka.wire.security import PLAINTEXT, Security
from streams.model.group import Assignor

KAFKA_PYTHON: Final = "kafka-python"
WIRE: Final = "wire"
OVER: Final = "KES_GROUP_OVER"
"""A private choice, for one release: the environment variable that names the stack."""


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
) -> tuple[GroupMembership, KafkaPythonTakeOver]:
    """A membership and the take-over questions on one shared client. ``membership.close`` closes both. No I/O yet.

    ``assignors``: strategy name -> how it shares, the preferred one first. ``settings`` are ``changelog``, timeouts and
    ``static`` (``GroupSettings``). ``alive``: see ``GroupMembership``. Raises ``ConfigError``.
    """
    changelog = settings.pop("changelog", "")
    checked = GroupSettings(
        group_id=group_id, topic=topic, instance=instance, partitions=partitions, assignors=assignors, **settings
    )
    client = KafkaPythonClient(bootstrap_servers, instance, kafka_python_settings.translated(security))
    link = KafkaPythonLink(client, checked)
    return GroupMembership(link, checked, alive), KafkaPythonTakeOver(client, group_id, topic, changelog=changelog)
