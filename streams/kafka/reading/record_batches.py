"""The record batches of one partition in the answer to a Fetch: which are whole, which are committed, what is in them.

A head is read before its checksum is compared, because where the next fetch begins must be known before anything is
decoded. The checksum covers all of a batch but its first 21 bytes. Of these a wrong length or format is found by what
it leads to, and a wrong leader epoch changes no record; a wrong offset that fits between its neighbours cannot be found
by any client: brokers write it without computing the checksum anew.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final

import google_crc32c

from streams.errors import LogDamaged, StreamsError, TopicError
from streams.kafka.reading import record_decoder
from streams.kafka.reading.received import received
from streams.kafka.wire.compression import decompressed
from streams.records import IncomingRecord, ReceivedHeaders

HEAD: Final = struct.Struct(">qiibIhiqqqhii")
"""The head of a batch (Kafka's documentation, "Message Format")."""
_FIRST: Final = struct.Struct(">qiibIhi")
_MAGIC_AT: Final = 16
_MOST_HEADERS: Final = 1024
"""Headers whose bytes are remembered with what they mean; then it begins anew."""
_known_headers: dict[bytes, ReceivedHeaders | None] = {}


class FetchedBatches:
    """The batches of one partition, from ``position`` on, in an answer. One thread.

    ``aborted``: producer id and first offset of the aborted transactions, as the answer has them; without them
    (``None``) all records are given, committed or not. ``following``: the offset behind the last whole batch, where the
    next fetch begins. ``leader_epoch``: that of the last whole batch. ``is_cut``: there are bytes, but no whole batch.
    """

    def __init__(
        self, topic: str, partition: int, position: int, data: bytes, aborted: Iterable[tuple[int, int]] | None
    ) -> None:
        self.topic, self.partition = topic, partition
        self._data = data
        self._end, self.following, self.leader_epoch, reason = record_decoder.scan_batches(
            data, position, _FIRST.unpack_from
        )
        self._place = [0, position, 0]
        self._to_come = sorted(aborted or (), key=lambda one: -one[1])  # the first one is last
        self._aborted: set[int] | None = None if aborted is None else set()
        self._decoded: list[IncomingRecord] = []
        self._given = 0
        self._damage = self._unreadable(reason) if reason else None
        self.is_cut = bool(data) and not self._end and self._damage is None

    @property
    def position(self) -> int:
        """Return the offset up to which all was taken."""
        left = self._decoded
        return left[self._given].offset if self._given < len(left) else self._place[1]

    @property
    def size(self) -> int:
        """Return the bytes of the answer, which are kept as long as there is something to take."""
        return len(self._data)

    @property
    def bytes_an_offset(self) -> float:
        """Return how many bytes an offset takes, on the average of the whole batches. Before anything is taken."""
        (first,) = struct.unpack_from(">q", self._data)
        return self._end / (self.following - int(first))

    @property
    def is_done(self) -> bool:
        """Check whether all is taken."""
        return self._place[0] >= self._end and self._damage is None and self._given == len(self._decoded)

    def take(self, most: int) -> list[IncomingRecord]:
        """Return the next committed records, ``most`` of them at most; fewer, or none, only with the last ones.
        ``position`` is behind them then, and behind what is not for readers.

        Raises ``LogDamaged``, and ``TopicError`` for a format that is not read; first what is before it is returned.
        """
        records, start = self._decoded, self._given
        if start == len(records):
            records, start = [], 0
            self._decode(records, most)
            if not records and self._damage is not None and self._place[0] >= self._end:
                raise self._damage
        end = start + most
        if end >= len(records):
            self._decoded, self._given = [], 0
            return records[start:] if start else records
        self._decoded, self._given = records, end
        return records[start:end]

    def fill(self, columns: Any, most: int, end: int) -> None:
        """Put the next committed records below offset ``end`` into columns (see ``record_decoder``), until these have
        ``most`` rows, which a batch may exceed. Raises as ``take``. Not after ``take``, nor before it."""
        before = columns.rows
        self._decode(None, most, columns, end)
        if self._damage is not None and self._place[0] >= self._end and columns.rows == before:
            raise self._damage

    def _decode(
        self,
        records: list[IncomingRecord] | None,
        most: int,
        columns: Any = None,
        limit: int = record_decoder.LAST_OFFSET,
    ) -> None:
        place = self._place
        place[2] = 0 if columns is None else columns.rows
        try:
            record_decoder.decode_batches(
                self._data,
                self._end,
                place,
                most,
                self.topic,
                self.partition,
                HEAD.unpack_from,
                google_crc32c.value,
                decompressed,
                headers_of,
                self._aborted,
                self._to_come,
                records,
                columns,
                limit,
            )
        except ValueError as error:
            if columns is not None:
                columns.rows = place[2]
            elif records is not None:
                del records[place[2] :]
            self._end = place[0]  # there is nothing behind it
            self._damage = self._damaged(str(error))
            self._damage.__cause__ = error

    def _damaged(self, reason: str) -> LogDamaged:
        (offset,) = struct.unpack_from(">q", self._data, self._end)
        return LogDamaged(
            f"{self.topic}[{self.partition}]@{offset}: the record batch cannot be read: {reason}. Its leader's disk, or"
            " what is between here and there, does not give back what was written; let another replica lead the"
            " partition, or delete the records up to there"
        )

    def _unreadable(self, reason: str) -> StreamsError:
        """Return the error for the batch behind those that can be read."""
        magic = self._data[self._end + _MAGIC_AT]
        if magic >= 2:
            return self._damaged(reason)
        (offset,) = struct.unpack_from(">q", self._data, self._end)
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
