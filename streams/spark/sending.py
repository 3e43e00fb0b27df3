"""Arrow batches into a Kafka producer."""

from __future__ import annotations

import itertools
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer

from streams.errors import RecordRefused
from streams.records import TYPE_HEADER, VERSION_HEADER
from streams.spark.kafka import TIMEOUT_SECONDS, translated

_NAMES = ("topic", "key", "value", "type", "version", "headers", "partition")


class Sender:
    """Hands rows to a producer. No callback per row: a record that fails makes the commit of the transaction fail.

    ``topic``: of all rows, else each names its own. ``doing`` is for messages.
    """

    def __init__(
        self, producer: Producer, metadata: Consumer, topic: str | None, kafka: dict[str, str], doing: str
    ) -> None:
        self._producer = producer
        self._metadata = metadata
        self._topic = topic
        self._kafka = kafka
        self._doing = doing
        self._partitions: dict[str, int] = {}
        self._headers: dict[tuple[str | None, int | None], list[tuple[str, bytes]]] = {}

    def partitions_of(self, topic: str) -> int:
        """The number of partitions. Raises ``TopicError``: a produce to a missing topic would wait for its whole
        timeout. Asked for once, by a consumer, because its question does not create the topic."""
        if (count := self._partitions.get(topic)) is not None:
            return count
        try:
            found = self._metadata.list_topics(topic, TIMEOUT_SECONDS).topics[topic]
        except KafkaException as error:
            raise translated(error, f"{self._doing}: asking for topic {topic!r}", self._kafka) from error
        if found.error is not None:
            raise translated(KafkaException(found.error), f"{self._doing}: topic {topic!r}", self._kafka)
        count = self._partitions[topic] = len(found.partitions)
        return count

    def send(self, batch: Any) -> int:
        """Hand over one batch and return its number of rows. Raises ``RecordRefused``, ``TopicError``."""
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != "timestamp"}
        nothing = itertools.repeat(None)
        stamps = _milliseconds(batch) if "timestamp" in batch.schema.names else nothing
        rows = zip(*(columns.get(name, nothing) for name in _NAMES), stamps, range(batch.num_rows), strict=False)
        producer = self._producer
        for topic, key, value, kind, version, headers, partition, stamp, _ in rows:
            topic = self._topic or topic
            if topic is None:
                raise RecordRefused(f"{self._doing}: a row has null in its column topic; nothing was written")
            count = self._partitions.get(topic) or self.partitions_of(topic)
            ours = self._headers.get((kind, version))
            if ours is None:
                ours = self._headers[kind, version] = _type_headers(kind, version)
            extra: dict[str, Any] = {}
            if partition is not None:
                if not 0 <= partition < count:
                    raise RecordRefused(
                        f"{self._doing}: a row names partition {partition} of {topic!r}, which has {count}; drop the "
                        "column partition to let the key decide. Nothing was written"
                    )
                extra["partition"] = partition
            if stamp is not None:
                extra["timestamp"] = stamp
            record_headers: Any = _merged(headers, ours) if headers else ours
            while True:
                try:
                    producer.produce(topic, value, key, headers=record_headers, **extra)
                    break
                except BufferError:
                    producer.poll(0.05)
        producer.poll(0)
        return int(batch.num_rows)


def _milliseconds(batch: Any) -> list[int | None]:
    micros = batch.column("timestamp").cast("int64").to_pylist()
    return [None if value is None else value // 1000 for value in micros]


def _type_headers(kind: str | None, version: int | None) -> list[tuple[str, bytes]]:
    if kind is None:
        return []
    headers = [(TYPE_HEADER, kind.encode())]
    if version is not None and version > 1:
        headers.append((VERSION_HEADER, b"%d" % version))
    return headers


def _merged(headers: list[dict[str, Any]], ours: list[tuple[str, bytes]]) -> list[tuple[str, bytes | None]]:
    """The row's own headers; its columns ``type`` and ``version`` win over headers of the same meaning."""
    replaced = {TYPE_HEADER, VERSION_HEADER} if ours else set()
    return [*ours, *((each["key"], each["value"]) for each in headers if each["key"] not in replaced)]
