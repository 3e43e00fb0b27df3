"""JSON to values by Spark expressions, as strict as ``streams.events`` is, so that no row passes through Python.

``from_json`` alone does not mean what ``streams.events`` means: it gives null for what is missing or broken and says
nothing, takes a number for text and ``"12:30"`` for a time of today, and stops reading after the first value. So every
value comes with its *problem*: null when all is well, else a sentence that names the field.

What text cannot be trusted to be is parsed as text and looked at afterwards (times, UUIDs, decimals). What
``from_json`` has lost (was this text a number? was this null, or missing?) is looked up in the JSON again, as a
variant: only for the few rows and fields where it can matter, because a ``when`` runs no branch that it does not take.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql import types as t

from streams.spark.typed.shapes import (
    DECIMAL,
    Field,
    Mapping,
    Scalar,
    Sequence,
    Shape,
    Structure,
    column_type,
    wire_type,
)

CORRUPT: Final = "__corrupt__"
"""Where ``from_json`` puts the text of what it cannot read. Never seen by users."""
_ROOT: Final = f"v{uuid.uuid4().hex}"
"""Where the text is put. Not to be known: a text that closes it and begins it again would be read from there."""

_READ: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": CORRUPT,
    "timeZone": "UTC",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}
# "\z", not "$", which in Java is also before a line break at the end.
_PLAIN_DECIMAL = r"^-?\d+(\.\d{1,9})?\z"
_BASE64 = r"^[A-Za-z0-9+/]*={0,2}\z"
_UUID: Final = r"^[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}\z"
_NUMBER = re.compile(r"[-\[{0-9]|true$|false$")
_DECIMAL = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_DATE = r"^(?!0000)\d{4}-\d\d-\d\d\z"
_LOCAL = r"^(?!0000)\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?\z"
_ZONED = r"^(?!0000)\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:?\d\d)\z"
_TIME = _ZONED.removesuffix("\\z") + "?\\z"
_LONE_SURROGATE = (
    r"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)

Problem = Callable[[Column, Shape, str], Column | None]
"""(value, its shape, its path) to a sentence or null; ``None`` when nothing can be wrong."""


def from_json(text: Column, shape: Shape) -> Column:
    """Parse JSON text, for ``unreadable`` and ``decoded``. Give it a column of its own in a ``select``: they look at it
    many times.

    The text is wrapped into an array that goes on after it: only so does the parser see what follows the value.
    """
    wrapped = f.concat(f.lit(f'{{"{_ROOT}":['), text, f.lit(",null]}"))
    wire = t.StructType([t.StructField(_ROOT, t.ArrayType(wire_type(shape))), t.StructField(CORRUPT, t.StringType())])
    return f.from_json(wrapped, wire, _READ)


def decoded(parsed: Column, text: Column, shape: Shape) -> Column:
    """The value under Python's names and with defaults filled in, from what ``from_json`` gave; null when it has a
    problem that is no field's."""
    return _decoded(f.get(parsed[_ROOT], 0), shape, _Source(text, "$"))


def unreadable(parsed: Column, text: Column, shape: Shape) -> Column:
    """Return the fault of the JSON text: a sentence, or null. ``text`` itself must not be null."""
    root = f.get(parsed[_ROOT], 0)
    what = "a JSON object" if isinstance(shape, Structure) else "JSON of its type"
    broken = parsed.isNull() | parsed[CORRUPT].isNotNull() | (f.size(parsed[_ROOT]) != 2)
    if not shape.nullable:
        broken = broken | root.isNull()
    problems = [
        f.when(broken, f.lit(f"corrupt: not {what}, or a field of another type")),
        f.when(~f.is_valid_utf8(text), f.lit("corrupt: not UTF-8")),
        f.when(text.contains("\\u") & text.rlike(_LONE_SURROGATE), f.lit("corrupt: half of a surrogate pair")),
        _invalid(root, shape, "", _Source(text, "$")),
    ]
    found = first(problems)
    assert found is not None
    return found


