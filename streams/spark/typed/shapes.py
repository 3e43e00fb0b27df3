"""The shape of an event class on the wire, as a small tree: the one description that schemas, encoding and decoding
share. And its Spark types: the columns a user sees, and the slightly different ones that JSON is parsed into.

Nodes follow the JSON that ``streams.events`` writes: names as encoded (aliases, ``rename=``), bytes in base64, decimals
and UUIDs as text, times in ISO 8601. What JSON and Spark cannot both express exactly is refused here, by name of the
field, before any job runs.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, get_args, get_origin

import msgspec
from msgspec import inspect
from pyspark.sql import types as t

from streams.codecs import codec_for, is_pydantic
from streams.errors import ConfigError
from streams.model.losses import losses_of, refuse

ScalarKind = Literal["str", "int", "float", "bool", "bytes", "datetime", "local_datetime", "date", "decimal", "uuid"]

_SCALARS: Final[dict[type[inspect.Type], ScalarKind]] = {
    inspect.StrType: "str",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.BoolType: "bool",
    inspect.BytesType: "bytes",
    inspect.ByteArrayType: "bytes",
    inspect.DateType: "date",
    inspect.DecimalType: "decimal",
    inspect.UUIDType: "uuid",
}
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
_TICK_NS: Final = 2_000
"""Longer than a clock of Python's ``datetime`` stands still."""
_LISTS = (inspect.ListType, inspect.SetType, inspect.FrozenSetType, inspect.VarTupleType)


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """One value. ``allowed`` holds the values of an enum or a ``Literal``, all text or all integers; ``zoned``: a
    ``datetime`` that must say its zone."""

    kind: ScalarKind
    nullable: bool = False
    zoned: bool = False
    allowed: tuple[str, ...] | tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """A list, set or tuple of any length. ``unique``: a set, which has nothing twice."""

    item: Shape
    unique: bool = False
    nullable: bool = False


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """A dict with text keys."""

    value: Shape
    nullable: bool = False


