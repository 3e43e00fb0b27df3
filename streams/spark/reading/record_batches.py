"""Record batches of Kafka as Arrow columns: the columns of a read.

Nothing is done for each record but what the compiled leaf does (``record_decoder``). Keys and values are taken by Arrow
out of the batches as they came, headers are looked at once for each *different* list of headers (a topic has few), and
what is the same in all rows is repeated and not listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import types as t
from pyspark.sql.pandas.types import from_arrow_schema

from streams.errors import ConfigError, DecodeError
from streams.kafka.reading.record_batches import headers_of
from streams.kafka.reading.record_decoder import APPENDED, NO_KEY, NO_VALUE, decode_columns
from streams.records import TYPE_HEADER, VERSION_HEADER, ReceivedHeaders
from streams.spark.reading.read_options import ReadOptions

HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_TIME: Final = pa.timestamp("us", "UTC")
_SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("type", pa.string()),
        ("version", pa.int32()),
        ("headers", HEADERS),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", _TIME),
        ("timestampType", pa.int32()),
    ]
)
READ_SCHEMA: Final = from_arrow_schema(_SCHEMA)
"""The columns of a read. ``timestampType``: 0 the producer's time, 1 the broker's."""
_SCHEMA_WITHOUT_HEADERS: Final = _SCHEMA.remove(_SCHEMA.get_field_index("headers"))
_LEAST_RECORD: Final = 7
"""Bytes of a record, at least."""
_LAST_MS: Final = (2**63 - 1) // 1000
"""The last time that a column of microseconds holds."""
_MOST_BYTES: Final = 2**31 - 1
"""Bytes that places of 32 bits reach."""


def read_schema(*, include_headers: bool) -> t.StructType:
    """The columns of a read with or without ``headers`` (option ``includeHeaders``)."""
    return t.StructType([field for field in READ_SCHEMA.fields if include_headers or field.name != "headers"])


def check_schema(schema: t.StructType, options: ReadOptions) -> None:
    """Raises ``ConfigError`` for a schema of the user's own."""
    if schema.simpleString() != read_schema(include_headers=options.include_headers).simpleString():
        raise ConfigError("format('grt') has columns of its own; leave out .schema(...) and use streams.spark.events")


