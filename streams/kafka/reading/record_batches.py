"""The record batches of one partition in the answer to a Fetch: which are whole, which are committed, what is in them.

A head is read before its checksum is compared, because where the next fetch begins must be known before anything is
decoded. The checksum covers all of a batch but its first 21 bytes. Of these a wrong length or format is found by what
it leads to, and a wrong leader epoch changes no record; a wrong offset that fits between its neighbours cannot be found
by any client: brokers write it without computing the checksum anew.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

import google_crc32c

from streams.errors import LogDamaged, StreamsError, TopicError
from streams.kafka.reading import record_decoder
from streams.kafka.reading.received import received
from streams.kafka.wire.compression import decompressed
from streams.records import IncomingRecord, ReceivedHeaders

_HEAD: Final = struct.Struct(">qiibIhiqqqhii")
_FRAME: Final = 12
"""Bytes of offset and length, which the length does not count."""
_MAGIC_AT: Final = 16
_CHECKED_AT: Final = 21
"""Bytes in front of what the checksum covers."""
_CODEC, _APPEND_TIME, _TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20  # in the attributes
_MOST_HEADERS: Final = 1024
"""Headers whose bytes are remembered with what they mean; then it begins anew."""
_known_headers: dict[bytes, ReceivedHeaders | None] = {}


class BatchHead(NamedTuple):
    """A whole batch: where it begins and ends in the answer, and what its head says. ``following``: the offset behind
    its last record, present or not."""

    at: int
    end: int
    base: int
    following: int
    checksum: int
    attributes: int
    first_ms: int
    latest_ms: int
    producer_id: int
    records: int


class FetchedBatches:
    """The batches of one partition, from ``position`` on, in an answer. One thread.

    ``aborted``: producer id and first offset of the aborted transactions, as the answer has them; without them
    (``None``) all records are given, committed or not. ``following``: the offset behind the last whole batch, where the
    next fetch begins. ``leader_epoch``: that of the last whole batch. ``is_cut``: there are bytes, but no whole batch.
    """

    def __init__(
        self, topic: str, partition: int, position: int, data: bytes, aborted: Iterable[tuple[int, int]] | None
    ) -> None:
        self.topic, self.partition, self.position = topic, partition, position
        self.following, self.leader_epoch = position, -1
        self._data = data
        self._committed_only = aborted is not None
        self._to_come = sorted(aborted or (), key=lambda one: -one[1])  # the first one is last
        self._aborted: set[int] = set()  # the producers of those that are open where the reading is
        self._decoded: list[IncomingRecord] = []
        self._given = 0
        self._damage: StreamsError | None = None
        self._heads = self._read_heads()
        self.is_cut = bool(data) and not self._heads and self._damage is None

    @property
    def is_done(self) -> bool:
        """Check whether all is taken."""
        return not self._heads and self._damage is None and self._given == len(self._decoded)

    def take(self, most: int) -> list[IncomingRecord]:
        """Return the next committed records, ``most`` of them at most; fewer, or none, only with the last ones.
        ``position`` is behind them then, and behind what is not for readers.

        Raises ``LogDamaged``, and ``TopicError`` for a format that is not read; first what is before it is returned.
        """
        records, start = self._decoded, self._given
        if start == len(records):
            records, start = [], 0
            while self._heads and len(records) < most:
                try:
                    self._decode(self._heads[-1], records)
                except StreamsError as error:
                    self._heads, self._damage = [], error
                    break
                self.position = self._heads.pop().following
        if not records and self._damage is not None:
            raise self._damage
        end = start + most
        if end >= len(records):
            self._decoded, self._given = [], 0
            if not self._heads and self._damage is None:
                self.position = self.following
            return records[start:] if start else records
        self._decoded, self._given = records, end
        return records[start:end]

    def _read_heads(self) -> list[BatchHead]:
        """Return the heads of the whole batches, the last one first."""
        data, at, heads = self._data, 0, list[BatchHead]()
        size = len(data)
        while at + _HEAD.size <= size and data[at + _MAGIC_AT] == 2:
            base, length, epoch, _, checksum, attributes, delta, first, latest, producer, _, _, count = (
                _HEAD.unpack_from(data, at)
            )
            end = at + _FRAME + length
            if length < _HEAD.size - _FRAME or delta < 0 or not 0 <= count <= delta + 1:
                self._damage = self._damaged(base, "its head makes no sense")
                break
            if end > size:  # the last one is cut off, where the fetch ends
                break
            if base + delta < self.following or (heads and base < self.following):
                self._damage = self._damaged(base, f"it stands where offset {self.following} is to follow")
                break
            self.following, self.leader_epoch = base + delta + 1, epoch
            heads.append(
                BatchHead(at, end, base, base + delta + 1, checksum, attributes, first, latest, producer, count)
            )
            at = end
        if self._damage is None and at + _MAGIC_AT < size and data[at + _MAGIC_AT] != 2:
            self._damage = self._unreadable(at)
        heads.reverse()
        return heads

    def _decode(self, head: BatchHead, records: list[IncomingRecord]) -> None:
        data, attributes = self._data, head.attributes
        if google_crc32c.value(data[head.at + _CHECKED_AT : head.end]) != head.checksum:
            raise self._damaged(head.base, "its checksum is wrong")
        if self._committed_only:
            while self._to_come and self._to_come[-1][1] < head.following:
                self._aborted.add(self._to_come.pop()[0])
        if attributes & _CONTROL:  # the marker of a transaction's end, for readers no record
            self._aborted.discard(head.producer_id)
            return
        if not head.records or (attributes & _TRANSACTIONAL and head.producer_id in self._aborted):
            return
        at, end, codec = head.at + _HEAD.size, head.end, attributes & _CODEC
        try:
            if codec:
                data = decompressed(codec, data[at:end])
                at, end = 0, len(data)
            record_decoder.decode_records(
                data,
                at,
                end,
                head.records,
                self.topic,
                self.partition,
                head.base,
                head.first_ms,
                head.latest_ms if attributes & _APPEND_TIME else -1,
                self.position,
                headers_of,
                records,
            )
        except ValueError as error:
            raise self._damaged(head.base, str(error)) from error

    def _damaged(self, offset: int, reason: str) -> LogDamaged:
        return LogDamaged(
            f"{self.topic}[{self.partition}]@{offset}: the record batch cannot be read: {reason}. Its leader's disk, or"
            " what is between here and there, does not give back what was written; let another replica lead the"
            " partition, or delete the records up to there"
        )

    def _unreadable(self, at: int) -> StreamsError:
        """Return the error for a batch of another format."""
        magic = self._data[at + _MAGIC_AT]
        (offset,) = struct.unpack_from(">q", self._data, at)
        if magic > 2:
            return self._damaged(offset, f"its format is {magic}")
        return TopicError(
            f"{self.topic}[{self.partition}]@{offset}: the records have format {magic}, of the time before Kafka 0.11,"
            " which is not read; copy the topic with Kafka's own clients, which write format 2, and read the copy"
        )


def headers_of(raw: bytes) -> ReceivedHeaders | None:
    """Return headers as ``IncomingRecord`` has them. Raises ``ValueError``. Any thread: at worst two of them keep what
    they read for a while."""
    try:
        return _known_headers[raw]
    except KeyError:
        pass
    source = _HeaderBytes(raw)
    found: list[tuple[str, bytes | None]] = []
    for _ in range(source.number()):
        name = source.content()
        if name is None:
            raise ValueError("a header has no name")
        found.append((name.decode(errors="replace"), source.content()))  # as Java's clients read names
    if source.at != len(raw):
        raise ValueError(f"{len(raw) - source.at} bytes follow the headers of a record")
    if len(_known_headers) >= _MOST_HEADERS:
        _known_headers.clear()
    headers = _known_headers[raw] = received(found or None)
    return headers


class _HeaderBytes:
    """The bytes of headers, read from front to back."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def number(self) -> int:
        number, self.at = record_decoder.varint(self.raw, self.at, len(self.raw))
        if self.at > len(self.raw):
            raise ValueError("the headers of a record end too early")
        return number

    def content(self) -> bytes | None:
        size = self.number()
        if size < 0:
            return None
        self.at += size
        if self.at > len(self.raw):
            raise ValueError("the headers of a record end too early")
        return self.raw[self.at - size : self.at]
