"""Events through their classes' own code, in Python on the workers: upcasters, and codecs that the JVM does not know.

These are Arrow UDFs: only the bytes in question travel to Python and back, and nulls travel for all other rows. The
class is looked up by its import path, never sent: it must be importable where the workers run.
"""

from __future__ import annotations

import datetime as dt
import enum
import sys
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, cast

import msgspec
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import types as t
from pyspark.sql.pandas.functions import arrow_udf

from streams.codecs import is_pydantic
from streams.errors import ConfigError, DecodeError, EncodeError
from streams.events import EventType, event_type_of
from streams.model.reasons import reason
from streams.protocols import Codec
from streams.spark.typed import schemas
from streams.spark.typed.shapes import DECIMAL, Mapping, Scalar, Sequence, Shape, Structure, column_type

_ARROW: Final = {
    "str": pa.string(), "uuid": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(),
    "bytes": pa.binary(), "datetime": pa.timestamp("us", "UTC"), "local_datetime": pa.timestamp("us"),
    "date": pa.date32(), "decimal": pa.decimal128(DECIMAL.precision, DECIMAL.scale),
}  # fmt: skip
_AS_THEY_ARE: Final = (bytes, bytearray, dt.datetime, dt.date)
_UPCAST: Final = "struct<value: binary, error: string>"


class ImportPath(msgspec.Struct, frozen=True):
    """A class by the place it is imported from. Raises ``ConfigError`` for classes that have none."""

    module: str
    name: str

    @staticmethod
    def of(kind: type, needed_for: str) -> ImportPath:
        if kind.__module__ == "__main__" or "<" in kind.__qualname__:
            raise ConfigError(
                f"{kind.__name__}: {needed_for} run in Python on the workers, which import the class; "
                f"{kind.__module__}.{kind.__qualname__} cannot be imported: move it to the top of a module"
            )
        return ImportPath(kind.__module__, kind.__qualname__)

    def load(self) -> Any:
        """The class, on a worker."""
        try:
            found: Any = import_module(self.module)
            for name in self.name.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.module}.{self.name} cannot be imported on the workers ({error}): install the package that has "
                f"it there, or give it by spark.sparkContext.addPyFile; their path is {sys.path}"
            ) from error
        return found


class EventReference(msgspec.Struct, frozen=True):
    """An event type as it travels to the workers."""

    path: ImportPath
    event_name: str
    version: int
    schemas: str
    """What the driver has fetched from the registry of its codec (``schemas``)."""

    @staticmethod
    def of(event: EventType[Any], needed_for: str, *, writes: bool = False) -> EventReference:
        path = ImportPath.of(event.cls, needed_for)
        return EventReference(path, event.name, event.version, schemas.of_event(event, writes=writes))

    @staticmethod
    def parse(text: str) -> EventReference:
        """Parse ``str(reference)``."""
        module, name, event_name, version, sent = msgspec.json.decode(text, type=tuple[str, str, str, int, str])
        return EventReference(ImportPath(module, name), event_name, version, sent)

    def __str__(self) -> str:
        fields = self.path.module, self.path.name, self.event_name, self.version, self.schemas
        return msgspec.json.encode(fields).decode()

    def load(self) -> EventType[Any]:
        """The event type, on a worker. Raises ``ConfigError`` when it is not there, or not the same."""
        event: EventType[Any] = event_type_of(self.path.load())
        if (event.name, event.version) != (self.event_name, self.version):
            raise ConfigError(
                f"{self.path.module}.{self.path.name} is {event!r} on the workers, but {self.event_name!r}, "
                f"version {self.version}, in the driver: install the same version of the package"
            )
        schemas.received(event, self.schemas)
        return event


@lru_cache(maxsize=256)
def _loaded(reference: EventReference) -> EventType[Any]:
    return reference.load()


def upcast(event: EventType[Any], value: Column, version: Column) -> Column:
    """A struct of ``value``, the bytes of an older version as those of the present one, and ``error``; null where
    ``value`` is."""
    reference = EventReference.of(event, "upcasters")

    def begin() -> Callable[[bytes, int], bytes]:
        known = _loaded(reference)
        return lambda data, number: known.encode(known.decode(data, number))

    return _converted(begin, pa.binary(), _UPCAST, value, version)


def decode_event(event: EventType[Any], shape: Structure, value: Column, version: Column) -> Column:
    """A struct of ``value``, the event's columns, and ``error``; null where ``value`` is. The version's rules are the
    event type's."""
    reference = EventReference.of(event, f"codecs of one's own ({type(event._codec).__name__})")

    def begin() -> Callable[[bytes, int], Any]:
        known = _loaded(reference)
        return lambda data, number: plain(known.decode(data, number), shape, "")

    return _converted(begin, arrow_type(shape), _with_error(shape), value, version)


def decode_value(codec: Codec[Any], shape: Shape, value: Column) -> Column:
    """A struct of ``value`` and ``error``, by any codec that can be pickled; null where ``value`` is."""

    def begin() -> Callable[[bytes], Any]:
        return lambda data: plain(codec.decode(data), shape, "")

    return _converted(begin, arrow_type(shape), _with_error(shape), value)


def _converted(begin: Callable[[], Callable[..., Any]], kind: Any, spark: t.DataType | str, *columns: Column) -> Column:
    """Convert the rows of ``columns`` by the function that ``begin`` makes on the worker, where the class is loaded: a
    struct of value and error, null where the first column is."""
    struct = pa.struct([pa.field("value", kind), pa.field("error", pa.string())])

    def run(values: pa.Array, *more: pa.Array) -> pa.Array:
        if values.null_count == len(values):
            return pa.nulls(len(values), struct)
        return pa.array(list(_rows(begin(), values, *more)), struct)

    return _udf(run, spark)(*columns)


