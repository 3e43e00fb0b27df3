"""Events as JSON by Spark expressions, so that no row passes through Python.

``to_json`` alone does not mean what ``streams.events`` means: it writes NaN as text, and null where the class wants a
value. So the expression comes with its *problem*: null when the class could read the row back, else a sentence that
names the field.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql import types as t

from streams.errors import ConfigError
from streams.spark.typed.json_decoding import first, inside
from streams.spark.typed.shapes import Mapping, Scalar, Sequence, Shape, Structure, column_type

_WRITE: Final = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_INTEGERS = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
_TAKEN: Final[dict[str, tuple[type[t.DataType], ...]]] = {
    "str": (t.StringType,),
    "uuid": (t.StringType,),
    "int": _INTEGERS,
    "float": (t.DoubleType, t.FloatType, t.ByteType, t.ShortType, t.IntegerType),  # bigint does not fit a double
    "bool": (t.BooleanType,),
    "bytes": (t.BinaryType,),
    "datetime": (t.TimestampType,),
    "local_datetime": (t.TimestampNTZType,),
    "date": (t.DateType,),
    "decimal": (t.DecimalType, *_INTEGERS),
}


def to_json(shape: Structure, columns: t.StructType) -> Column:
    """JSON bytes of an event whose fields are the columns of a DataFrame with the schema ``columns``.

    Rows that the class could not read back (null in a field that is not ``Optional``, NaN, a value outside of its
    enum) fail the job with a message that names the field. Raises ``ConfigError`` for a missing column or one of
    another type.
    """
    present = fitted(shape, columns, shape.name)
    by_name = {column.name: column for column in columns.fields}
    fields, problems = [], []
    for field in present.fields:
        value = f.col(f"`{field.name}`")
        fields.append(encoded(value, field.shape).alias(field.wire))
        may_be_null = by_name[field.name].nullable
        problems.append(_unwritable(value, field.shape, may_be_null, f"{shape.name}.{field.name}"))
    json = f.to_json(f.struct(*_tagged(shape, fields)), _WRITE).cast("binary")
    found = first(problems)
    if found is None:
        return json
    return f.when(found.isNull(), json).otherwise(f.raise_error(f.concat(f.lit("cannot write "), found)).cast("binary"))


def fitted(shape: Structure, columns: t.StructType, path: str) -> Structure:
    """The shape without the fields that have no column: those must have a default, which the reader will fill in."""
    by_name = {column.name: column for column in columns.fields}
    found = []
    for field in shape.fields:
        column = by_name.get(field.name)
        if column is not None:
            inner = _fitted_shape(field.shape, column.dataType, f"{path}.{field.name}")
            found.append(dataclasses.replace(field, shape=inner))
        elif field.required:
            raise ConfigError(f"{path}.{field.name} has no column; there are {', '.join(by_name) or 'none'}")
    if not found:
        raise ConfigError(f"{path} has no field that is a column of the DataFrame")
    return dataclasses.replace(shape, fields=tuple(found))


def _fitted_shape(shape: Shape, column: t.DataType, path: str) -> Shape:
    match shape, column:
        case Scalar(), _ if isinstance(column, _TAKEN[shape.kind]):
            return shape
        case Sequence(), t.ArrayType():
            return dataclasses.replace(shape, item=_fitted_shape(shape.item, column.elementType, f"{path}[]"))
        case Mapping(), t.MapType() if isinstance(column.keyType, t.StringType):
            return dataclasses.replace(shape, value=_fitted_shape(shape.value, column.valueType, f"{path}{{}}"))
        case Structure(), t.StructType():
            return fitted(shape, column, path)
        case _:
            raise ConfigError(
                f"{path} is {column_type(shape).simpleString()}, but the column is {column.simpleString()}; cast "
                "the column"
            )


def encoded(value: Column, shape: Shape) -> Column:
    """A column in the form and under the names that JSON has it."""
    match shape:
        case Scalar(kind="decimal"):
            return value.cast("string")
        case Scalar(kind="float"):
            return value.cast("double")
        case Scalar():
            return value
        case Sequence():
            return f.transform(value, lambda item: encoded(item, shape.item))
        case Mapping():
            return f.transform_values(value, lambda _, item: encoded(item, shape.value))
        case Structure():
            fields = [encoded(value[field.name], field.shape).alias(field.wire) for field in shape.fields]
            return f.when(value.isNotNull(), f.struct(*_tagged(shape, fields)))


def _tagged(shape: Structure, fields: list[Column]) -> list[Column]:
    return fields if shape.tag is None else [f.lit(shape.tag[1]).alias(shape.tag[0]), *fields]


def _unwritable(value: Column, shape: Shape, may_be_null: bool, path: str) -> Column | None:
    found: list[Column | None] = []
    if may_be_null and not shape.nullable:
        found.append(f.when(value.isNull(), f.lit(f"{path}: null, but it is not Optional")))
    match shape:
        case Scalar(kind="float"):
            infinite = value.cast("double").isin(float("inf"), float("-inf"))
            found.append(
                f.when(f.isnan(value.cast("double")) | infinite, f.lit(f"{path}: NaN or infinite, not in JSON"))
            )
        case Scalar(kind="datetime" | "local_datetime" | "date"):
            found.append(f.when(~f.year(value).between(1, 9999), f.lit(f"{path}: year outside of 1 to 9999")))
    found.append(inside(value, shape, path, lambda inner, below, name: _unwritable(inner, below, True, name)))
    return first(found)
