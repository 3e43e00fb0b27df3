"""A membership and the take-over questions on one client: which stack speaks the group protocol is decided here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from streams.errors import ConfigError
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.link import Link
from streams.kafka.group.membership import GroupMembership
from streams.kafka.group.wire_link import WireLink
from streams.kafka.questions.takeover import WireTakeOver
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.security import PLAINTEXT, Security
from streams.model.group import Assignor

KAFKA_PYTHON: Final = "kafka-python"
WIRE: Final = "wire"
OVER: Final = "KES_GROUP_OVER"
"""A private choice, for one release: the environment variable that names the stack."""
DEFAULT: Final = WIRE


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
    over: str = "",
    **settings: Any,
) -> tuple[GroupMembership, WireTakeOver]:
    """A membership and the take-over questions. ``membership.start`` starts the client of both, ``membership.close``
    closes it. No I/O yet.

    ``assignors``: strategy name -> how it shares, the preferred one first. ``settings`` are ``changelog``, timeouts and
    ``static`` (``GroupSettings``). ``alive``: see ``GroupMembership``. ``over``: the stack, by default that of the
    environment. Raises ``ConfigError``.
    """
    over = over or os.environ.get(OVER, DEFAULT)
    if over not in (KAFKA_PYTHON, WIRE):
        raise ConfigError(f"{OVER} must be {WIRE} or {KAFKA_PYTHON}, not {over!r}")
    changelog = settings.pop("changelog", "")
    checked = GroupSettings(
        group_id=group_id, topic=topic, instance=instance, partitions=partitions, assignors=assignors, **settings
    )
    client = WireClient(bootstrap_servers, instance, security)
    take_over = WireTakeOver(client, group_id, topic, changelog=changelog)
    link = WireLink(client, checked) if over == WIRE else _over_kafka_python(client, security, checked)
    return GroupMembership(link, checked, alive), take_over


def _over_kafka_python(questions: WireClient, security: Security, settings: GroupSettings) -> Link:
    # Loaded for those who choose it: 0.15 s and 20 MB at each start.
    from streams.kafka.group.coordinator import KafkaPythonLink
    from streams.kafka.wire.kafka_python_client import KafkaPythonClient
    from streams.kafka.wire.kafka_python_settings import translated

    theirs = KafkaPythonClient(questions.addresses, settings.instance, translated(security))
    return KafkaPythonLink(theirs, settings, questions)
