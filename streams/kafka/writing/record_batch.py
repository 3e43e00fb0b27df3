"""Encode the records of one transaction as Kafka's record batches (format 2). Pure: no connection, no clock.

A record is encoded when it is handed over, not when it is sent, so the work is spread over the time in which a
transaction is filled. Producer id, epoch and sequence stand in the 61 bytes of a batch's head, which is made last: what
is sent again after an abort are the same rows under a new head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from streams.errors import RecordRefused
from streams.kafka.wire.compression import Compression
from streams.kafka.wire.placement import NotPlaced, Placement
from streams.kafka.writing import row_encoder
from streams.kafka.writing.rows import NULL, SMALL, Batch, Rows, TopicRows, varint
from streams.records import (
    RECORD_OVERHEAD,
    Change,
    Headers,
    Output,
    as_bytes,
    changelog_record,
    record_size,
    shown_key,
)

MOST_HEADERS: Final = 1_000
"""Lists of headers whose encoding one transaction remembers; then it begins anew."""


class Part(msgspec.Struct, eq=False):
    """One batch on its way. ``sequence``: that of its first record. ``first``: the index of that record among those
    that the transaction sends to the partition."""

    topic: str
    partition: int
    batch: Batch
    sequence: int
    first: int

    @property
    def name(self) -> str:
        """The partition's name in messages."""
        return f"{self.topic}[{self.partition}]"


class _Changes(NamedTuple):
    """Changes whose changelog records were encoded."""

    topic: str
    partition: int
    changes: Sequence[Change]


