"""Markers that do not expire: a compacted topic (option ``markerLog``) beside the offsets of a write's group.

Brokers forget the offsets of a group that commits nothing for a week. So each transaction writes its marker a second
time, as a record: key is the write's identity, in one partition that its hash chooses. The offset is read first, and as
both are of one transaction it is never behind the record; the record is read where there is no offset.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from streams.clients.permissions import on_topic
from streams.clients.producing.made_batch import MadeBatch
from streams.clients.producing.record_batch import BATCH_HEAD
from streams.clients.producing.rows import Rows
from streams.errors import BrokerUnavailable, ConfigError, TopicError
from streams.spark.kafka import TIMEOUT_SECONDS, client, topic_admin, translated
from streams.spark.options import KafkaSettings
from streams.spark.writing.markers import Stored

if TYPE_CHECKING:
    from streams.clients.producing.forwarding import BatchForwarder

_LOG_SECONDS: Final = 120.0


class _Record(msgspec.Struct):
    offset: int
    metadata: str


@dataclass(frozen=True)
class MarkerLog:
    """The log of markers, as seen by one target of writes."""

    topic: str
    _identity: str
    _kafka: KafkaSettings = field(repr=False)
    _doing: object

    def write(self, forwarder: BatchForwarder, marker: Stored) -> None:
        """Into the forwarder's transaction."""
        count = forwarder.partitions(self.topic)
        if count is None:
            raise self._missing()
        rows = Rows()
        value = msgspec.json.encode(_Record(marker.offset, marker.metadata))
        rows.add(int(time.time() * 1000), self._identity.encode(), value, b"\0", 0)
        (batch,) = rows.batches()
        made = b"".join(batch.encode(-1, -1, -1, None))
        forwarder.send([MadeBatch(self.topic, self._partition(count), count, made[:BATCH_HEAD], made[BATCH_HEAD:])])

    def read(self) -> Stored | None:
        """The newest committed one. Behind the fence only. Raises ``ConfigError`` when the topic is not a compacted
        one.

        Reads up to the *end* of the partition, not to where committed records end at the moment: another sink's
        transaction may still be open in it, with a marker of this one behind it.
        """
        self._check()
        looking = client(Consumer, self._kafka, {"group.id": self._identity, "isolation.level": "read_uncommitted"})
        try:
            place = self._place(looking)
            _, end = looking.get_watermark_offsets(place, TIMEOUT_SECONDS)
        except KafkaException as error:
            doing = f"{self._doing}: topic {self.topic!r} (option markerLog)"
            raise translated(error, doing, self._kafka, [on_topic("Describe", self.topic)]) from error
        finally:
            looking.close()
        settings = {
            "group.id": self._identity,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
        reading: Consumer = client(Consumer, self._kafka, settings)
        try:
            reading.assign([TopicPartition(place.topic, place.partition, OFFSET_BEGINNING)])
            return self._newest(reading, end)
        finally:
            reading.close()

    def _newest(self, reading: Consumer, end: int) -> Stored | None:
        found: Stored | None = None
        deadline = time.monotonic() + _LOG_SECONDS
        while end > 0:
            message = reading.poll(0.5)
            if message is None:
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(
                        f"{self._doing}: topic {self.topic!r} (option markerLog) cannot be read up to offset {end}: no "
                        "answer, or an open transaction of another sink's killed run (until it is run again, or its "
                        "kafka.transaction.timeout.ms). Nothing was written"
                    )
                continue
            error, offset = message.error(), message.offset()
            assert offset is not None
            if error is None:
                if message.key() == self._identity.encode():
                    record = msgspec.json.decode(message.value() or b"", type=_Record)
                    found = Stored(record.offset, record.metadata)
                offset += 1
            elif error.code() != KafkaError._PARTITION_EOF:
                needed = [on_topic("Read", self.topic)]
                raise translated(KafkaException(error), f"{self._doing}: reading {self.topic!r}", self._kafka, needed)
            if offset >= end:
                break
        return found

    def _place(self, metadata: Consumer) -> TopicPartition:
        topic = metadata.list_topics(self.topic, TIMEOUT_SECONDS).topics[self.topic]
        if topic.error is not None:
            raise self._missing()
        return TopicPartition(self.topic, self._partition(len(topic.partitions)))

    def _partition(self, count: int) -> int:
        return zlib.crc32(self._identity.encode()) % count

    def _missing(self) -> TopicError:
        return TopicError(f"topic {self.topic!r} (option markerLog) does not exist: create it, compacted")

    def _check(self) -> None:
        described = topic_admin(self._kafka).describe([self.topic], TIMEOUT_SECONDS)[self.topic]
        if described is None:
            raise self._missing()
        policy = described.configs["cleanup.policy"]
        if policy != "compact":
            raise ConfigError(
                f"{self._doing}: topic {self.topic!r} (option markerLog) has cleanup.policy={policy}: it must be "
                "compact, and nothing else, or the markers go with time. Nothing was written"
            )
