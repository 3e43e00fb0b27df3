"""Event classes as Spark schemas: the columns a user sees, and the slightly different ones that JSON is parsed into."""

from __future__ import annotations

from typing import Final

from pyspark.sql import types as t

from streams.spark.shapes import Mapping, Scalar, ScalarKind, Sequence, Shape, Structure, shape_of

DECIMAL: Final = t.DecimalType(38, 9)
"""29 digits before the point and 9 after it. A decimal that does not fit is an error, never rounded."""

_COLUMN: Final[dict[ScalarKind, t.DataType]] = {
    "str": t.StringType(),
    "int": t.LongType(),
    "float": t.DoubleType(),
    "bool": t.BooleanType(),
    "bytes": t.BinaryType(),
    "datetime": t.TimestampType(),
    "local_datetime": t.TimestampNTZType(),
    "date": t.DateType(),
    "decimal": DECIMAL,
    "uuid": t.StringType(),
}


def schema_of(cls: type) -> t.StructType:
    """The schema of an event class: one column a field, under its Python name.

    ``str`` string, ``int`` bigint, ``float`` double, ``bool`` boolean, ``bytes`` binary, ``datetime`` timestamp
    (``timestamp_ntz`` when annotated ``Meta(tz=False)``), ``date`` date, ``Decimal`` decimal(38, 9), UUIDs and enums
    of text string, lists array, ``dict[str, ...]`` map, nested classes struct. Columns of ``Optional`` fields,
    and of those that may be ``UNSET``, are nullable. Raises ``ConfigError`` (field named) for other types.
    """
    return _struct(shape_of(cls))


def _struct(shape: Structure) -> t.StructType:
    return t.StructType(
        [t.StructField(f.name, column_type(f.shape), f.shape.nullable or f.default == "null") for f in shape.fields]
    )


def column_type(shape: Shape) -> t.DataType:
    """The Spark type of a shape, as users see it."""
    match shape:
        case Scalar():
            return _COLUMN[shape.kind]
        case Sequence():
            return t.ArrayType(column_type(shape.item), shape.item.nullable)
        case Mapping():
            return t.MapType(t.StringType(), column_type(shape.value), shape.value.nullable)
        case Structure():
            return _struct(shape)


def wire_type(shape: Shape) -> t.DataType:
    """The Spark type that JSON of a shape is parsed into: names of the wire, all nullable.

    Times, bytes and decimals are still text: the JVM's parser takes more than ISO 8601 and base64 have, and cannot say
    what it rounded.
    """
    match shape:
        case Scalar():
            as_text = shape.kind in ("decimal", "datetime", "local_datetime", "date", "bytes")
            return t.StringType() if as_text else _COLUMN[shape.kind]
        case Sequence():
            return t.ArrayType(wire_type(shape.item), True)
        case Mapping():
            return t.MapType(t.StringType(), wire_type(shape.value), True)
        case Structure():
            fields = [t.StructField(f.wire, wire_type(f.shape), True) for f in shape.fields]
            if shape.tag is not None:
                kind = t.StringType() if isinstance(shape.tag[1], str) else t.LongType()
                fields.append(t.StructField(shape.tag[0], kind))
            return t.StructType(fields)
