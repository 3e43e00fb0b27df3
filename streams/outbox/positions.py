"""The positions topic of a relay: which rows were sent, one partition per shard."""

from __future__ import annotations

from typing import Final

from streams.core.outbox import RING, WAY_OUT, Ring, SentBatch, decode_batch, encode_batch, record_key
from streams.errors import BrokerUnavailable, DecodeError, OffsetError, TopicError
from streams.kafka.questions.admin import Watermarks
from streams.model.topics import TopicSpec
from streams.records import Output
from streams.runtime.claim import Claim

_FIRST_STRETCH: Final = 4 * RING
"""Offsets that are read first: a batch is a record and a marker, and some are aborted."""


def positions_name(name: str) -> str:
    """Return the name of the positions topic of the relay ``name``."""
    return f"{name}.outbox"


def other_topic(where: str, topic_id: str, known: str) -> OffsetError:
    """Make the error for a positions topic that is not the one of the outbox."""
    return OffsetError(
        f"the positions topic of {where} has the id {topic_id}, and the outbox belongs to the topic {known}: it was "
        f"recreated, or another cluster answers. {WAY_OUT}"
    )


def positions_spec(name: str, shards: int, replication_factor: int) -> TopicSpec:
    """Return the positions topic as it must be."""
    configs = {"cleanup.policy": "compact", "segment.bytes": "16777216"}
    return TopicSpec(
        name=positions_name(name), partitions=shards, replication_factor=replication_factor, configs=configs
    )


class ShardPositions:
    """The ring of one shard in Kafka, by the claim of its partition. One thread. ``outbox``: the identity of the
    table."""

    def __init__(self, claim: Claim, outbox: str) -> None:
        self._claim, self._outbox = claim, outbox
        self.newest_ms = -1
        """The time of the last record that was read: the broker's, or that of its writer."""

    def topic_id(self, shards: int) -> str:
        """Return the id of the topic. Raises ``TopicError`` if it is missing, or has another number of partitions."""
        try:
            found, partitions = self._claim.identity()
        except TopicError as error:
            raise TopicError(f"{error}: run `kes outbox apply`") from None
        if partitions != shards:
            raise TopicError(f"{self._claim.topic} has {partitions} partitions, and the outbox has {shards} shards")
        return found

    def read(self, log: Watermarks) -> Ring:
        """Read the ring. ``log``: as it was when the claim was taken; nothing older can come behind its end.

        Raises ``OffsetError`` (a record that is none of this outbox), ``TopicError``, ``BrokerUnavailable``.
        """
        stretch = _FIRST_STRETCH
        while True:
            start = max(log.start, log.end - stretch)
            ring = Ring(self._batches(start, log.end))
            if start == log.start or (ring.serial and ring.is_whole):
                return ring
            stretch *= 8

    def record(self, batch: SentBatch) -> Output:
        """Make the record of a batch."""
        value = encode_batch(self._outbox, batch)
        claim = self._claim
        return Output(claim.topic, value, record_key(batch.serial), None, claim.partition, 0, claim.partition, -1)

    def _batches(self, start: int, end: int) -> list[SentBatch]:
        found = []
        try:
            records = self._claim.read(start, end)
        except BrokerUnavailable as error:
            raise BrokerUnavailable(
                f"{error}. If it stays so and the brokers answer, a transaction hangs there: "
                f"`kes txn hanging --topic {self._claim.topic}` names it. The guide of the outbox, "
                '"A transaction that hangs", has the way out'
            ) from error
        for record in records:
            try:
                batch = decode_batch(self._outbox, record.value)
            except (DecodeError, OffsetError) as error:
                raise OffsetError(f"{record.where}: {error}") from None
            if record.key != record_key(batch.serial):
                raise OffsetError(f"{record.where}: the key does not fit batch {batch.serial}")
            self.newest_ms = max(self.newest_ms, record.timestamp_ms)
            found.append(batch)
        return found
