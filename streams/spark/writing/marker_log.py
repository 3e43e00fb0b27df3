"""Markers that do not expire: a compacted topic (option ``markerLog``) beside the offsets of a write's group.

Brokers forget the offsets of a group that commits nothing for a week. So each transaction writes its marker a second
time, as a record: key is the write's identity, in one partition that its hash chooses. The offset is read first, and as
both are of one transaction it is never behind the record; the record is read where there is no offset.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from streams.errors import BrokerUnavailable, ConfigError, TopicError
from streams.kafka.questions.admin import TopicDescription
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.wire.placement import BATCH_HEAD
from streams.kafka.writing.made_batch import MadeBatch
from streams.kafka.writing.rows import Rows
from streams.spark.kafka import TIMEOUT_SECONDS, settings_of, topic_admin
from streams.spark.options import KafkaSettings
from streams.spark.writing.markers import Stored

if TYPE_CHECKING:
    from streams.kafka.writing.forwarding import BatchForwarder

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
        partition = self._partition(self._checked().partitions)
        # Looked up behind the fence: what this id had open is decided, so its newest record lies below this end.
        marks = topic_admin(self._kafka).watermarks(self.topic, [partition], TIMEOUT_SECONDS)[partition]
        with contextlib.closing(PartitionReader(settings_of(self._kafka))) as reader:
            try:
                found = reader.last_with_key(
                    self.topic, {partition: (marks.start, marks.end)}, self._identity.encode(),
                    stalled_after_seconds=_LOG_SECONDS,
                )  # fmt: skip
            except BrokerUnavailable as error:
                raise BrokerUnavailable(
                    f"{self._doing}: topic {self.topic!r} (option markerLog): {error}. An open transaction of another "
                    "sink's killed run ends when that is run again, or by its kafka.transaction.timeout.ms. Nothing "
                    "was written"
                ) from error
        if (newest := found.get(partition)) is None:
            return None
        record = msgspec.json.decode(newest.value or b"", type=_Record)
        return Stored(record.offset, record.metadata)

    def _partition(self, count: int) -> int:
        return zlib.crc32(self._identity.encode()) % count

    def _missing(self) -> TopicError:
        return TopicError(f"topic {self.topic!r} (option markerLog) does not exist: create it, compacted")

    def _checked(self) -> TopicDescription:
        described = topic_admin(self._kafka).describe([self.topic], TIMEOUT_SECONDS)[self.topic]
        if described is None:
            raise self._missing()
        policy = described.configs["cleanup.policy"]
        if policy != "compact":
            raise ConfigError(
                f"{self._doing}: topic {self.topic!r} (option markerLog) has cleanup.policy={policy}: it must be "
                "compact, and nothing else, or the markers go with time. Nothing was written"
            )
        return described
