"""Rows as Kafka's record batches (format 2), made in tasks, a column at a time.

Rows are gathered, sorted by topic and partition (each keeps its order), and encoded: what stands between key and value
is computed for all rows at once, and Arrow joins the pieces. Producer, epoch and sequence stay empty: the driver has
them (``kafka.writing.forwarding``).
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as _compute

from streams.errors import RecordRefused
from streams.kafka.wire.compression import ATTRIBUTES, Compression, codec_of, lz4_frame
from streams.kafka.wire.placement import BATCH_HEAD
from streams.kafka.writing.made_batch import MadeBatch
from streams.records import DEFAULT_MESSAGE_LIMIT, RECORD_OVERHEAD, shown_key
from streams.spark.columns import SINK_COLUMNS
from streams.spark.options import KafkaSettings
from streams.spark.writing.header_columns import HeaderColumn, headers_of
from streams.spark.writing.placing import MOST_BATCH_BYTES, Numbers, TopicShape, key_hashes, partitions_of

pc: Any = _compute  # its functions are made at run time

GATHERED_BYTES: Final = 16 << 20
"""Of rows that are encoded together: the more, the larger the batches of a topic with many partitions."""
KEYLESS_RUN: Final = 1_000
"""Rows without key that go to one partition, before the next one has its turn."""
_HEAD: Final = struct.Struct(">qiibI")
_TAIL: Final = struct.Struct(">hiqqqhii")
_TRANSACTIONAL: Final = 0x10
_LENGTHS: Final = 5 + 1 + 10 + 4 + 5 + 5
"""Bytes around key, value and headers of a record, at most: length, attributes, time, position, two lengths."""
_BYTES: Final = pa.large_binary()


class _Destination(NamedTuple):
    topic: str
    partition: int
    shape: TopicShape


class _Bytes(NamedTuple):
    """A column of bytes. ``lengths``: -1 where it is null."""

    column: Any
    lengths: Numbers

    @classmethod
    def of(cls, column: Any) -> _Bytes:
        column = column.cast(_BYTES)
        starts, _ = flat(column)
        lengths = np.diff(starts)
        if column.null_count:
            lengths = np.where(column.is_null().to_numpy(zero_copy_only=False), -1, lengths)
        return cls(column, lengths)

    def sorted_by(self, order: Numbers) -> _Bytes:
        return _Bytes(self.column.take(pa.array(order)), self.lengths[order])


def flat(column: Any) -> tuple[Numbers, Numbers]:
    """Return where the values of a column of type ``large_binary`` start and end, and the bytes."""
    _, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    return starts, np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)


class BatchEncoder:
    """Encodes the rows of one task. ``topic``: of all rows, else each names its own. ``doing`` is for messages.

    ``kafka``: ``compression.type`` (zstd unless it is given) and ``compression.level``, ``message.max.bytes``,
    ``batch.size``. ``shape_of`` knows the topics. ``rows``: how many were encoded.
    """

    def __init__(
        self, topic: str | None, kafka: KafkaSettings, doing: str, shape_of: Callable[[str], TopicShape]
    ) -> None:
        self.rows = 0
        self._topic = topic
        self._doing = doing
        self._shape_of = shape_of
        self._compression = compression(kafka)
        self._record_limit = int(kafka.get("message.max.bytes", DEFAULT_MESSAGE_LIMIT))
        self._batch_limit = int(kafka.get("batch.size", MOST_BATCH_BYTES))
        self._keyless = random.randrange(1 << 30) * KEYLESS_RUN  # tasks begin at different partitions

    def encode(self, batches: Iterable[Any]) -> Iterator[MadeBatch]:
        """Encode rows (``pyarrow.RecordBatch``). Raises ``RecordRefused``, ``TopicError``, ``BrokerUnavailable``."""
        gathered: list[Any] = []
        size = 0
        for batch in batches:
            if batch.num_rows:
                gathered.append(batch.select([name for name in batch.schema.names if name in SINK_COLUMNS]))
                size += gathered[-1].nbytes
            if size >= GATHERED_BYTES:
                yield from self._encoded(gathered)
                gathered, size = [], 0
        yield from self._encoded(gathered)

    def _encoded(self, gathered: list[Any]) -> Iterator[MadeBatch]:
        if gathered:
            for rows in pa.Table.from_batches(gathered).combine_chunks().to_batches():
                self.rows += rows.num_rows
                yield from self._made(rows)

    def _made(self, rows: Any) -> Iterator[MadeBatch]:
        key = _Bytes.of(rows.column("key")) if "key" in rows.schema.names else None
        value = _Bytes.of(rows.column("value"))
        times = self._milliseconds(rows)
        headers = headers_of(rows, self._doing)
        targets, places = self._destinations(rows, key)
        if len(targets) > 1:
            order = np.argsort(places, kind="stable")
            places, times, headers = places[order], times[order], headers.sorted_by(order)
            key, value = None if key is None else key.sorted_by(order), value.sorted_by(order)
        sizes = np.maximum(value.lengths, 0) + headers.lengths
        if key is not None:
            sizes += np.maximum(key.lengths, 0)
        self._check_sizes(sizes, key, places, targets)
        first = self._cut(places, sizes + _LENGTHS, targets)
        ends, records = _records(key, value, headers, times, first)
        yield from self._batches(ends, records, times, first, [targets[place] for place in places[first]], key)

    # -- where to ------------------------------------------------------------------------------------------------------

    def _destinations(self, rows: Any, key: _Bytes | None) -> tuple[list[_Destination], Numbers]:
        """Return the partitions that rows may go to, of all topics, and for each row the index of its own."""
        names, of_row = self._topics(rows)
        shapes = [self._shape_of(name) for name in names]
        targets = [
            _Destination(name, partition, shape)
            for name, shape in zip(names, shapes, strict=True)
            for partition in range(shape.partitions)
        ]
        counts = np.array([shape.partitions for shape in shapes])
        count: Numbers | int = int(counts[0]) if len(names) == 1 else counts[of_row]
        partitions = self._partitions(rows, key, count, lambda row: names[int(of_row[row])])
        if len(names) > 1:
            partitions += (np.cumsum(counts) - counts)[of_row]
        return targets, partitions.astype(np.uint16 if len(targets) < 1 << 16 else np.int64)  # the first sorts faster

    def _topics(self, rows: Any) -> tuple[list[str], Numbers]:
        if self._topic is not None:
            return [self._topic], np.broadcast_to(np.int64(0), rows.num_rows)
        column = rows.column("topic")
        if column.null_count:
            raise RecordRefused(f"{self._doing}: a row has null in its column topic; nothing was written")
        encoded = column.dictionary_encode()
        return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()

    def _partitions(
        self, rows: Any, key: _Bytes | None, count: Numbers | int, topic_of: Callable[[int], str]
    ) -> Numbers:
        """Return the partition of each row: its own, else that of its key, else of its turn."""
        n = rows.num_rows
        if key is None:
            has_key = np.zeros(n, bool)
            partitions = np.zeros(n, np.int64)
        else:
            has_key = key.lengths >= 0
            starts, data = flat(key.column)
            partitions = partitions_of(key_hashes(starts[:-1], np.maximum(key.lengths, 0), data), count)
        if not has_key.all():
            turn = (self._keyless + np.cumsum(~has_key)) // KEYLESS_RUN
            self._keyless += int(n - has_key.sum())
            partitions = np.where(has_key, partitions, turn % count)
        if "partition" in rows.schema.names:
            given = rows.column("partition").cast(pa.int64())
            has_own = given.is_valid().to_numpy(zero_copy_only=False)
            own = pc.fill_null(given, 0).to_numpy()
            wrong = np.flatnonzero((own < 0) | (own >= count))
            if len(wrong):
                row = int(wrong[0])
                most = int(np.broadcast_to(count, n)[row])
                raise RecordRefused(
                    f"{self._doing}: a row names partition {own[row]} of {topic_of(row)!r}, which has {most}; drop the "
                    "column partition to let the key decide. Nothing was written"
                )
            partitions = np.where(has_own, own, partitions)
        return partitions

    def _milliseconds(self, rows: Any) -> Numbers:
        now = int(time.time() * 1000)
        if "timestamp" not in rows.schema.names:
            return np.full(rows.num_rows, now, np.int64)
        micros = rows.column("timestamp").cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        if (first := pc.min(micros).as_py()) is not None and first < 1000:
            raise RecordRefused(
                f"{self._doing}: a row's column timestamp is 1970-01-01T00:00:00.000 or earlier, which Kafka cannot "
                "keep; null means the time of sending. Nothing was written"
            )
        millis: Numbers = pc.fill_null(pc.divide(micros, 1000), now).to_numpy()
        return millis

    # -- batches -------------------------------------------------------------------------------------------------------

    def _check_sizes(self, sizes: Numbers, key: _Bytes | None, places: Numbers, targets: list[_Destination]) -> None:
        overhead = RECORD_OVERHEAD - 1  # the number of headers is counted already
        large = np.flatnonzero(sizes > self._record_limit - overhead)
        if len(large):
            row = int(large[0])
            size = sizes[row] + overhead
            reason = f"the record has {size} bytes, and kafka.message.max.bytes is {self._record_limit}"
            raise self._too_large(targets[places[row]], key, row, reason)

    def _too_large(self, target: _Destination, key: _Bytes | None, row: int, reason: str) -> RecordRefused:
        shown = shown_key(None if key is None else key.column[row].as_py())
        return RecordRefused(
            f"{self._doing}: {target.topic}[{target.partition}], key {shown}: {reason}. Nothing was written"
        )

    def _cut(self, places: Numbers, sizes: Numbers, targets: list[_Destination]) -> Numbers:
        """Return the first row of each batch. ``sizes``: of records, at most."""
        starts = np.flatnonzero(np.diff(places, prepend=np.int64(-1)))
        ends = np.cumsum(sizes)
        first: list[int] = []
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(places)], strict=True):
            limit = self._batch_limit
            if (most := targets[places[start]].shape.batch_bytes) is not None:
                limit = min(limit, most)
            row = start
            while row < end:
                first.append(row)
                room = ends[row] - sizes[row] + limit - BATCH_HEAD
                row = max(row + 1, int(np.searchsorted(ends[row:end], room, "right")) + row)
        return np.array(first)

    def _batches(
        self,
        ends: Numbers,
        records: Any,
        times: Numbers,
        first: Numbers,
        targets: list[_Destination],
        key: _Bytes | None,
    ) -> list[MadeBatch]:
        """Return the batches in the order in which they can be sent: the first of each partition, then the second."""
        made: list[tuple[int, MadeBatch]] = []
        depth, before = 0, None
        latest = np.maximum.reduceat(times, first).tolist()
        counts = np.diff(first, append=len(times)).tolist()
        for row, count, last_ms, target in zip(first.tolist(), counts, latest, targets, strict=True):
            depth, before = depth + 1 if target == before else 0, target
            start = int(ends[row])
            attributes, body = self._packed(records.slice(start, int(ends[row + count]) - start))
            size, most = BATCH_HEAD + len(body), target.shape.batch_bytes
            if count == 1 and most is not None and size > most:
                reason = f"the record makes a batch of {size} bytes, and the topic takes {most} (max.message.bytes)"
                raise self._too_large(target, key, row, reason)
            head = _head(body, attributes, int(times[row]), last_ms, count)
            made.append((depth, MadeBatch(target.topic, target.partition, target.shape.partitions, head, body)))
        made.sort(key=lambda entry: entry[0])
        return [batch for _, batch in made]

    def _packed(self, records: Any) -> tuple[int, bytes]:
        """Return the attributes of a batch, and its records, compressed where that makes them smaller."""
        if self._compression is not None:
            packed = self._compression.compress(records)
            if len(packed) < records.size:
                return _TRANSACTIONAL | self._compression.attribute, packed
        return _TRANSACTIONAL, records.to_pybytes()


def _head(body: bytes, attributes: int, first_ms: int, last_ms: int, count: int) -> bytes:
    """Return the head of a batch without a producer."""
    tail = _TAIL.pack(attributes, count - 1, first_ms, last_ms, -1, -1, -1, count)
    checksum = google_crc32c.extend(google_crc32c.value(tail), body)
    return _HEAD.pack(0, len(tail) + len(body) + 9, -1, 2, checksum) + tail


def _records(
    key: _Bytes | None, value: _Bytes, headers: HeaderColumn, times: Numbers, first: Numbers
) -> tuple[Numbers, Any]:
    """Encode records; return where each begins, and the bytes of all."""
    n = len(times)
    counts = np.diff(first, append=n)
    position = np.arange(n) - np.repeat(first, counts)
    ago = times - np.repeat(times[first], counts)
    key_lengths = np.full(n, -1) if key is None else key.lengths
    fields = [_varints(ago), _varints(position), _varints(key_lengths)]
    value_field = _varints(value.lengths)
    size = 1 + sum(mask.sum(axis=1) for _, mask in [*fields, value_field])
    size += np.maximum(key_lengths, 0) + np.maximum(value.lengths, 0) + headers.lengths
    attributes = np.zeros((n, 1), np.uint8), np.ones((n, 1), bool)
    pieces = [_ragged([_varints(size), attributes, *fields])]
    if key is not None:
        pieces.append(key.column)
    pieces += [_ragged([value_field]), value.column, headers.encoded]
    empty = pa.scalar(b"", _BYTES)  # made here: the first scalar of a process imports pandas, half a second
    joined = pc.binary_join_element_wise(*pieces, empty, null_handling="replace", null_replacement="")
    starts, _ = flat(joined)
    return starts, joined.buffers()[2]


def _varints(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Encode signed numbers as records have them. Returns a row of bytes for each, and which of them count."""
    zigzag = ((numbers << 1) ^ (numbers >> 63)).astype(np.uint64)
    width = max(1, -(-int(zigzag.max()).bit_length() // 7))
    shifted = zigzag[:, None] >> (np.arange(width + 1, dtype=np.uint64) * np.uint64(7))
    is_more = shifted[:, 1:] > 0
    encoded = (shifted[:, :-1] & np.uint64(127)).astype(np.uint8) | (is_more.astype(np.uint8) << 7)
    counts = np.ones_like(is_more)
    counts[:, 1:] = is_more[:, :-1]
    return encoded, counts


def _ragged(fields: list[tuple[Numbers, Numbers]]) -> Any:
    """Join fields of ``_varints``, row by row, as a column of bytes."""
    counts = np.concatenate([mask for _, mask in fields], axis=1)
    data = np.concatenate([encoded for encoded, _ in fields], axis=1)[counts]
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts.sum(axis=1), out=ends[1:])
    return pa.LargeBinaryArray.from_buffers(_BYTES, len(counts), [None, pa.py_buffer(ends), pa.py_buffer(data)])


def compression_settings(kafka: KafkaSettings) -> tuple[str, int]:
    """Return the name of the codec, and its level. Raises ``ConfigError``."""
    return codec_of({"compression.level": "1", **kafka}, "zstd")


def compression(kafka: KafkaSettings) -> Compression | None:
    """Choose the codec of a write's batches: ``kafka.compression.type``, zstd unless it is given, in its fastest level
    unless ``kafka.compression.level`` is. Raises ``ConfigError``."""
    name, level = compression_settings(kafka)
    if name == "none":
        return None
    codec = pa.Codec(name, level) if name in ("gzip", "zstd") else pa.Codec({"lz4": "lz4_raw"}.get(name, name))

    def compress(data: Any) -> bytes:
        return bytes(codec.compress(data, asbytes=True))

    return Compression(ATTRIBUTES[name], (lambda data: lz4_frame(data, compress)) if name == "lz4" else compress)
