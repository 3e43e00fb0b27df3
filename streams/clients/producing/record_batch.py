"""Encode the records of one transaction as Kafka's record batches (format 2). Pure: no connection, no clock.

A record is encoded when it is handed over, not when it is sent, so the work is spread over the time in which a
transaction is filled. Producer id, epoch and sequence stand in the 61 bytes of a batch's head, which is made last: what
is sent again after an abort are the same rows under a new head.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import google_crc32c
import msgspec

from streams.clients.producing.settings import Compression
from streams.errors import RecordRefused
from streams.records import (
    HEADER_OVERHEAD,
    RECORD_OVERHEAD,
    Change,
    Headers,
    Output,
    changelog_record,
    record_size,
    shown_key,
)
from streams.sak.murmur2 import partition_of

BATCH_HEAD: Final = 61
"""Bytes of a batch before its records."""
MOST_PLACES: Final = 100_000
"""Keys whose partition is remembered, by topic: murmur2 in Python takes 2 us, a look-up 0.05."""
MOST_HEADERS: Final = 1_000
_LENGTHS: Final = 5  # the longest varint in front of a record
_TIMES: Final = 1 << 62  # so that the distance of two times has 64 bits at most
_TRANSACTIONAL: Final = 0x10
_HEAD: Final = struct.Struct(">qiibI")
_TAIL: Final = struct.Struct(">hiqqqhii")


def varint(number: int) -> bytes:
    """Encode a signed number as records have them: zigzag, seven bits a byte."""
    number = number << 1 if number >= 0 else (-number << 1) - 1
    encoded = bytearray()
    while number > 127:
        encoded.append((number & 127) | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_SMALL: Final = [varint(number) for number in range(8192)]
"""Varints by number: lengths, positions and times of almost all records."""
_NULL: Final = varint(-1)


class Placement:
    """The partitions of one topic, as far as encoding needs them. ``limit``: bytes of the largest batch that it is
    thought to take; a batch of one record may be larger."""

    __slots__ = ("count", "limit", "places", "topic", "turn")

    def __init__(self, topic: str, count: int, limit: int) -> None:
        self.topic = topic
        self.count = count
        self.limit = limit
        self.places: dict[bytes, int] = {}
        self.turn = 0

    def place(self, key: bytes) -> int:
        """Return the partition of a key that is not remembered yet, and remember it."""
        if len(self.places) >= MOST_PLACES:
            self.places.clear()
        partition = self.places[key] = partition_of(key, self.count)
        return partition

    def next_without_key(self) -> int:
        """Return the partition for the records without a key of one transaction: each in turn."""
        self.turn = (self.turn + 1) % self.count
        return self.turn


_NOWHERE: Final = Placement("", 0, 0)


class Batch(NamedTuple):
    """The records of one batch. ``rows``: the length of a record, the record, and so on. ``size``: their bytes."""

    rows: list[bytes]
    records: int
    size: int
    first_ms: int
    last_ms: int

    def encode(self, producer_id: int, epoch: int, sequence: int, compression: Compression | None) -> list[bytes]:
        """Encode the batch in pieces, to be written one after the other."""
        records, attributes = b"".join(self.rows), _TRANSACTIONAL
        if compression is not None:
            records, attributes = compression.compress(records), attributes | compression.attribute
        tail = _TAIL.pack(
            attributes, self.records - 1, self.first_ms, self.last_ms, producer_id, epoch, sequence, self.records
        )
        checksum = google_crc32c.extend(google_crc32c.value(tail), records)
        return [_HEAD.pack(0, len(tail) + len(records) + 9, -1, 2, checksum), tail, records]


@dataclass(frozen=True, eq=False)
class Part:
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


class _Rows:
    """The batches of one partition: those that are full, and the one that is being filled."""

    __slots__ = ("count", "first_ms", "full", "last_ms", "rows", "size")

    def __init__(self) -> None:
        self.full: list[Batch] = []
        self.rows: list[bytes] = []
        self.count = 0
        self.size = 0
        self.first_ms = self.last_ms = 0

    def close(self) -> None:
        self.full.append(Batch(self.rows, self.count, self.size, self.first_ms, self.last_ms))
        self.rows, self.count, self.size = [], 0, 0

    def batches(self) -> list[Batch]:
        if not self.count:
            return self.full
        return [*self.full, Batch(self.rows, self.count, self.size, self.first_ms, self.last_ms)]


class _Changes(NamedTuple):
    """Changes whose changelog records were encoded."""

    topic: str
    partition: int
    changes: Sequence[Change]


class EncodedRecords:
    """The records of one transaction by topic and partition. ``placements`` may get more topics at any time.

    ``message_limit``: bytes of the largest record that is taken, counted as librdkafka does (``records.record_size``).
    ``alone``: each record gets a batch of its own.
    """

    def __init__(self, placements: dict[str, Placement], message_limit: int, *, alone: bool = False) -> None:
        self._placements = placements
        self._message_limit = message_limit
        self._alone = alone
        self._used: dict[str, Placement] = {}  # one transaction sends a key to one partition, whatever is added
        self._rows: dict[str, dict[int, _Rows]] = {}
        self._without_key: dict[str, int] = {}
        self._headers: dict[tuple[tuple[str, bytes | None], ...], bytes] = {}
        self._taken: list[tuple[Sequence[Output], int, int] | _Changes] = []

    def add(self, outputs: Sequence[Output], start: int, now_ms: int) -> int:
        """Encode those from position ``start`` on, up to the first that is not taken; return its position. ``refusal``
        tells why.

        The hot path, 0.45 us a record: one ``join`` over a tuple, varints from a table, and whatever else is unusual
        (no key, no value, lengths above 8 KiB) by ``_unusual``.
        """
        small, join, alone = _SMALL, b"".join, self._alone
        name, placement = None, _NOWHERE
        places, by_partition, limit = placement.places, dict[int, _Rows](), 0
        headers: Headers | None = None
        encoded, safe = b"\0", self._message_limit - RECORD_OVERHEAD
        position = start
        for position in range(start, len(outputs)):
            output = outputs[position]
            if output.topic != name:
                known = self._used.get(output.topic) or self._placements.get(output.topic)
                if known is None:
                    break
                name, placement = output.topic, known
                self._used[name] = known
                places, limit = placement.places, 0 if alone else placement.limit
                by_partition = self._rows.setdefault(name, {})
            key, value = output.key, output.value
            try:
                if output.headers is not headers:
                    headers = output.headers
                    encoded = self._encoded(headers)
                    safe = self._message_limit - RECORD_OVERHEAD - HEADER_OVERHEAD * len(headers or ())
                partition = output.partition
                if partition == -1:
                    found = places.get(key)  # type: ignore[arg-type]
                    partition = self._partition(placement, key) if found is None else found
                rows = by_partition.get(partition)
                if rows is None:
                    if type(partition) is not int or not 0 <= partition < placement.count:
                        break
                    rows = by_partition[partition] = _Rows()
                count = rows.count
                stamp = output.timestamp_ms or now_ms
                if not count:
                    if not -_TIMES <= stamp < _TIMES:
                        break
                    rows.first_ms = rows.last_ms = stamp
                delta = stamp - rows.first_ms
            except (TypeError, ValueError, AttributeError):  # a part is of a wrong type
                break
            try:
                if delta < 0:
                    raise IndexError  # which the table would not: it has an entry for -1
                record = join(
                    (b"\0", small[delta], small[count], small[len(key)], key, small[len(value)], value, encoded)  # type: ignore[arg-type]
                )
                size = len(record)
                if size >= safe:
                    raise IndexError  # perhaps too large
                length = small[size]
            except (IndexError, TypeError):
                if self.refusal(output) is not None:
                    break
                record = _unusual(delta, count, key, value, encoded)
                size = len(record)
                length = varint(size)
            if count and rows.size + size + _LENGTHS > limit:
                rows.close()
                rows.first_ms = rows.last_ms = stamp
                record = _unusual(0, 0, key, value, encoded)
                size = len(record)
                length = varint(size)
            if stamp > rows.last_ms:
                rows.last_ms = stamp
            rows.rows.append(length)
            rows.rows.append(record)
            rows.count += 1
            rows.size += size + len(length)
        else:
            position = len(outputs)
        if position > start:
            self._taken.append((outputs, start, position))
        return position

    def add_changes(self, topic: str, partition: int, changes: Sequence[Change], start: int, now_ms: int) -> int:
        """Encode the changelog records of a partition's changes, as ``add`` does outputs. The hot path, too: all that
        is the same for each record is looked up once, and what is unusual is done by ``add``."""
        position = start
        while position < len(changes):
            stop = self._add_usual(topic, partition, changes, position, now_ms)
            if stop > position:
                self._taken.append(_Changes(topic, partition, changes[position:stop]))
            if stop < len(changes):
                if not self.add([changelog_record(topic, partition, changes[stop])], 0, now_ms):
                    return stop
                stop += 1
            position = stop
        return position

    def _add_usual(self, topic: str, partition: int, changes: Sequence[Change], start: int, now_ms: int) -> int:
        """Encode changes up to the first that is unusual, or that the batch has no room for; return its position."""
        rows = self._rows.get(topic, {}).get(partition)
        if rows is None or not rows.count or not 0 <= now_ms - rows.first_ms < len(_SMALL):
            return start
        if self._alone or self._message_limit - RECORD_OVERHEAD <= len(_SMALL):  # each may be too large
            return start
        small, join, extend = _SMALL, b"".join, rows.rows.extend
        count, size, position = rows.count, rows.size, start
        head = b"\0" + small[now_ms - rows.first_ms]
        room = self._used[topic].limit - _LENGTHS
        try:
            for position in range(start, len(changes)):
                change = changes[position]
                key, value = change.key, change.value
                record = join((head, small[count], small[len(key)], key, small[len(value)], value, b"\0"))  # type: ignore[arg-type]
                length = small[len(record)]
                if change.type or size + len(record) > room:
                    break
                extend((length, record))
                count += 1
                size += len(length) + len(record)
            else:
                position = len(changes)
        except (IndexError, TypeError):  # a tombstone, or long
            pass
        if position > start:
            rows.count, rows.size, rows.last_ms = count, size, max(rows.last_ms, now_ms)
        return position

    def refusal(self, output: Output) -> RecordRefused | None:
        """Return why a record is not taken, and never would be; ``None``: it would, or its topic is not known yet."""
        topic, key, value = output.topic, output.key, output.value
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
                f"{where}, key {shown_key(key)}: MSG_SIZE_TOO_LARGE: the record has {size} bytes, message.max.bytes is "
                f"{self._message_limit}"
            )
        placement = self._used.get(topic) or self._placements.get(topic)
        if placement is not None and not -1 <= output.partition < placement.count:
            return RecordRefused(
                f"{where}, key {shown_key(key)}: _UNKNOWN_PARTITION: the topic has {placement.count} partitions"
            )
        return None

    def parts(self) -> Iterator[tuple[str, int, list[Batch]]]:
        """Iterate over topic, partition and batches, which go one after the other."""
        for topic, by_partition in self._rows.items():
            for partition, rows in by_partition.items():
                if batches := rows.batches():
                    yield topic, partition, batches

    def rounds(self, sequences: dict[tuple[str, int], int]) -> list[list[Part]]:
        """Arrange the batches: a request takes one of each partition, so further ones go in further rounds.

        ``sequences``: the next sequence of each partition under this producer's epoch; they are moved on.
        """
        rounds: list[list[Part]] = []
        for topic, partition, batches in self.parts():
            first, sequence = 0, sequences.get((topic, partition), 0)
            for depth, batch in enumerate(batches):
                if depth == len(rounds):
                    rounds.append([])
                rounds[depth].append(Part(topic, partition, batch, sequence, first))
                first += batch.records
                sequence = (sequence + batch.records) & 0x7FFFFFFF
            sequences[topic, partition] = sequence
        return rounds

    def output_at(self, topic: str, partition: int, index: int) -> Output | None:
        """Return the record that went to a partition as the one with this index. Walks all records: for refusals."""
        placement = self._used[topic]
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
                chosen = output.partition if output.partition != -1 else self._partition(placement, output.key)
                if chosen == partition:
                    if index == 0:
                        return output
                    index -= 1
        return None

    def _partition(self, placement: Placement, key: bytes | None) -> int:
        if key is not None:
            return placement.place(key)
        chosen = self._without_key.get(placement.topic)
        if chosen is None:
            chosen = self._without_key[placement.topic] = placement.next_without_key()
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


def encode_headers(headers: Sequence[tuple[str, bytes | str | None]]) -> bytes:
    """Encode headers as the end of a record. Raises ``TypeError`` or ``ValueError`` for what is no headers."""
    pieces = [varint(len(headers))]
    for name, value in headers:
        raw = name.encode()
        pieces += [varint(len(raw)), raw]
        content = value.encode() if isinstance(value, str) else value
        pieces += [_NULL] if content is None else [varint(len(content)), content]
    return b"".join(pieces)


def in_bytes(output: Output) -> Output:
    """Return the record with key and value in bytes, where they are text or a buffer: librdkafka takes those, too."""
    key, value = _bytes(output.key), _bytes(output.value)
    if key is output.key and value is output.value:
        return output
    return msgspec.structs.replace(output, key=key, value=value)


def _bytes(content: Any) -> Any:
    if isinstance(content, str):
        return content.encode()
    return bytes(content) if isinstance(content, bytearray | memoryview) else content


def _unusual(delta_ms: int, count: int, key: bytes | None, value: bytes | None, headers: bytes) -> bytes:
    pieces = [b"\0", varint(delta_ms), varint(count)]
    for field in (key, value):
        pieces += [_NULL] if field is None else [varint(len(field)), field]
    return b"".join([*pieces, headers])