class EncodedRecords:
    """The records of one transaction by topic and partition. ``placements`` may get more topics at any time.

    ``message_limit``: bytes of the largest record that is taken, counted as librdkafka does (``records.record_size``).
    """

    def __init__(self, placements: dict[str, Placement], message_limit: int) -> None:
        self._placements = placements
        self._message_limit = message_limit
        self._largest = message_limit - RECORD_OVERHEAD
        self._is_usual = self._largest > len(SMALL)  # whether most records may be like most
        self._topics: dict[str, TopicRows] = {}  # one transaction sends a key to one partition, whatever is added
        self._without_key: dict[tuple[str, int], int] = {}
        self._headers: dict[tuple[tuple[str, bytes | None], ...], bytes] = {}
        self._taken: list[tuple[Sequence[Output], int, int] | _Changes] = []

    def add(self, outputs: Sequence[Output], start: int, now_ms: int) -> int:
        """Encode those from position ``start`` on, up to the first that is not taken; return its position. ``refusal``
        tells why."""
        position = start
        while position < len(outputs):
            if self._is_usual:
                position = row_encoder.add_outputs(
                    self._topics, self._encoded, outputs, position, now_ms, self._largest
                )
            if position < len(outputs):
                if not self._add_any(outputs[position], now_ms):
                    break
                position += 1
        if position > start:
            self._taken.append((outputs, start, position))
        return position

    def add_changes(self, topic: str, partition: int, changes: Sequence[Change], start: int, now_ms: int) -> int:
        """Encode the changelog records of a partition's changes, as ``add`` does outputs."""
        position, known = start, self._topic(topic)
        while known is not None and position < len(changes):
            if self._is_usual and 0 <= partition < known.placement.count:
                rows = known.rows.get(partition)
                if rows is None:
                    rows = known.rows[partition] = Rows()
                position = row_encoder.add_changes(rows, changes, position, now_ms, known.placement.limit)
            if position < len(changes):
                if not self._add_any(changelog_record(topic, partition, changes[position]), now_ms):
                    break
                position += 1
        if position > start:
            self._taken.append(_Changes(topic, partition, changes[start:position]))
        return position

    def _add_any(self, output: Output, now_ms: int) -> bool:
        """Encode one record, whatever it is like; return whether it is taken."""
        topic = self._topic(output.topic)
        # A partition that is not known here may have been added since: whether it is there is not decided here.
        if topic is None or self.refusal(output) is not None or output.partition >= topic.placement.count:
            return False
        partition = output.partition
        if partition == -1:
            partition = self._partition(topic.placement, output)
        rows = topic.rows.get(partition)
        if rows is None:
            rows = topic.rows[partition] = Rows()
        headers = self._encoded(output.headers)
        rows.add(output.timestamp_ms or now_ms, output.key, output.value, headers, topic.placement.limit)
        return True

    def _topic(self, name: str) -> TopicRows | None:
        found = self._topics.get(name)
        if found is None and name in self._placements:
            found = self._topics[name] = TopicRows(self._placements[name])
        return found

    def refusal(self, output: Output) -> RecordRefused | None:
        """Return the reason why a record is never taken; ``None``: there is none, or its topic is not known yet."""
        topic, key, value = output.topic, output.key, output.value
        if not _is_text(topic):
            return RecordRefused(f"the client cannot send a record for topic {topic!r}: its name must be text in UTF-8")
        fields: tuple[tuple[str, object], ...] = (("key", key), ("value", value))
        for field, content in fields:
            if content is not None and not isinstance(content, bytes):
                return RecordRefused(
                    f"the client cannot send a record for topic {topic!r}: its {field} must be bytes or None, not "
                    f"{type(content).__name__}"
                )
        numbers: tuple[tuple[str, object, int], ...] = (
            ("partition", output.partition, 31),
            ("timestamp", output.timestamp_ms, 62),
        )
        for field, number, bits in numbers:
            if not isinstance(number, int) or not -(1 << bits) <= number < 1 << bits:
                return RecordRefused(
                    f"the client cannot send a record for topic {topic!r}: its {field} must be a whole number "
                    f"of at most {bits} bits, not {number!r}"
                )
        try:
            self._encoded(output.headers)
        except (TypeError, ValueError, AttributeError):
            return RecordRefused(
                f"the client cannot send a record for topic {topic!r}: its headers must be pairs of a name and bytes "
                "or None"
            )
        where = topic if output.partition == -1 else f"{topic}[{output.partition}]"
        size = record_size(key, value, output.headers)
        if size > self._message_limit:
            return RecordRefused(
                f"{where}, key {shown_key(key)}: MESSAGE_TOO_LARGE: the record has {size} bytes, message.max.bytes is "
                f"{self._message_limit}"
            )
        if output.partition < -1:
            return RecordRefused(f"{where}, key {shown_key(key)}: _UNKNOWN_PARTITION: partitions count from 0")
        if output.partition == -1 and key is not None and (known := self._topic(topic)) is not None:
            try:
                self._partition(known.placement, output)
            except NotPlaced as error:
                return RecordRefused(str(error))
        return None

    def rounds(self, sequences: dict[tuple[str, int], int]) -> list[list[Part]]:
        """Arrange the batches: a request takes one of each partition, so further ones go in further rounds.

        ``sequences``: the next sequence of each partition under this producer's epoch; they are moved on.
        """
        rounds: list[list[Part]] = []
        for topic, known in self._topics.items():
            for partition, rows in known.rows.items():
                where, depth, first = (topic, partition), 0, 0
                sequence = sequences.get(where, 0)
                for batch in rows.batches():
                    if depth == len(rounds):
                        rounds.append([])
                    rounds[depth].append(Part(topic, partition, batch, sequence, first))
                    depth, first = depth + 1, first + batch.records
                    sequence = (sequence + batch.records) & 0x7FFFFFFF  # behind 2**31 - 1 they begin at 0 again
                sequences[where] = sequence
        return rounds

    def output_at(self, topic: str, partition: int, index: int) -> Output | None:
        """Return the record that went to a partition as the one with this index. Walks all records: for refusals."""
        placement = self._topics[topic].placement
        for taken in self._taken:
            if isinstance(taken, _Changes):
                if (topic, partition) != taken[:2]:
                    continue
                if index < len(taken.changes):
                    return changelog_record(topic, partition, taken.changes[index])
                index -= len(taken.changes)
                continue
            outputs, start, end = taken
            for output in outputs[start:end]:
                if output.topic != topic:
                    continue
                chosen = output.partition if output.partition != -1 else self._partition(placement, output)
                if chosen == partition:
                    if index == 0:
                        return output
                    index -= 1
        return None

    def larger_than(self, limit: int, part: Part, compression: Compression | None) -> list[int]:
        """Return the records of a batch, by their places in it, that have more than ``limit`` bytes in a batch of their
        own. For refusals: it encodes the large ones again."""
        found = []
        for index, record in enumerate(part.batch.rows[1::2]):
            output = (
                self.output_at(part.topic, part.partition, part.first + index) if len(record) > limit // 2 else None
            )
            if output is not None:
                rows = Rows()
                rows.add(0, output.key, output.value, self._encoded(output.headers), 0)
                pieces = rows.batches()[0].encode(0, 0, 0, compression)
                if sum(map(len, pieces)) > limit:
                    found.append(index)
        return found

    def _partition(self, placement: Placement, output: Output) -> int:
        key = output.key
        if key is not None:
            found = placement.places.get(key)
            return placement.place(key) if found is None else found
        if placement.null_keys == "cause":
            return output.origin_partition % placement.count
        # One per transaction: fewer and larger batches. Or one per record, remembered for ``output_at``: its outputs
        # are kept here, so that no other one has the same id.
        which = placement.topic, id(output) if placement.null_keys == "spread" else 0
        chosen = self._without_key.get(which)
        if chosen is None:
            chosen = self._without_key[which] = placement.next_without_key()
        return chosen

    def _encoded(self, headers: Headers | None) -> bytes:
        if not headers:
            return b"\0"
        known = tuple(headers)
        encoded = self._headers.get(known)
        if encoded is None:
            if len(self._headers) >= MOST_HEADERS:
                self._headers.clear()
            encoded = self._headers[known] = encode_headers(headers)
        return encoded


def _is_text(name: object) -> bool:
    try:
        return isinstance(name, str) and name.encode() is not None
    except UnicodeEncodeError:  # a lone surrogate
        return False


def encode_headers(headers: Sequence[tuple[str, bytes | str | None]]) -> bytes:
    """Encode headers as the end of a record. Raises ``TypeError`` or ``ValueError`` for what is no headers."""
    pieces = [varint(len(headers))]
    for name, value in headers:
        raw = name.encode()
        pieces += [varint(len(raw)), raw]
        content = value.encode() if isinstance(value, str) else value
        pieces += [NULL] if content is None else [varint(len(content)), content]
    return b"".join(pieces)


def in_bytes(output: Output) -> Output:
    """Return the record with key and value in bytes, where they are text or a buffer: librdkafka takes those, too."""
    key, value = as_bytes(output.key), as_bytes(output.value)
    if key is output.key and value is output.value:
        return output
    return msgspec.structs.replace(output, key=key, value=value)
