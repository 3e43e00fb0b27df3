"""The errors of a reading that trying again does not cure, in the words of all readers."""

from __future__ import annotations

from streams.errors import OffsetError, TopicError
from streams.kafka import permissions
from streams.kafka.permissions import denied


def not_in_log(where: str, offset: int, addresses: str, reason: str) -> OffsetError:
    """Make the error for a position that is not in the log."""
    return OffsetError(
        f"{where}: offset {offset} is not in the log at {addresses} ({reason}): it was deleted by retention,"
        " or the topic was truncated or recreated. Nothing was reset; start from another offset on purpose, or"
        " restore the topic"
    )


def no_such_topic(where: str, addresses: str, name: str) -> TopicError:
    """Make the error for a topic or a partition that is not there. ``name``: Kafka's name of the error."""
    return TopicError(f"{where} does not exist at {addresses} ({name}); it was deleted, or never made")


def not_allowed(where: str, topic: str, name: str) -> TopicError:
    """Make the error for a right that is missing."""
    return TopicError(f"reading {where}: {denied(name, [permissions.on_topic('Read', topic)])}")


def refused(where: str, addresses: str, reason: str) -> TopicError:
    """Make the error for any other refusal."""
    return TopicError(f"{where} can not be read from {addresses}: {reason}")
