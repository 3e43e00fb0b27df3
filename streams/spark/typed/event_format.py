"""``format("grt-events")``: the records of one class, decoded by the class's own codec where they are read.

The reading tasks are Python anyway, and hold the bytes: decoding them there costs a fraction of what it costs to hand
them to the JVM and to parse them again. In return the workers must be able to import the class. ``read_events``
chooses this with ``decode="python"``, or ``"auto"``; verdicts and texts of errors are the event source's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from streams.errors import ConfigError, DecodeError
from streams.events import EventType
from streams.spark.reading.read_options import ReadOptions, read_options
from streams.spark.reading.reader import BatchReader
from streams.spark.reading.record_batches import read_schema
from streams.spark.reading.stream_source import ReaderOfTasks, RefusedStream, StreamReader
from streams.spark.typed.python_codec import EventReference, arrow_type, nullable, plain
from streams.spark.typed.shapes import Scalar, Structure, column_type, shape_of

NAME: Final = "grt-events"
EVENT: Final = "event"
"""The option that names the class: ``str`` of an ``EventReference``."""

_META: Final = {
    "topic": t.StringType(), "partition": t.IntegerType(), "offset": t.LongType(), "timestamp": t.TimestampType(),
    "key": t.BinaryType(), "type": t.StringType(), "version": t.IntegerType(),
}  # fmt: skip
_AS_THEY_ARE: Final = ("str", "int", "float", "bool", "bytes", "datetime", "local_datetime", "date")


class EventsDataSource(DataSource):
    """Options: ``event``, and those of ``format("grt")``. Batch and stream."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> t.StructType:
        return typed_schema(shape_of(self._reference().load().cls))

    def reader(self, schema: t.StructType) -> DataSourceReader:
        return _EventsReader(self._read_options(stream=False), self._reference())

    def streamReader(self, schema: t.StructType) -> DataSourceStreamReader:  # noqa: N802
        try:
            return _EventsStream(self._read_options(stream=True), self._reference())
        except ConfigError as error:
            return RefusedStream(error)

    def _read_options(self, *, stream: bool) -> ReadOptions:
        plain_options = {name.lower(): self.options[name] for name in self.options if name.lower() != EVENT}
        # Not by the option `types`, in which a name with a comma would be two.
        types = frozenset(self._reference().load().names)
        return replace(read_options(plain_options, stream=stream), types=types, include_headers=False)

    def _reference(self) -> EventReference:
        path = self.options.get(EVENT)
        if not path:
            raise ConfigError(f"format('{NAME}') needs the option {EVENT}; streams.spark.read_events gives it")
        return EventReference.parse(path)


class _EventsStream(StreamReader):
    def __init__(self, options: ReadOptions, reference: EventReference) -> None:
        super().__init__(options, read_schema(include_headers=options.include_headers))
        self._reference = reference

    def __reduce__(self) -> Any:
        return _EventsOfTasks, (self._options, self._reference)


class _EventsOfTasks(ReaderOfTasks):
    def __init__(self, options: ReadOptions, reference: EventReference) -> None:
        super().__init__(options)
        self._reference = reference

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return map(EventBatches(self._reference.load()).of, super().read(partition))


class _EventsReader(BatchReader):
    inside = ("_meta",)

    def __init__(self, options: ReadOptions, reference: EventReference) -> None:
        super().__init__(options)
        self._reference = reference

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return map(EventBatches(self._reference.load()).of, super().read(partition))


def typed_schema(shape: Structure) -> t.StructType:
    """The columns of one class as ``events`` gives them."""
    columns = [t.StructField(field.name, nullable(column_type(field.shape))) for field in shape.fields]
    meta = t.StructType([t.StructField(name, kind) for name, kind in _META.items()])
    return t.StructType([*columns, t.StructField("_error", t.StringType()), t.StructField("_meta", meta)])


class EventBatches:
    """Makes typed batches of an event type from batches of its records."""

    def __init__(self, event: EventType[Any]) -> None:
        self._event = event
        self._shape = shape_of(event.cls)
        self._struct = arrow_type(self._shape)
        self._columns: list[Callable[[list[Any]], Any]] = [_column(field) for field in self._shape.fields]
        self._names = [*(field.name for field in self._shape.fields), "_error", "_meta"]

    def of(self, records: pa.RecordBatch) -> pa.RecordBatch:
        """Rows in the order of the records."""
        column = records.column("value")
        values, versions = column.to_pylist(), records.column("version").to_pylist()
        meta = pa.StructArray.from_arrays([records.column(name) for name in _META], names=list(_META))
        columns: list[Any] | None = None
        error: Any = pa.nulls(len(values), pa.string())
        if not column.null_count and versions.count(self._event.version) == len(versions):
            with contextlib.suppress(Exception):  # something is wrong with one of them: each is looked at below
                found = list(map(self._event.bare_decode, values))
                columns = [make(found) for make in self._columns]
        if columns is None:
            columns, error = self._one_by_one(values, versions)
        return pa.RecordBatch.from_arrays([*columns, error, meta], names=self._names)

    def _one_by_one(self, values: list[bytes | None], versions: list[int | None]) -> tuple[list[Any], Any]:
        rows: list[Any] = []
        errors: list[str | None] = []
        for value, version in zip(values, versions, strict=True):
            try:
                if version is None:
                    raise DecodeError("the version header is no number")
                rows.append(plain(self._event.decode(value, version), self._shape, ""))
                errors.append(None)
            except DecodeError as error:
                rows.append(None)
                errors.append(str(error))
        return pa.array(rows, self._struct).flatten(), pa.array(errors, pa.string())


def _column(field: Any) -> Callable[[list[Any]], Any]:
    get, shape, kind = attrgetter(field.name), field.shape, arrow_type(field.shape)
    if isinstance(shape, Scalar) and shape.kind in _AS_THEY_ARE and not shape.allowed:
        return lambda events: pa.array(list(map(get, events)), kind)
    return lambda events: pa.array([plain(get(event), shape, field.name) for event in events], kind)
