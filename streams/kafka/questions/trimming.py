"""Deleting the beginning of a log."""

from __future__ import annotations

import time

from streams.kafka import permissions
from streams.kafka.questions.admin import TopicAdmin


class LogTrimmer(TopicAdmin):
    """A ``TopicAdmin`` that deletes records, too. Any thread; every call blocks."""

    def delete_before(self, topic: str, partition: int, offset: int, timeout_seconds: float = 30.0) -> int:
        """Delete all records before an offset, and return where the log begins now: what was deleted is gone from
        every replica. Raises as all calls of ``TopicAdmin``."""
        begins = self._asked(
            f"deleting records of {topic}[{partition}]",
            time.monotonic() + timeout_seconds,
            lambda limit: self._delete_records(topic, {partition: offset}, limit),
            [permissions.on_topic("Delete", topic)],
        )
        return begins[partition]
