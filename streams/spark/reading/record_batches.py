"""Kafka messages as Arrow columns: the columns of a read, and the one loop that is run for every record.

A record costs about two microseconds of Python here, half of it the client's own. So: each column is one pass over the
messages with a method of theirs, headers are looked at once for each *different* list of headers (a topic has few),
what is the same in all rows is repeated and not listed, and Python's garbage collector rests meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Message
from pyspark.sql import types as t
from pyspark.sql.pandas.types import from_arrow_schema

from streams.errors import ConfigError
from streams.records import TYPE_HEADER, VERSION_HEADER
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
"""The columns of a read. ``timestampType``: 0 the producer's time, 1 the broker's, -1 none."""
_SCHEMA_WITHOUT_HEADERS: Final = _SCHEMA.remove(_SCHEMA.get_field_index("headers"))

_HeaderList = tuple[tuple[str, bytes | None], ...]


def read_schema(*, include_headers: bool) -> t.StructType:
    """The columns of a read with or without ``headers`` (option ``includeHeaders``)."""
    return t.StructType([field for field in READ_SCHEMA.fields if include_headers or field.name != "headers"])


def check_schema(schema: t.StructType, options: ReadOptions) -> None:
    """Raises ``ConfigError`` for a schema of the user's own."""
    if schema.simpleString() != read_schema(include_headers=options.include_headers).simpleString():
        raise ConfigError("format('grt') has columns of its own; leave out .schema(...) and use streams.spark.events")


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside: nothing here makes cycles, and a list and tuples for every record set it off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def batch_of(messages: list[Message], topic: str, partition: int, options: ReadOptions) -> pa.RecordBatch | None:
    """Messages of one partition, none of them an error, as one batch; ``None`` when none is of the ``types`` wanted."""
    lists, places = _different_headers(messages)
    kinds = [_type_and_version(headers) for headers in lists]
    if options.types is not None:
        good = [name in options.types for name, _ in kinds]
        if not all(good):
            kept = [n for n, place in enumerate(places) if good[place]]
            messages, places = [messages[n] for n in kept], [places[n] for n in kept]
    rows = len(messages)
    if not rows:
        return None
    indices = pa.array(places, pa.int32())
    times, time_types = _times(messages)
    columns = [
        pa.array(list(map(Message.key, messages)), pa.binary()),
        pa.array(list(map(Message.value, messages)), pa.binary()),
        pa.array([name for name, _ in kinds], pa.string()).take(indices),
        pa.array([version for _, version in kinds], pa.int32()).take(indices),
        *([header_column(lists).take(indices)] if options.include_headers else []),
        pa.repeat(pa.scalar(topic, pa.string()), rows),
        pa.repeat(pa.scalar(partition, pa.int32()), rows),
        pa.array(list(map(Message.offset, messages)), pa.int64()),
        times,
        time_types,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA if options.include_headers else _SCHEMA_WITHOUT_HEADERS)


def _different_headers(messages: list[Message]) -> tuple[list[_HeaderList], list[int]]:
    """The lists of headers that there are, each once, and for each message which one it has."""
    index: dict[_HeaderList, int] = {}
    places: list[int] = []
    # The stubs say that headers may be a mapping or text; what is received is a list of pairs, or None.
    found: Any = map(Message.headers, messages)
    last: Any = ...
    place = 0
    for headers in found:
        if headers != last:  # to compare takes less than to make a tuple, and to look it up
            last, place = headers, index.setdefault(tuple(headers) if headers else (), len(index))
        places.append(place)
    return list(index), places


def _type_and_version(headers: _HeaderList) -> tuple[str | None, int | None]:
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


def _times(messages: list[Message]) -> tuple[Any, Any]:
    stamps = list(map(Message.timestamp, messages))
    kinds = {kind for kind, _ in stamps}
    times = [at if kind else None for kind, at in stamps] if 0 in kinds else [at for _, at in stamps]
    column = pa.array(times, pa.timestamp("ms", "UTC")).cast(_TIME)
    if len(kinds) == 1:
        return column, pa.repeat(pa.scalar(kinds.pop() - 1, pa.int32()), len(stamps))
    return column, pa.array([kind - 1 for kind, _ in stamps], pa.int32())