def in_parts(rare: Column) -> Column:
    """The same text, for a branch that is rarely taken, in a form that makes Spark generate code in parts.

    All steps of a stage become one method otherwise. With so many checks it has more than 8,000 bytes, which the JVM
    never compiles: measured, three times slower. A step with a lambda in it is not fused, and is split into methods.
    """
    return f.get(f.transform(f.array(rare), lambda text: text), 0)


# ------------------------------------------------------------------------------------------------ what from_json lost


@dataclass(frozen=True)
class _Source:
    """The place of a value in the JSON text: a variant path, for values that are not inside of a list or dict."""

    text: Column
    path: str

    def below(self, wire: str) -> _Source | None:
        if re.fullmatch(r"""[^\s.\[\]'"?$]+""", wire) is None:
            return None  # no variant path has such names
        return _Source(self.text, f"{self.path}.{wire}")

    @property
    def variant(self) -> Column:
        return f.try_variant_get(f.try_parse_json(self.text), self.path, "variant")


def _explicit_null(value: Column, source: _Source | None) -> Column | None:
    """Check whether a value that ``from_json`` gave as null stands there as null."""
    if source is None:
        return None
    return value.isNull() & source.text.contains("null") & f.coalesce(f.is_variant_null(source.variant), f.lit(False))


def _not_text(value: Column, shape: Shape, path: str, source: _Source | None) -> Column | None:
    """A sentence when text that was parsed is no text in the JSON (a number, say). Checked only where it looks so."""
    suspect = _resembles_json(value, shape)
    if source is None or suspect is None:
        return None
    variant = source.variant
    parsed = f.when(variant.isNull(), f.lit(f"{path}: text that looks like a number, in JSON with duplicate keys"))
    return f.when(suspect, f.coalesce(parsed, _other_than_text(variant, shape, path)))


def _resembles_json(value: Column, shape: Shape) -> Column | None:
    match shape:
        case Scalar() if _holds_text(shape):
            return (
                ((value >= "-") & (value < ":") & value.rlike(r"^-?\d[-+\d.eE]*$"))
                | ((value >= "[") & (value < "\\"))
                | ((value >= "{") & (value < "|"))
                | value.isin("true", "false")
            )
        case Sequence() | Mapping():
            inner = shape.item if isinstance(shape, Sequence) else shape.value
            items = value if isinstance(shape, Sequence) else f.map_values(value)
            if not _holds_text(inner):
                return None
            if isinstance(inner, Structure):
                return f.size(items) > 0
            return f.exists(items, lambda item: _or_false(_resembles_json(item, inner)))
        case _:
            return None


def _or_false(found: Column | None) -> Column:
    return f.lit(False) if found is None else f.coalesce(found, f.lit(False))


def _holds_text(shape: Shape) -> bool:
    match shape:
        case Scalar():
            if shape.allowed:
                return any(isinstance(value, str) and _NUMBER.match(value) for value in shape.allowed)
            return shape.kind in ("str", "uuid", "bytes")
        case Sequence():
            return _holds_text(shape.item)
        case Mapping():
            return _holds_text(shape.value)
        case Structure():
            return any(_holds_text(field.shape) for field in shape.fields)


def _other_than_text(variant: Column, shape: Shape, path: str) -> Column:
    nothing = f.lit(None).cast("string")
    match shape:
        case Scalar() if _holds_text(shape):
            is_text = f.schema_of_variant(variant).isin("STRING", "VOID")
            return f.when(~is_text, f.lit(f"{path}: text expected"))
        case Sequence():
            items = f.try_variant_get(variant, "$", "array<variant>")
            found = element(items, shape.item, f"{path}[]", _other_than_text)
            return nothing if found is None else found
        case Mapping():
            items = f.map_values(f.try_variant_get(variant, "$", "map<string,variant>"))
            found = element(items, shape.value, f"{path}{{}}", _other_than_text)
            return nothing if found is None else found
        case Structure():
            by_name = f.try_variant_get(variant, "$", "map<string,variant>")
            texts = [field for field in shape.fields if _holds_text(field.shape)]
            found = first(_other_than_text(by_name[field.wire], field.shape, f"{path}.{field.name}") for field in texts)
            return nothing if found is None else found
        case _:
            return nothing