def _rows(convert: Callable[..., Any], values: pa.Array, *more: pa.Array) -> Iterator[dict[str, Any] | None]:
    for data, *others in zip(values.to_pylist(), *(column.to_pylist() for column in more), strict=True):
        if data is None:
            yield None
            continue
        try:
            yield {"value": convert(data, *others), "error": None}
        except DecodeError as error:
            yield {"value": None, "error": str(error)}
        except EncodeError as error:
            yield {"value": None, "error": f"the upcasters made what cannot be written: {error}"}


def encode_event(event: EventType[Any], row: Column) -> Column:
    """The bytes of the event whose fields, under their names on the wire, are those of the struct ``row``. A row that
    makes no event fails the job."""
    reference = EventReference.of(event, f"codecs of one's own ({type(event._codec).__name__})", writes=True)

    def encoded(rows: pa.Array) -> pa.Array:
        known = _loaded(reference)
        make = _maker(known.cls)
        found = []
        for row in rows.to_pylist(maps_as_pydicts="strict"):
            try:
                value = make(row)
            except Exception as error:
                raise EncodeError(f"cannot write {known.name}: {reason(error)}") from None
            found.append(known.encode(value))
        return pa.array(found, pa.binary())

    return _udf(encoded, "binary")(row)


def _udf(function: Callable[..., Any], kind: t.DataType | str) -> Callable[..., Column]:
    return cast(Callable[..., Column], cast(Any, arrow_udf)(function, kind))


def _maker(cls: type) -> Callable[[dict[str, Any]], Any]:
    if is_pydantic(cls):
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_python
    return lambda row: msgspec.convert(row, cls, builtin_types=_AS_THEY_ARE)


# ------------------------------------------------------------------------------------------------ objects to Arrow


def arrow_type(shape: Shape) -> Any:
    """The Arrow type that Spark takes for ``column_type(shape)``."""
    match shape:
        case Scalar():
            return _ARROW[shape.kind]
        case Sequence():
            return pa.list_(arrow_type(shape.item))
        case Mapping():
            return pa.map_(pa.string(), arrow_type(shape.value))
        case Structure():
            return pa.struct([pa.field(field.name, arrow_type(field.shape)) for field in shape.fields])


def plain(value: Any, shape: Shape, path: str) -> Any:
    """A decoded value as ``pa.array`` takes it. Raises ``DecodeError`` (field named) for what the column cannot hold
    exactly."""
    if value is None or value is msgspec.UNSET:
        if value is None and not shape.nullable:
            raise DecodeError(f"null in {path or 'the value'}")
        return None
    match shape:
        case Scalar():
            return _scalar(value, shape, path)
        case Sequence():
            return [plain(item, shape.item, f"{path}[]") for item in value]
        case Mapping():
            return [
                (_text(name, f"{path}{{}}"), plain(item, shape.value, f"{path}{{}}")) for name, item in value.items()
            ]
        case Structure():
            parts = value if isinstance(value, tuple) else [getattr(value, field.name) for field in shape.fields]
            return {
                field.name: plain(part, field.shape, f"{path}.{field.name}" if path else field.name)
                for part, field in zip(parts, shape.fields, strict=True)
            }


def _scalar(value: Any, shape: Scalar, path: str) -> Any:
    if isinstance(value, enum.Enum):
        value = value.value
    match shape.kind:
        case "str" if not value.isascii():
            return _text(value, path)
        case "int" if not -(2**63) <= value < 2**63:
            raise DecodeError(f"{path}: integer of more than 64 bits")
        case "decimal":
            return _decimal(value, path)
        case "uuid":
            return str(value) if isinstance(value, uuid.UUID) else value
        case "datetime":
            return _instant(value, path)
        case _:
            return value


def _instant(value: dt.datetime, path: str) -> dt.datetime:
    if value.tzinfo is None:
        return value.replace(tzinfo=dt.UTC)
    try:
        return value.astimezone(dt.UTC)
    except OverflowError:
        raise DecodeError(f"{path}: a time that is outside of the years 1 to 9999 in UTC") from None


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DecodeError(f"{path}: half of a surrogate pair") from None
    return value


def _decimal(value: Decimal, path: str) -> Decimal:
    sign, digits, exponent = value.as_tuple()
    if isinstance(exponent, int):
        zeros = len(digits) - len("".join(map(str, digits)).rstrip("0"))
        places = max(0, -(exponent + zeros))
        if not any(digits):
            return Decimal(0)
        if places <= DECIMAL.scale and len(digits) + exponent <= DECIMAL.precision - DECIMAL.scale:
            cut = max(0, -exponent - DECIMAL.scale)
            return Decimal((sign, digits[: len(digits) - cut], exponent + cut))
    raise DecodeError(f"{path}: not a decimal of at most 29 digits and 9 places")


def _with_error(shape: Shape) -> t.StructType:
    return t.StructType([t.StructField("value", nullable(column_type(shape))), t.StructField("error", t.StringType())])


def nullable(kind: t.DataType) -> t.DataType:
    """The same type with every part nullable: where there is an error there is no value."""
    match kind:
        case t.StructType():
            return t.StructType([t.StructField(field.name, nullable(field.dataType)) for field in kind.fields])
        case t.ArrayType():
            return t.ArrayType(nullable(kind.elementType))
        case t.MapType():
            return t.MapType(nullable(kind.keyType), nullable(kind.valueType))
        case _:
            return kind
