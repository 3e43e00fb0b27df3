"""Deleting the beginning of a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from streams.kafka.questions.admin import TopicAdmin


class LogTrimmer(TopicAdmin):
    """A ``TopicAdmin`` that deletes records, too. Any thread; every call blocks."""

    def delete_before(self, topic: str, partition: int, offset: int, timeout_seconds: float = 30.0) -> int:
        """Delete all records before an offset, and return where the log begins now: what was deleted is gone from
        every replica. Raises as all calls of ``TopicAdmin``."""
        deadline = time.monotonic() + timeout_seconds

        def attempt(client: AdminClient, seconds: float) -> Mapping[TopicPartition, Future[Any]]:
            wanted = [TopicPartition(topic, partition, offset)]
            return client.delete_records(wanted, operation_timeout=seconds, request_timeout=seconds)

        (deleted,) = self._ask("deleting records of", "Delete", attempt, deadline).values()
        return int(deleted.low_watermark)