# ------------------------------------------------------------------------------------------------ problems


def _missing(parent: Column, field: Field, path: str, source: _Source | None) -> Column | None:
    value = parent[field.wire]
    source = None if source is None else source.below(field.wire)
    absent = None
    if not field.shape.nullable:
        if field.default is None:
            absent = f.when(value.isNull(), f.lit(f"missing field: {path}"))
        elif (null := _explicit_null(value, source)) is not None:
            absent = f.when(null, f.lit(f"null in {path}"))
    return first([absent, _invalid(value, field.shape, path, source)])


def _invalid(value: Column, shape: Shape, path: str, source: _Source | None = None) -> Column | None:
    """Return the fault of a value that is there."""
    found: list[Column | None] = []
    match shape:
        case Scalar(kind="decimal"):
            odd = ~value.rlike(_PLAIN_DECIMAL) & (~value.rlike(_DECIMAL) | _rounded(value))
            wrong = _decoded(value, shape, None).isNull() | odd
            found.append(
                f.when(value.isNotNull() & wrong, f.lit(f"{path}: not a decimal of at most 29 digits and 9 places"))
            )
        case Scalar(kind="bytes"):
            wrong = ~value.rlike(_BASE64) | (f.length(value) % 4 != 0)
            found.append(f.when(wrong, f.lit(f"{path}: not base64")))
        case Scalar(kind="float"):
            found.append(f.when(f.abs(value) == float("inf"), f.lit(f"{path}: number out of range")))
        case Scalar(kind="datetime" | "local_datetime" | "date" as kind):
            pattern = {"datetime": _TIME, "local_datetime": _LOCAL, "date": _DATE}[kind]
            name = kind.removeprefix("local_")
            if shape.zoned:
                pattern, name = _ZONED, "datetime with a zone"
            wrong = value.isNotNull() & (~value.rlike(pattern) | _decoded(value, shape, None).isNull())
            found.append(f.when(wrong, f.lit(f"{path}: not a {name} in ISO 8601")))
        case Structure():
            under: list[Column | None] = []
            if shape.tag is not None:
                name, tag = shape.tag
                under.append(f.when(value[name] != tag, f.lit(f"{name}: not {tag}")))
            under += [
                _missing(value, field, f"{path}.{field.name}" if path else field.name, source) for field in shape.fields
            ]
            inner = first(under)
            return None if inner is None else f.when(value.isNotNull(), inner) if path else inner
        case Mapping():
            keys = f.map_keys(value)
            found.append(f.when(f.size(keys) != f.size(f.array_distinct(keys)), f.lit(f"duplicate keys in {path}")))

    def item(each: Column, below: Shape, name: str) -> Column | None:
        null = None if below.nullable else f.when(each.isNull(), f.lit(f"null in {name}"))
        return first([null, _invalid(each, below, name)])

    found.append(_not_text(value, shape, path, source))
    found.append(inside(value, shape, path, item))
    return first(found)


def _rounded(value: Column) -> Column:
    """Check whether the text of a decimal has more places than the column: 1.0000000001, or 1.5E-9."""
    places = f.length(f.regexp_extract(value, r"\.(\d*?)0*(?:[eE]|\s*$)", 1))
    written = f.regexp_extract(value, r"[eE]([+-]?\d+)", 1)
    exponent = f.when(written == "", f.lit(0).cast("bigint")).otherwise(
        f.coalesce(written.try_cast("bigint"), f.lit(-(1 << 40)))
    )
    return value.rlike("^[^eE]*[1-9]") & (places - exponent > DECIMAL.scale)


# ------------------------------------------------------------------------------------------------ values


