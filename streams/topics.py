"""Names and settings of the topics that belong to an event source.

Internal topics are named ``<group>.<source topic>.<purpose>``: one group reads one source, and an operator sees at once
which group a topic belongs to.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

MAX_NAME_LENGTH: Final = 249
"""Kafka's limit for topic names (``Topic.MAX_NAME_LENGTH``)."""


class TopicSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as it must be. ``configs`` holds only the settings that matter to correctness; others are the
    operator's."""

    name: str
    partitions: int
    replication_factor: int
    configs: dict[str, str] = {}
    may_have_more: bool = False
    """More partitions than these are no difference."""


class TopicIdentity(NamedTuple):
    """A topic as the cluster knows it now. ``topic_id``: as Kafka's tools print it, another one after the topic was
    deleted and created again. ``cluster``: the cluster's id."""

    topic_id: str
    partitions: int
    cluster: str = ""


def missing(name: str) -> str:
    """Return the message for a topic that does not exist."""
    return f"topic {name} does not exist"


def unread(name: str, known: int, partitions: int) -> str:
    """Return the message for a source topic that has more partitions than the settings of its event source."""
    return (
        f"topic {name} has {partitions} partitions, settings say {known}: no member reads the records in the partitions"
        f" {known} to {partitions - 1}. Stop all members, run `kes topics grow MODULE:SOURCE`, set "
        f"num_partitions={partitions}, and start again; keys move to partitions that do not have their state"
    )


def changelog_name(group_id: str, topic: str) -> str:
    """Return the name of the compacted topic of a source's state changes and input offsets."""
    return f"{group_id}.{topic}.changelog"


def commit_log_name(group_id: str, topic: str) -> str:
    """Return the name of the topic that stands in for a source topic on another cluster: the group's offsets are
    committed under its name, in the transaction that they belong to. Nothing is ever written to it."""
    return f"{group_id}.{topic}.commit-log"


def dead_letter_name(group_id: str, topic: str) -> str:
    """Return the name of the topic of the records that the error policy gave up on."""
    return f"{group_id}.{topic}.dead-letters"
