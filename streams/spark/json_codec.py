"""JSON of event classes as Spark expressions, both ways, so that no row passes through Python.

``to_json`` and ``from_json`` alone do not mean what ``streams.events`` means: ``to_json`` writes milliseconds, NaN as
text and missing fields where the class wants a value; ``from_json`` gives null for what is missing or broken and says
nothing. So every expression here comes with a second one, its *problem*: null when all is well, else a sentence that
names the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql import types as t

from streams.errors import ConfigError
from streams.spark.schemas import DECIMAL, column_type, wire_type
from streams.spark.shapes import Field, Mapping, Scalar, Sequence, Shape, Structure

CORRUPT: Final = "__corrupt__"
"""Where ``from_json`` puts the text of what it cannot read. Never seen by users."""

_WRITE: Final = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_READ: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": CORRUPT,
    "timeZone": "UTC",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
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
_MORE_THAN_9_PLACES = r"\.\d{9}\d*[1-9]"


# ------------------------------------------------------------------------------------------------ writing


def to_json(shape: Structure, columns: t.StructType) -> Column:
    """JSON bytes of an event whose fields are the columns of a DataFrame with the schema ``columns``.

    Rows that the class could not read back (null in a field that is not ``Optional``, NaN, a value outside of its
    enum) fail the job with a message that names the field. Raises ``ConfigError`` for a missing column or one of
    another type.
    """
    fitted = _fitted(shape, columns, shape.name)
    by_name = {column.name: column for column in columns.fields}
    fields, problems = [], []
    for field in fitted.fields:
        value = f.col(f"`{field.name}`")
        fields.append(_encoded(value, field.shape).alias(field.wire))
        may_be_null = by_name[field.name].nullable
        problems.append(_unwritable(value, field.shape, may_be_null, f"{shape.name}.{field.name}"))
    json = f.to_json(f.struct(*_tagged(shape, fields)), _WRITE).cast("binary")
    found = _first(problems)
    if found is None:
        return json
    return f.when(found.isNull(), json).otherwise(f.raise_error(f.concat(f.lit("cannot write "), found)).cast("binary"))


def _fitted(shape: Structure, columns: t.StructType, path: str) -> Structure:
    """The shape without the fields that have no column: those must have a default, which the reader will fill in."""
    by_name = {column.name: column for column in columns.fields}
    found = []
    for field in shape.fields:
        column = by_name.get(field.name)
        if column is not None:
            fitted = _fitted_shape(field.shape, column.dataType, f"{path}.{field.name}")
            found.append(dataclasses.replace(field, shape=fitted))
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
            return _fitted(shape, column, path)
        case _:
            raise ConfigError(
                f"{path} is {column_type(shape).simpleString()}, but the column is {column.simpleString()}; cast "
                "the column"
            )


def _encoded(value: Column, shape: Shape) -> Column:
    match shape:
        case Scalar(kind="decimal"):
            return value.cast("string")
        case Scalar(kind="float"):
            return value.cast("double")
        case Scalar():
            return value
        case Sequence():
            return f.transform(value, lambda item: _encoded(item, shape.item))
        case Mapping():
            return f.transform_values(value, lambda _, item: _encoded(item, shape.value))
        case Structure():
            fields = [_encoded(value[field.name], field.shape).alias(field.wire) for field in shape.fields]
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
    found.append(_inner(value, shape, path, lambda inner, below, name: _unwritable(inner, below, True, name)))
    return _first(found)


# ------------------------------------------------------------------------------------------------ reading


def from_json(value: Column, shape: Structure) -> Column:
    """The struct that JSON text is parsed into: names of the wire, everything nullable, and ``CORRUPT``."""
    wire = wire_type(shape)
    assert isinstance(wire, t.StructType)
    return f.from_json(value, t.StructType([*wire.fields, t.StructField(CORRUPT, t.StringType())]), _READ)


def decoded(parsed: Column, shape: Structure) -> Column:
    """The event's struct, under Python's names and with defaults filled in, from what ``from_json`` gave."""
    return f.struct(*[_field(parsed, field).alias(field.name) for field in shape.fields])


def unreadable(parsed: Column, shape: Structure) -> Column:
    """What is wrong with a parsed event: a sentence, or null."""
    missing = _first([_missing(parsed, field, field.name) for field in shape.fields])
    corrupt = f.when(
        parsed.isNull() | parsed[CORRUPT].isNotNull(), f.lit("corrupt: not a JSON object, or a field of another type")
    )
    return corrupt if missing is None else f.coalesce(corrupt, missing)


def _missing(parent: Column, field: Field, path: str) -> Column | None:
    value = parent[field.wire]
    absent = None
    if not field.shape.nullable and field.default is None:
        absent = f.when(value.isNull(), f.lit(f"missing field: {path}"))
    return _first([absent, _invalid(value, field.shape, path)])


def _invalid(value: Column, shape: Shape, path: str) -> Column | None:
    """What is wrong with a value that is there."""
    found: list[Column | None] = []
    match shape:
        case Scalar(kind="decimal"):
            decimal = value.try_cast(DECIMAL)
            rounded = value.rlike(_MORE_THAN_9_PLACES) | (
                value.rlike("[eE]-") & (value.try_cast("double") != decimal.cast("double"))
            )
            found.append(
                f.when(
                    value.isNotNull() & (decimal.isNull() | rounded),
                    f.lit(f"{path}: not a decimal of at most 29 digits and 9 places"),
                )
            )
        case Structure():
            inside = _first([_missing(value, field, f"{path}.{field.name}") for field in shape.fields])
            return None if inside is None else f.when(value.isNotNull(), inside)

    def item(inner: Column, below: Shape, name: str) -> Column | None:
        null = None if below.nullable else f.when(inner.isNull(), f.lit(f"null in {name}"))
        return _first([null, _invalid(inner, below, name)])

    found.append(_inner(value, shape, path, item))
    return _first(found)


def _field(parent: Column, field: Field) -> Column:
    value = _decoded(parent[field.wire], field.shape)
    if field.shape.nullable or field.default is None:
        return value
    wire = t.StructType([t.StructField("v", wire_type(field.shape))])
    default = f.from_json(f.lit(f'{{"v":{field.default}}}'), wire, _READ)["v"]
    return f.coalesce(value, _decoded(default, field.shape))


def _decoded(value: Column, shape: Shape) -> Column:
    match shape:
        case Scalar(kind="decimal"):
            return value.try_cast(DECIMAL)
        case Sequence() if not _plain(shape.item):
            return f.transform(value, lambda item: _decoded(item, shape.item))
        case Mapping() if not _plain(shape.value):
            return f.transform_values(value, lambda _, item: _decoded(item, shape.value))
        case Structure():
            fields = [_field(value, field).alias(field.name) for field in shape.fields]
            return f.when(value.isNotNull(), f.struct(*fields))
        case _:
            return value


# ------------------------------------------------------------------------------------------------ both


def _inner(
    value: Column, shape: Shape, path: str, problem: Callable[[Column, Shape, str], Column | None]
) -> Column | None:
    """What is wrong inside of a value: its elements, its fields, or that it is none of the allowed ones."""
    match shape:
        case Scalar(allowed=allowed) if allowed:
            return f.when(~value.isin(*allowed), f.lit(f"{path}: not one of {', '.join(map(str, allowed))}"))
        case Sequence():
            return _element(value, shape.item, f"{path}[]", problem)
        case Mapping():
            return _element(f.map_values(value), shape.value, f"{path}{{}}", problem)
        case Structure():
            found = _first([problem(value[field.name], field.shape, f"{path}.{field.name}") for field in shape.fields])
            return None if found is None else f.when(value.isNotNull(), found)
        case _:
            return None


def _element(
    items: Column, shape: Shape, path: str, problem: Callable[[Column, Shape, str], Column | None]
) -> Column | None:
    if problem(f.lit(None), shape, path) is None:
        return None

    def sentence(item: Column) -> Column:
        found = problem(item, shape, path)
        return f.lit(None).cast("string") if found is None else found

    return f.get(f.filter(f.transform(items, sentence), lambda text: text.isNotNull()), 0)


def _first(problems: list[Column | None]) -> Column | None:
    found = [problem for problem in problems if problem is not None]
    return f.coalesce(*found) if found else None


def _plain(shape: Shape) -> bool:
    return isinstance(shape, Scalar) and shape.kind != "decimal"
