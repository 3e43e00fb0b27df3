"""The positions topic of a relay: which rows were sent, one partition per shard."""

from __future__ import annotations

from typing import Final

from streams.clients.admin import TopicAdmin
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.core.outbox import RING, Ring, SentBatch, decode_batch, encode_batch, record_key
from streams.errors import DecodeError, OffsetError, TopicError
from streams.records import Output
from streams.topics import TopicSpec, missing

_FIRST_STRETCH: Final = 4 * RING
"""Offsets that are read first: a batch is a record and a marker, and some are aborted."""


def positions_name(name: str) -> str:
    """Return the name of the positions topic of the relay ``name``."""
    return f"{name}.outbox"


def positions_spec(name: str, shards: int, replication_factor: int) -> TopicSpec:
    """Return the positions topic as it must be."""
    configs = {"cleanup.policy": "compact", "segment.bytes": "16777216"}
    return TopicSpec(
        name=positions_name(name), partitions=shards, replication_factor=replication_factor, configs=configs
    )


class ShardPositions:
    """The ring of one shard in Kafka. One thread; ``close`` it. ``outbox``: the identity of the table."""

    def __init__(self, settings: ClientSettings, name: str, outbox: str, shard: int, seconds: float) -> None:
        self._topic, self._outbox, self._shard, self._seconds = positions_name(name), outbox, shard, seconds
        self._admin, self._reader = TopicAdmin(settings), PartitionReader(settings)

    @property
    def where(self) -> str:
        """``topic[partition]``."""
        return f"{self._topic}[{self._shard}]"

    def topic_id(self, shards: int) -> str:
        """Return the id of the topic. Raises ``TopicError`` if it is missing, or has another number of partitions."""
        found = self._admin.identity(self._topic, self._seconds)
        if found is None:
            raise TopicError(f"{missing(self._topic)}: run `kes outbox apply`")
        if found[1] != shards:
            raise TopicError(f"{self._topic} has {found[1]} partitions, and the outbox has {shards} shards")
        return found[0]

    def read(self) -> Ring:
        """Read the ring, up to the end of the log as it is now. After the transactional id was taken, nothing older can
        come behind it.

        Raises ``OffsetError`` (a record that is none of this outbox), ``TopicError``, ``BrokerUnavailable``.
        """
        mark = self._admin.watermarks(self._topic, [self._shard], self._seconds)[self._shard]
        stretch = _FIRST_STRETCH
        while True:
            start = max(mark.start, mark.end - stretch)
            ring = Ring(self._batches(start, mark.end))
            if start == mark.start or (ring.serial and ring.is_whole):
                return ring
            stretch *= 8

    def record(self, batch: SentBatch) -> Output:
        """Make the record of a batch."""
        value = encode_batch(self._outbox, batch)
        return Output(self._topic, value, record_key(batch.serial), None, self._shard, 0, self._shard, -1)

    def close(self) -> None:
        """Free everything."""
        self._reader.close()
        self._admin.close()

    def _batches(self, start: int, end: int) -> list[SentBatch]:
        span = {self._shard: (start, end)}
        found = []
        for record in self._reader.read_all(self._topic, span, stalled_after_seconds=self._seconds)[self._shard]:
            try:
                batch = decode_batch(self._outbox, record.value)
            except (DecodeError, OffsetError) as error:
                raise OffsetError(f"{record.where}: {error}") from None
            if record.key != record_key(batch.serial):
                raise OffsetError(f"{record.where}: the key does not fit batch {batch.serial}")
            found.append(batch)
        return found