class Columns:
    """Rows of one partition, as record batches are put into it (``FetchedBatches.fill``). One thread; used again after
    ``clear``.

    ``rows`` is their number, ``size`` the bytes of the batches that have them. The arrays have room for more rows; what
    their numbers mean says ``record_decoder``.
    """

    def __init__(self) -> None:
        self._offsets, self._times = np.empty(0, np.int64), np.empty(0, np.int64)
        self._edges, self._places, self._kinds = np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.uint8)
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.rows = self.size = 0
        self._parts: list[memoryview] = []
        self._lists: dict[bytes, int] = {}
        self._headers: list[ReceivedHeaders | None] = []  # what they mean

    def decode(
        self,
        data: bytes,
        at: int,
        end: int,
        count: int,
        base: int,
        first_ms: int,
        append_ms: int,
        start: int,
        stop: int,
    ) -> None:
        """Add the ``count`` records of a batch, those from offset ``start`` up to ``stop``. Raises ``ValueError``."""
        size = end - at
        if count * _LEAST_RECORD > size:
            raise ValueError(f"its head has {count} records, and it has {size} bytes")
        if self.size + size > _MOST_BYTES:
            raise ValueError(f"it has {size} bytes, and 2 GiB are the most that is read at once")
        self._grow(self.rows + count)
        try:
            rows = decode_columns(
                data, at, end, count, base, first_ms, append_ms, start, stop, self.size - at, self.rows,
                self._edges, self._offsets, self._times, self._places, self._kinds, self._lists,
            )  # fmt: skip
            new = [headers_of(raw) for raw in islice(self._lists, len(self._headers), None)]
        except ValueError:
            while len(self._lists) > len(self._headers):
                self._lists.popitem()
            raise
        self._headers += new
        self.rows = rows
        self._parts.append(memoryview(data)[at:end])
        self.size += size

    def batch(self, topic: str, partition: int, options: ReadOptions) -> pa.RecordBatch | None:
        """Return the rows as one batch, ``None`` when none is of the ``types`` wanted. Raises ``DecodeError`` for the
        time of a row that no column holds."""
        lists = self._headers
        kinds = [_type_and_version(headers or ()) for headers in lists]
        places, rows = self._places[: self.rows], np.arange(self.rows, dtype=np.int32)
        if options.types is not None:
            wanted = np.array([name in options.types for name, _ in kinds], dtype=bool)
            rows = rows[wanted[places]]
        if not len(rows):
            return None
        if len(rows) < self.rows:
            places = places[rows]
        kept: Any = rows if len(rows) < self.rows else slice(self.rows)
        indices, flags, count = pa.array(places), self._kinds[kept], len(rows)
        parts = self._parts
        contents = pa.Array.from_buffers(
            pa.binary(),
            4 * self.rows - 1,
            [None, pa.py_buffer(self._edges), pa.py_buffer(parts[0] if len(parts) == 1 else b"".join(parts))],
        )
        found = self._times[kept]
        if (wrong := np.flatnonzero((found > _LAST_MS) | (found < -_LAST_MS))).size:
            row = int(rows[wrong[0]])
            raise DecodeError(
                f"{topic}[{partition}]@{self._offsets[row]}: its time is {self._times[row]} ms since 1970, which no "
                "column holds: was it sent in another unit? Read the ranges before and behind it (startingOffsets, "
                "endingOffsets), or delete the records up to there"
            )
        times = pa.array(found).cast(pa.timestamp("ms", "UTC")).cast(_TIME)
        columns = [
            contents.take(_places(4 * rows, flags & NO_KEY)),
            contents.take(_places(4 * rows + 2, flags & NO_VALUE)),
            pa.array([name for name, _ in kinds], pa.string()).take(indices),
            pa.array([version for _, version in kinds], pa.int32()).take(indices),
            *([header_column(lists).take(indices)] if options.include_headers else []),
            pa.repeat(pa.scalar(topic, pa.string()), count),
            pa.repeat(pa.scalar(partition, pa.int32()), count),
            pa.array(self._offsets[kept].copy()),  # Arrow does not copy
            times,
            pa.array((flags & APPENDED != 0).astype(np.int32)),
        ]
        schema = _SCHEMA if options.include_headers else _SCHEMA_WITHOUT_HEADERS
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _grow(self, rows: int) -> None:
        if rows > (room := len(self._offsets)):
            room = max(rows, 2 * room)
            self._offsets, self._times = _longer(self._offsets, room), _longer(self._times, room)
            self._edges, self._places = _longer(self._edges, 4 * room), _longer(self._places, room)
            self._kinds = _longer(self._kinds, room)


def _longer(numbers: Any, room: int) -> Any:
    made = np.empty(room, numbers.dtype)
    made[: len(numbers)] = numbers
    return made


def _places(rows: Any, is_null: Any) -> pa.Array:
    return pa.array(rows, mask=is_null != 0) if is_null.any() else pa.array(rows)


def _type_and_version(headers: ReceivedHeaders) -> tuple[str | None, int | None]:
    """The event's name and version; version 1 when the header is missing, ``None`` when it makes no sense."""
    name: str | None = None
    version: int | None = 1
    seen_type = seen_version = False
    for header, value in headers:
        if header == TYPE_HEADER and not seen_type:
            seen_type = True
            name = _text(value)
        elif header == VERSION_HEADER and not seen_version:
            seen_version = True
            digits = _text(value) or ""
            version = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 9 else None
    return name, version


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def header_column(lists: Iterable[Iterable[tuple[str, str | bytes | None]] | None]) -> Any:
    """Lists of headers as a column of the type ``HEADERS``."""
    names: list[str] = []
    values: list[bytes | None] = []
    ends = [0]
    for headers in lists:
        for name, value in headers or ():
            names.append(name)
            values.append(value.encode() if isinstance(value, str) else value)
        ends.append(len(names))
    pairs = pa.StructArray.from_arrays(
        [pa.array(names, pa.string()), pa.array(values, pa.binary())], fields=list(HEADERS.value_type)
    )
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pairs)
