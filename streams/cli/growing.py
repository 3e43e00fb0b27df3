"""Plan and checks of ``kes topics grow``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from streams.clients import kafka_python_settings
from streams.clients.admin import TopicAdmin
from streams.clients.group_view import GroupQuestions
from streams.config import EventSourceConfig
from streams.errors import TopicError
from streams.topics import missing

KEYS_MOVE: Final = (
    "Partitions can never be taken away again. Keys move: from now on most keys belong to other partitions than those "
    "that hold their state, and begin there without any."
)


class Growth(msgspec.Struct, frozen=True):
    """Plan of the growth: ``steps`` are the topics that have fewer than ``partitions``, with how many they have, in the
    order in which they grow. The source is the last: what follows from a half-way stop is refused at the start."""

    partitions: int
    steps: dict[str, int]


def refuse_members(servers: str, config: EventSourceConfig, timeout_seconds: float) -> None:
    """Raise ``TopicError`` if the group has members: members share out the partitions that they started with."""
    security = kafka_python_settings.translate(kafka_python_settings.security_only(config.client_settings))
    questions = GroupQuestions(servers, security)
    try:
        members = questions.look(config.group_id, timeout_seconds).members
    finally:
        questions.close()
    if members:
        named = ", ".join(sorted(member.instance for member in members))
        raise TopicError(
            f"the group {config.group_id} has members ({named}): stop all of them first, or wait until the sessions of "
            f"those that died have expired (kes group {config.group_id})"
        )


def planned(
    by_topic: Mapping[str, TopicAdmin], config: EventSourceConfig, partitions: int, timeout_seconds: float
) -> Growth:
    """Plan the partitions to add; ``by_topic``: the source's topics, and the client that changes each. ``partitions``:
    0 for as many as the source topic has. Raises ``TopicError`` for a topic that is missing, or has more."""
    found: dict[str, int] = {}
    for name, admin in by_topic.items():
        identity = admin.identity(name, timeout_seconds)
        if identity is None:
            raise TopicError(f"{missing(name)}: kes topics apply creates it, with num_partitions of the settings")
        found[name] = identity[1]
    wanted = partitions or found[config.topic]
    for name, count in found.items():
        if count > wanted:
            raise TopicError(f"topic {name} has {count} partitions, more than {wanted}; none can be taken away")
    last = sorted(found, key=lambda name: name == config.topic)
    return Growth(wanted, {name: found[name] for name in last if found[name] < wanted})


def growth_table(growth: Growth) -> Table:
    """Format the plan as a table."""
    table = Table("topic", "partitions", "then", box=SIMPLE_HEAD, pad_edge=False)
    for name, count in growth.steps.items():
        table.add_row(name, str(count), str(growth.partitions))
    return table
