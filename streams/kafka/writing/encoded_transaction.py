"""The records of one transaction, encoded while it is filled, for the topics of a cluster.

Encoding needs no producer and no order: it is done as events are admitted, whichever transaction is being sent. A
topic that is not known yet, or a record that is refused, ends it; ``complete`` waits for the one, and raises the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from streams.errors import RecordsRefused, TransactionFailed
from streams.kafka.wire import answers
from streams.kafka.wire.answers import Meaning
from streams.kafka.wire.cluster import UNKNOWN_SECONDS, Cluster
from streams.kafka.wire.codes import Code
from streams.kafka.wire.messages import PartitionError
from streams.kafka.writing.record_batch import EncodedRecords, Part, in_bytes
from streams.model.topics import SentTo
from streams.records import Change, Output, OwnSample, RefusedRecord, changelog_record, shown_key

_CHECK_SECONDS: Final = 0.001
"""Seconds between two looks whether the metadata of a topic have arrived."""


class EncodedTransaction:
    """The records of one attempt to send a transaction. On the loop. ``encoded`` is what a slot sends. ``topics``: the
    only ones that are sent to; ``None``: any."""

    def __init__(self, cluster: Cluster, timeout_seconds: float, topics: SentTo | None = None) -> None:
        self.encoded = EncodedRecords(cluster.placements, cluster.settings.message_limit)
        self.written: list[tuple[Sequence[Part], Mapping[tuple[str, int], int]]] = []
        """The batches that were sent, round by round, and the offset of the first record of each that is in its log."""
        self._cluster = cluster
        self._timeout = timeout_seconds
        self._topics = topics
        self._filled = 0  # outputs that are encoded

    def ends(self) -> dict[tuple[str, int], int]:
        """Return the offset behind the last record of each topic and partition that is sent; -1: the broker has not
        said it."""
        return {
            where: base + part.batch.records if base >= 0 else -1
            for parts, bases in self.written
            for part in parts
            for where in [(part.topic, part.partition)]
            for base in [bases.get(where, -1)]
        }

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the records of each topic that are sent, before compression."""
        sizes: dict[str, int] = {}
        for parts, _ in self.written:
            for part in parts:
                sizes[part.topic] = sizes.get(part.topic, 0) + part.batch.size
        return sizes

    def fill(self, outputs: Sequence[Output]) -> None:
        """Encode the outputs that are not encoded yet, as far as that can be done now. ``outputs`` are all of the
        transaction's; from call to call there are only more of them."""
        self._filled = self.encoded.add(outputs, self._filled, self._cluster.now_ms())

    async def complete(self, outputs: Sequence[Output]) -> None:
        """Encode all of the transaction's outputs. Waits for topics that are not known yet.

        Raises ``RecordsRefused``, and ``TransactionFailed`` if no broker tells anything of a topic in time.
        """
        while self._filled < len(outputs):
            self.fill(outputs)
            if self._filled < len(outputs):
                await self.add(outputs[self._filled])
                self._filled += 1

    async def add_changes(self, topic: str, partition: int, changes: Sequence[Change]) -> None:
        """Encode the changelog records of a partition's changes. Waits and raises as ``complete`` does."""
        done = 0
        while done < len(changes):
            done = self.encoded.add_changes(topic, partition, changes, done, self._cluster.now_ms())
            if done < len(changes):
                await self.add(changelog_record(topic, partition, changes[done]))
                done += 1

    async def add(self, output: Output) -> None:
        """Encode one record. Waits and raises as ``complete`` does."""
        if isinstance(output, OwnSample):  # it has no topic, so the encoder leaves it here
            return
        record, since = in_bytes(output), asyncio.get_running_loop().time()
        while not self.encoded.add([record], 0, self._cluster.now_ms()):
            self._check(record, output, since)
            await asyncio.sleep(_CHECK_SECONDS)

    async def refused_by(self, part: Part, answer: PartitionError) -> list[RefusedRecord]:
        """Name the records of a batch that are refused: those that the broker names, the only one, or those that are
        larger than the topic takes. Without such a one the batch is too large: the next ones are smaller."""
        named = [(index, reason or answer.message) for index, reason in answer.records]
        if not named and part.batch.records == 1:  # brokers name no record that is too large
            named = [(0, answer.message)]
        if not named and answer.code in (Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE):
            limit = await self._cluster.batch_limit(part.topic)
            compression = self._cluster.settings.compression
            larger = self.encoded.larger_than(limit, part, compression) if limit else []
            too_large = f"{answers.described(answer.code)}: max.message.bytes is {limit}"
            named = [(index, too_large) for index in larger]
            if not named:
                self._cluster.too_large(part.topic, part.batch.size, limit)
        found = []
        for index, reason in named or [(-1, answer.message)]:
            output = self.encoded.output_at(part.topic, part.partition, part.first + index) if index >= 0 else None
            found.append(answers.refused_record(part.topic, part.partition, answer.code, reason, output))
        return found

    def _check(self, record: Output, output: Output, since: float) -> None:
        """Look for the topic of a record that was not taken, if it is not known yet, or its metadata are older than
        ``since`` (the loop's time). Raise where waiting does not help."""
        topic, cluster = output.topic, self._cluster
        if self._topics is not None and (why := self._topics.refusal(topic)):  # never looked for: no encoder knows it
            raise RecordsRefused("produce", [RefusedRecord(topic, "REFUSED", why, True, output)])
        refusal = self.encoded.refusal(record)
        if refusal is not None:
            refused = RefusedRecord(topic, "REFUSED", str(refusal), True, output)
            raise RecordsRefused("produce", [refused]) from refusal
        known = cluster.placements.get(topic)
        if known is not None:
            if output.partition < known.count:
                # Partitions were added since the transaction began; or no part is at fault alone.
                raise TransactionFailed("produce", "_UNKNOWN_PARTITION", "abortable", f"{topic}: sent again")
            if cluster.noted_at[topic] >= since:
                raise RecordsRefused("produce", [_beyond(record, output, known.count)])
        unknown = cluster.unknown_since(topic)
        cluster.refresh_topic(topic)
        if unknown is not None:
            code, seconds = unknown
            if answers.PRODUCE.get(code) in (Meaning.BLOCKED, Meaning.REFUSED) or seconds > UNKNOWN_SECONDS:
                raise RecordsRefused("produce", [answers.refused_record(topic, -1, code, "", output)])
        cluster.check_patience(topic, self._timeout)


def _beyond(record: Output, output: Output, count: int) -> RefusedRecord:
    where = f"{record.topic}[{record.partition}], key {shown_key(record.key)}"
    reason = f"{where}: _UNKNOWN_PARTITION: the topic has {count} partitions"
    return RefusedRecord(output.topic, "REFUSED", reason, True, output)