@dataclass(frozen=True, kw_only=True)
class Field:
    """``name`` in Python and in the DataFrame, ``wire`` in JSON. ``default`` is JSON text, ``None`` when there is none
    that all records share."""

    name: str
    wire: str
    shape: Shape
    required: bool
    default: str | None


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A class with fields. ``tag`` is the constant field by which msgspec distinguishes union members."""

    name: str
    fields: tuple[Field, ...]
    tag: tuple[str, str | int] | None = None
    nullable: bool = False


Shape = Scalar | Sequence | Mapping | Structure


def shape_of(cls: type) -> Structure:
    """The shape of an event class; raises ``ConfigError`` (field named) for what Spark cannot hold exactly."""
    try:
        return _structure(cls, cls.__name__, ())
    except TypeError as error:  # of msgspec, which says so itself
        raise ConfigError(f"{cls.__name__}: {error}") from error


def value_shape(type_: Any) -> Shape:
    """The shape of a key or value of a store: any type, and tuples of ``str``, ``bytes`` and ``int`` as structures with
    fields ``_1``, ``_2`` ... Raises ``ConfigError``."""
    elements = get_args(type_)
    if get_origin(type_) is tuple and all(element in (str, bytes, int) for element in elements):
        kinds: dict[Any, ScalarKind] = {str: "str", bytes: "bytes", int: "int"}
        fields = tuple(
            Field(name=f"_{at}", wire=f"_{at}", shape=Scalar(kind=kinds[element]), required=True, default=None)
            for at, element in enumerate(elements, 1)
        )
        return Structure(name="tuple", fields=fields)
    name = getattr(type_, "__name__", str(type_))
    return _structure(type_, name, ()) if is_pydantic(type_) else _shape(inspect.type_info(type_), name, ())


def _structure(cls: type, path: str, above: tuple[type, ...]) -> Structure:
    if cls in above:
        raise ConfigError(f"{path}: {cls.__name__} contains itself; Spark has no recursive types")
    if is_pydantic(cls):
        return _pydantic(cls, path, above)
    info = inspect.type_info(cls)
    if not isinstance(info, inspect.StructType | inspect.DataclassType):
        raise ConfigError(f"{path}: {cls.__name__} is no msgspec.Struct, dataclass or pydantic model")
    if not above:
        refuse(cls, path, losses_of(info), ())  # as codec_for does, also where an event's own codec allows them
    tag = None
    if isinstance(info, inspect.StructType):
        if info.array_like:
            raise ConfigError(
                f"{path}: {cls.__name__} is array_like; only structs written as objects have column names"
            )
        if info.tag_field is not None and info.tag is not None:
            tag = (info.tag_field, info.tag)
    fields = []
    for found in info.fields:
        shape = _shape(found.type, f"{path}.{found.name}", (*above, cls))
        default = None
        if found.default is not msgspec.NODEFAULT:
            default = _json(found.default, f"{path}.{found.name}")
        elif found.default_factory is not msgspec.NODEFAULT:
            default = _made_by(found.default_factory, f"{path}.{found.name}")
        elif not found.required:
            default = "null"  # UNSET: the field is not there, and a column without a value is null
        fields.append(
            Field(name=found.name, wire=found.encode_name, shape=shape, required=found.required, default=default)
        )
    return _told_apart(Structure(name=cls.__name__, fields=tuple(fields), tag=tag), path)


def _pydantic(cls: type, path: str, above: tuple[type, ...]) -> Structure:
    described: dict[str, Any] | None = getattr(cls, "model_fields", None)
    if described is None:
        raise ConfigError(f"{path}: {cls.__name__} is a pydantic dataclass; make it a model or a plain dataclass")
    codec_for(cls)  # which refuses fields that do not come back, also where an event's own codec allows them
    fields = []
    for name, info in described.items():
        if info.serialization_alias != info.validation_alias:
            raise ConfigError(f"{path}.{name}: is read by other names, too; Spark knows one")
        required = bool(info.is_required())
        shape = _shape(inspect.type_info(info.annotation), f"{path}.{name}", (*above, cls))
        default = None
        if not required:
            default = _made_by(partial(info.get_default, call_default_factory=True), f"{path}.{name}")
        wire = info.serialization_alias or name
        fields.append(Field(name=name, wire=wire, shape=shape, required=required, default=default))
    return _told_apart(Structure(name=cls.__name__, fields=tuple(fields)), path)


def _told_apart(shape: Structure, path: str) -> Structure:
    tag = [] if shape.tag is None else [shape.tag[0]]
    for names in ([field.name for field in shape.fields], [*(field.wire for field in shape.fields), *tag]):
        if len({name.lower() for name in names}) != len(names):
            raise ConfigError(f"{path}: two fields differ only in case, which Spark ignores")
    return shape


def _json(value: Any, path: str) -> str:
    def of_model(inner: Any) -> Any:
        return inner.model_dump(mode="json", by_alias=True)

    if not _fits(msgspec.to_builtins(value, enc_hook=of_model, str_keys=True)):
        raise ConfigError(f"{path}: the default {value!r} is none of a column's (NaN, infinite, beyond 64 bits)")
    return msgspec.json.encode(value, enc_hook=of_model).decode()


def _fits(value: Any) -> bool:
    """Check whether the numbers in it are such as JSON and columns have."""
    match value:
        case float():
            return math.isfinite(value)
        case int():
            return -(2**63) <= value < 2**63
        case dict():
            return all(map(_fits, value.values()))
        case list() | tuple() | set() | frozenset():
            return all(map(_fits, value))
        case _:
            return True


def _made_by(factory: Callable[[], Any], path: str) -> str | None:
    """Return the value that a factory makes; ``None`` when that is another value each time, as a UUID or the time of
    day: one of them in all records would be wrong in all of them."""
    made = _json(factory(), path)
    begun = time.time_ns()
    while time.time_ns() - begun < _TICK_NS:
        pass
    return made if _json(factory(), path) == made else None


def _shape(info: Any, path: str, above: tuple[type, ...]) -> Shape:
    nullable = False
    if isinstance(info, inspect.UnionType):
        members = [member for member in info.types if not isinstance(member, inspect.NoneType)]
        nullable = len(members) < len(info.types)
        if len(members) != 1:
            names = ", ".join(type(member).__name__.removesuffix("Type") for member in members)
            raise ConfigError(f"{path}: a union of {names} has no single column type; make it one type, or two events")
        info = members[0]
    if isinstance(info, inspect.LiteralType) and None in info.values:
        nullable = True
        info = inspect.LiteralType(tuple(value for value in info.values if value is not None))
    if (kind := _SCALARS.get(type(info))) is not None:
        if kind == "bytes" and any(is_pydantic(cls) for cls in above):
            raise ConfigError(f"{path}: pydantic writes bytes as text, not base64; use a msgspec.Struct, or str")
        return Scalar(kind=kind, nullable=nullable)
    if isinstance(info, inspect.DateTimeType):
        # Without a promise about the zone it is an instant: Spark's timestamp is one, and so is what is written.
        kind = "local_datetime" if info.tz is False else "datetime"
        return Scalar(kind=kind, nullable=nullable, zoned=info.tz is True)
    if isinstance(info, inspect.EnumType):
        return _choice([member.value for member in info.cls], path, nullable)
    if isinstance(info, inspect.LiteralType):
        return _choice(list(info.values), path, nullable)
    if isinstance(info, _LISTS):
        unique = isinstance(info, inspect.SetType | inspect.FrozenSetType)
        return Sequence(item=_shape(info.item_type, f"{path}[]", above), unique=unique, nullable=nullable)
    if isinstance(info, inspect.DictType):
        if not isinstance(info.key_type, inspect.StrType):
            raise ConfigError(f"{path}: a dict in JSON has text keys; make it dict[str, ...]")
        return Mapping(value=_shape(info.value_type, f"{path}{{}}", above), nullable=nullable)
    cls = getattr(info, "cls", None)
    if isinstance(cls, type) and not issubclass(cls, enum.Enum):
        inner = _structure(cls, path, above)
        return Structure(name=inner.name, fields=inner.fields, tag=inner.tag, nullable=nullable)
    raise ConfigError(
        f"{path}: {type(info).__name__.removesuffix('Type')} has no column type; known are str, int, float, bool, "
        "bytes, "
        "datetime, date, Decimal, UUID, enums, Optional, lists, dicts with text keys, and nested classes"
    )


def _choice(values: list[Any], path: str, nullable: bool) -> Scalar:
    if values and all(isinstance(value, str) for value in values):
        return Scalar(kind="str", nullable=nullable, allowed=tuple(str(value) for value in values))
    if values and all(type(value) is int or isinstance(value, enum.IntEnum) for value in values):
        return Scalar(kind="int", nullable=nullable, allowed=tuple(int(value) for value in values))
    raise ConfigError(f"{path}: the values of an enum or Literal must be all text or all integers")


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
