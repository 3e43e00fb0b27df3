"""The rights that an event source needs in a cluster with ACLs (docs/guides/security.md has them for all features)."""

from __future__ import annotations

from collections.abc import Iterable

from streams.kafka.permissions import Right, on_group, on_topic
from streams.settings.config import EventSourceConfig


def of_input(topic: str) -> list[Right]:
    """List what an event source needs on its source topic, or on another input."""
    return [on_topic("Read", topic), on_topic("DescribeConfigs", topic)]


def of_source(config: EventSourceConfig, outputs: Iterable[str] = ()) -> list[Right]:
    """List what an event source needs besides; of ``outputs`` only declared ones are known, others to handlers only."""
    loop = (config.loop_topic,) if config.loop else ()
    written = (config.changelog, config.dead_letters, *outputs, *loop)  # requests for visits come from others
    return [
        on_topic("Read", config.changelog),
        *(of_input(config.offsets_topic) if config.source_is_elsewhere else ()),
        *(on_topic(operation, topic) for topic in written for operation in ("Write", "DescribeConfigs")),
        *(on_topic("Delete", topic) for topic in loop),  # of records that are handled
        on_group("Read", config.group_id),
        Right("Write", "transactional-id", f"{config.group_id}.", prefixed=True),
    ]
