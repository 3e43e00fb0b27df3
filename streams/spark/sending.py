"""Arrow batches into a Kafka producer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as _compute
from confluent_kafka import Consumer, Producer

from streams.errors import RecordRefused
from streams.records import TYPE_HEADER, VERSION_HEADER, Headers
from streams.spark.kafka import partition_count

pc: Any = _compute  # its functions are made at run time

_KEY, _ANY_PARTITION, _NOW = None, -1, 0
_NO_CALLBACK: Final = (itertools.repeat(None), itertools.repeat(None))
_MOST_HEADER_LISTS: Final = 10_000


class Sender:
    """Hands rows to a producer. No callback per row: a record that fails makes the commit of the transaction fail.

    ``topic``: of all rows, else each names its own. ``doing`` is for messages.
    """

    def __init__(
        self, producer: Producer, metadata: Consumer, topic: str | None, kafka: dict[str, str], doing: str
    ) -> None:
        self._producer = producer
        self._metadata = metadata
        self._topic = topic
        self._kafka = kafka
        self._doing = doing
        self._partitions: dict[str, int] = {}
        self._headers: dict[tuple[str | None, int | None, tuple[tuple[str, bytes | None], ...]], Headers] = {}

    def partitions_of(self, topic: str) -> int:
        """The number of partitions. Raises ``TopicError``: a produce to a missing topic would wait for its whole
        timeout. Requested once, by a consumer, because its request does not create the topic."""
        if (count := self._partitions.get(topic)) is not None:
            return count
        count = self._partitions[topic] = partition_count(self._metadata, topic, self._doing, self._kafka)
        return count

    def send(self, batch: Any) -> int:
        """Hand over one batch and return its number of rows. Raises ``RecordRefused``, ``TopicError``."""
        names = batch.schema.names
        topics = self._topics(batch)
        # By position (topic, value, key, partition, callback, on_delivery, timestamp, headers): for so small a call,
        # taking keywords apart costs as much as the rest.
        rows = zip(
            topics,
            batch.column("value").to_pylist() if batch.num_rows else (),
            batch.column("key").to_pylist() if "key" in names else itertools.repeat(_KEY),
            self._partition_numbers(batch, topics),
            *_NO_CALLBACK,
            self._milliseconds(batch),
            self._header_lists(batch),
            strict=False,
        )
        produce: Any = self._producer.produce
        for row in rows:
            try:
                produce(*row)
            except BufferError:
                self._wait_and_produce(row)
        self._producer.poll(0)
        return int(batch.num_rows)

    def _wait_and_produce(self, row: tuple[Any, ...]) -> None:
        produce: Any = self._producer.produce
        while True:
            self._producer.poll(0.01)
            try:
                produce(*row)
            except BufferError:
                continue
            return

    def _topics(self, batch: Any) -> Iterable[str]:
        if self._topic is not None:
            self.partitions_of(self._topic)
            return itertools.repeat(self._topic)
        column = batch.column("topic")
        if column.null_count:
            raise RecordRefused(f"{self._doing}: a row has null in its column topic; nothing was written")
        for topic in column.unique().to_pylist():
            self.partitions_of(topic)
        named: list[str] = column.to_pylist()
        return named

    def _partition_numbers(self, batch: Any, topics: Iterable[str]) -> Iterable[int]:
        if "partition" not in batch.schema.names:
            return itertools.repeat(_ANY_PARTITION)
        numbers = batch.column("partition").to_pylist()
        for topic, number in set(zip(topics, numbers, strict=False)):
            if number is not None and not 0 <= number < self.partitions_of(topic):
                raise RecordRefused(
                    f"{self._doing}: a row names partition {number} of {topic!r}, which has "
                    f"{self.partitions_of(topic)}; drop the column partition to let the key decide. Nothing was written"
                )
        return [_ANY_PARTITION if number is None else number for number in numbers]

    def _milliseconds(self, batch: Any) -> Iterable[int]:
        if "timestamp" not in batch.schema.names:
            return itertools.repeat(_NOW)
        micros = batch.column("timestamp").cast(pa.timestamp("us", "UTC")).cast("int64")
        if (first := pc.min(micros).as_py()) is not None and first < 1000:
            raise RecordRefused(
                f"{self._doing}: a row's column timestamp is 1970-01-01T00:00:00.000 or earlier, which Kafka cannot "
                "keep; null means the time of sending. Nothing was written"
            )
        millis: list[int] = pc.fill_null(pc.divide(micros, 1000), _NOW).to_pylist()
        return millis

    def _header_lists(self, batch: Any) -> Iterable[Headers]:
        """One for each row: the same list for rows whose headers are the same, made once."""
        names, rows = batch.schema.names, batch.num_rows
        kinds = batch.column("type") if "type" in names else pa.nulls(rows, pa.string())
        versions = batch.column("version") if "version" in names else pa.nulls(rows, pa.int32())
        pairs: Iterable[tuple[tuple[str, bytes | None], ...]] = itertools.repeat(())
        if "headers" in names and rows:
            self._check_headers(batch.column("headers"))
            pairs = _pairs(batch.column("headers"))
        if isinstance(pairs, itertools.repeat) and len(kinds.unique()) == len(versions.unique()) == 1:
            return itertools.repeat(self._headers_of(kinds[0].as_py(), versions[0].as_py(), next(pairs)))
        return map(self._headers_of, kinds.to_pylist(), versions.to_pylist(), pairs)

    def _check_headers(self, column: Any) -> None:
        flat = column.flatten()
        if flat.null_count or flat.field(0).null_count:
            raise RecordRefused(
                f"{self._doing}: a row's column headers has a header that is null, or whose key is; nothing was written"
            )

    def _headers_of(
        self, kind: str | None, version: int | None, pairs: tuple[tuple[str, bytes | None], ...]
    ) -> Headers:
        found = self._headers.get((kind, version, pairs))
        if found is None:
            if len(self._headers) >= _MOST_HEADER_LISTS:
                self._headers.clear()
            found = self._headers[kind, version, pairs] = _merged(pairs, kind, version)
        return found


def _pairs(column: Any) -> Iterable[tuple[tuple[str, bytes | None], ...]]:
    """The rows' own headers; ``itertools.repeat`` when all rows have the same."""
    if column.null_count:
        return [tuple((pair["key"], pair["value"]) for pair in pairs or ()) for pairs in column.to_pylist()]
    ends = column.offsets.to_pylist()
    flat = column.values
    if _alike(column):
        first = flat.slice(ends[0], ends[1] - ends[0])
        return itertools.repeat(tuple(zip(first.field(0).to_pylist(), first.field(1).to_pylist(), strict=True)))
    pairs = list(zip(flat.field(0).to_pylist(), flat.field(1).to_pylist(), strict=True))
    return [tuple(pairs[start:end]) for start, end in itertools.pairwise(ends)]


def _alike(column: Any) -> bool:
    """Check whether all rows of a list column without nulls are the same: as long, and each like the one before it."""
    if len(pc.list_value_length(column).unique()) != 1:
        return False
    flat = column.flatten()
    width = len(flat) // len(column)
    return bool(flat.slice(width).equals(flat.slice(0, len(flat) - width)))


def type_headers(kind: str | None, version: int | None) -> Headers:
    """The headers of an event of this type and version, version 1 without one of its own."""
    if kind is None:
        return []
    headers: Headers = [(TYPE_HEADER, kind.encode())]
    if version is not None and version != 1:
        headers.append((VERSION_HEADER, b"%d" % version))
    return headers


def _merged(pairs: tuple[tuple[str, bytes | None], ...], kind: str | None, version: int | None) -> Headers:
    """The row's own headers; its columns ``type`` and ``version`` win over headers of the same meaning.

    A version that is null (no such column, or a header that is no number) leaves the row's header as it is: without it
    the record would be one of version 1.
    """
    ours = type_headers(kind, version)
    replaced = {TYPE_HEADER} if ours else set()
    if ours and version is not None:
        replaced.add(VERSION_HEADER)
    return [*ours, *(pair for pair in pairs if pair[0] not in replaced)]
