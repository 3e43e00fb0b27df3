"""One event class as Spark columns: how its records are read, step by step."""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import Column
from pyspark.sql import functions as f

from streams.codecs import JsonCodec, PydanticCodec
from streams.events import EventType, event_type_of
from streams.spark import json_decoding, python_codec
from streams.spark.shapes import shape_of

_META: Final = "_meta"


class EventColumns:
    """Expressions for the records of one class, over the columns ``_meta`` and ``value``.

    Each of ``converted``, ``parsed`` and then ``problem`` and ``value`` uses the columns of the step before it. Raises
    ``ConfigError`` for a class that has no schema, or that workers would have to import and cannot.
    """

    def __init__(self, cls: type, column: str) -> None:
        self.event: EventType[Any] = event_type_of(cls)
        self.shape = shape_of(cls)
        self.column = column
        """Where the event is: a name that no field has."""
        self._in_python = not isinstance(self.event._codec, JsonCodec | PydanticCodec)
        self._upcasts = bool(self.event._upcasters) and not self._in_python
        self._text = f"{column}text"
        self._parsed = f"{column}parsed"
        self._converted = f"{column}converted"

    def is_mine(self) -> Column:
        """Whether a record is of this type."""
        return f.col(f"{_META}.type") == self.event.name

    def converted(self) -> list[Column]:
        """What Python is needed for: nothing, as a rule."""
        value, version = f.when(self.is_mine(), f.col("value")), f.col(f"{_META}.version")
        if self._in_python:
            made = python_codec.decode_event(self.event, self.shape, f.when(version.isNotNull(), value), version)
        elif self._upcasts:
            older = (version >= 1) & (version < self.event.version)
            made = python_codec.upcast(self.event, f.when(older, value), f.when(older, version))
        else:
            return []
        return [made.alias(self._converted)]

    def parsed(self) -> list[Column]:
        """The JSON, parsed."""
        if self._in_python:
            return []
        value = f.when(self.is_mine() & (f.col(f"{_META}.version") == self.event.version), f.col("value"))
        if self._upcasts:
            value = f.coalesce(f.col(f"{self._converted}.value"), value)
        text = value.cast("string")
        return [text.alias(self._text), json_decoding.from_json(text, self.shape).alias(self._parsed)]

    def problem(self) -> Column:
        """Why a record of this type is no such event, or null."""
        version, newest = f.col(f"{_META}.version"), self.event.version
        number = version.cast("string")
        is_null = f.when(f.col("value").isNull(), f.lit("null value"))
        no_version = f.when(version.isNull(), json_decoding.in_parts(f.lit("the version header is no number")))
        if self._in_python:
            return f.coalesce(is_null, no_version, f.col(f"{self._converted}.error"))
        newer = f.concat(
            f.lit("version "), number, f.lit(f" is newer than {newest}, the newest known here: update this program")
        )
        older = f.concat(
            f.lit("version "), number, f.lit(f" is older than {newest}, and the class has no upcaster for it")
        )
        text, parsed = f.col(self._text), f.col(self._parsed)
        wrong_version = f.when(version > newest, newer).when(version < 1, f.lit("versions start at 1"))
        if self._upcasts:
            wrong_version = f.coalesce(wrong_version, f.col(f"{self._converted}.error"))
        else:
            wrong_version = wrong_version.when(version < newest, older)
        return f.coalesce(
            is_null,
            no_version,
            f.when(version != newest, wrong_version),
            f.when(f.length("value") == 0, f.lit("empty value")),
            json_decoding.unreadable(parsed, text, self.shape),
        )

    def value(self) -> Column:
        """The event as a struct; of no use where it has a problem."""
        if self._in_python:
            return f.col(f"{self._converted}.value")
        return json_decoding.decoded(f.col(self._parsed), f.col(self._text), self.shape)