def _field(parent: Column, field: Field, source: _Source | None) -> Column:
    raw = parent[field.wire]
    source = None if source is None else source.below(field.wire)
    value = _decoded(raw, field.shape, source)
    if field.default is None or field.default == "null":
        return value
    wire = t.StructType([t.StructField(_ROOT, wire_type(field.shape))])
    literal = f.from_json(f.lit(f'{{"{_ROOT}":{field.default}}}'), wire, _READ)[_ROOT]
    default = _decoded(literal, field.shape, None)
    if not field.shape.nullable:
        return f.coalesce(value, default)
    null = _explicit_null(raw, source)
    absent = raw.isNull() if null is None else raw.isNull() & ~null
    return f.when(absent, default).otherwise(value)


def _decoded(value: Column, shape: Shape, source: _Source | None) -> Column:
    match shape:
        case Scalar(kind="decimal"):
            return f.trim(value).try_cast(DECIMAL)
        case Scalar(kind="datetime"):
            has_zone = value.endswith("Z") | value.rlike(r"([+-]\d\d:?\d\d|z)\z")
            zoned = f.regexp_replace(f.upper(value), r"([+-]\d\d)(\d\d)$", "$1:$2")
            exact = f.when(value.endswith("Z"), value).when(has_zone, zoned).otherwise(f.concat(value, f.lit("Z")))
            return exact.try_cast("timestamp")
        case Scalar(kind="local_datetime"):
            return f.upper(value).try_cast("timestamp_ntz")
        case Scalar(kind="date"):
            return value.try_cast("date")
        case Scalar(kind="bytes"):
            return f.try_to_binary(value, f.lit("base64"))
        case Scalar(kind="uuid"):
            dashed = f.regexp_replace(value, r"^(.{8})(.{4})(.{4})(.{4})(.{12})$", "$1-$2-$3-$4-$5")
            return f.lower(f.when(f.length(value) == 32, dashed).otherwise(value))
        case Sequence():
            items = value
            if not _plain(shape.item):
                items = f.transform(value, lambda item: _decoded(item, shape.item, None))
            return f.array_distinct(items) if shape.unique else items
        case Mapping() if not _plain(shape.value):
            return f.transform_values(value, lambda _, item: _decoded(item, shape.value, None))
        case Structure():
            fields = [_field(value, field, source).alias(field.name) for field in shape.fields]
            return f.when(value.isNotNull(), f.struct(*fields))
        case _:
            return value


def _plain(shape: Shape) -> bool:
    """Check whether a value is parsed into what it is."""
    return isinstance(shape, Scalar) and wire_type(shape) == column_type(shape) and shape.kind != "uuid"


# ------------------------------------------------------------------------------------------------ problems of both ways


def first(problems: Iterable[Column | None]) -> Column | None:
    """The first sentence that is not null; ``None`` when there is nothing to look at."""
    found = [problem for problem in problems if problem is not None]
    if not found:
        return None
    return found[0] if len(found) == 1 else f.coalesce(*found)


def inside(value: Column, shape: Shape, path: str, problem: Problem) -> Column | None:
    """Return the fault inside of a value: its elements, its fields, or that it is none of the allowed ones."""
    match shape:
        case Scalar(allowed=allowed) if allowed:
            return f.when(~value.isin(*allowed), f.lit(f"{path}: not one of {', '.join(map(str, allowed))}"))
        case Scalar(kind="uuid"):
            whole = value.rlike(_UUID) & f.length(value).isin(32, 36)
            return f.when(~whole, f.lit(f"{path}: not a UUID"))
        case Sequence():
            return element(value, shape.item, f"{path}[]", problem)
        case Mapping():
            return element(f.map_values(value), shape.value, f"{path}{{}}", problem)
        case Structure():
            found = first(problem(value[field.name], field.shape, f"{path}.{field.name}") for field in shape.fields)
            return None if found is None else f.when(value.isNotNull(), found)
        case _:
            return None


def element(items: Column, shape: Shape, path: str, problem: Problem) -> Column | None:
    """Return the fault of the first bad element of an array."""
    if problem(f.lit(None), shape, path) is None:
        return None

    def sentence(item: Column) -> Column:
        found = problem(item, shape, path)
        return f.lit(None).cast("string") if found is None else found

    return f.get(f.filter(f.transform(items, sentence), lambda text: text.isNotNull()), 0)
