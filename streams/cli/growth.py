"""The plan of ``kes topics grow`` and ``regrow``: the topics of a source that get more partitions, and their order."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from rich.table import Table

from streams.cli.console import frameless
from streams.errors import TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.model.topics import missing
from streams.settings.config import EventSourceConfig


class Growth(msgspec.Struct, frozen=True):
    """Plan of the growth: ``steps`` are the topics that have fewer than ``partitions``, with how many they have, in the
    order in which they grow. Further inputs come behind the source's own topics, and the source is the last: what
    follows from a half-way stop is refused at the start."""

    partitions: int
    steps: dict[str, int]


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
            raise TopicError(f"topic {name} has {count} partitions, more than {wanted}; partitions cannot be removed")
    last = sorted(found, key=lambda name: name == config.topic)
    return Growth(wanted, {name: found[name] for name in last if found[name] < wanted})


def growth_table(growth: Growth) -> Table:
    """Format the plan as a table."""
    table = frameless("topic", "partitions", "then")
    for name, count in growth.steps.items():
        table.add_row(name, str(count), str(growth.partitions))
    return table
