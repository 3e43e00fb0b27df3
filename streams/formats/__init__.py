"""Formats of other programs: rules that give records their types, CloudEvents, and values by a schema registry
(``docs/guides/foreign-topics.md``, ``docs/guides/cloudevents.md``, ``docs/guides/schema-registry.md``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.sak.lazy_names import LazyNames

if TYPE_CHECKING:
    from streams.formats.avro import AvroCodec
    from streams.formats.by_schema import BySchema
    from streams.formats.cloudevents import CloudEvent, CloudEvents
    from streams.formats.json_schema import JsonSchemaCodec
    from streams.formats.protobuf import ProtobufCodec
    from streams.formats.registry import SchemaRegistry
    from streams.formats.rules import ByField, ByFunction, ByHeader, Deleted, Only, TypeRule

__all__ = [
    "AvroCodec",
    "ByField",
    "ByFunction",
    "ByHeader",
    "BySchema",
    "CloudEvent",
    "CloudEvents",
    "Deleted",
    "JsonSchemaCodec",
    "Only",
    "ProtobufCodec",
    "SchemaRegistry",
    "TypeRule",
]

if not TYPE_CHECKING:
    __getattr__ = LazyNames(
        __name__,
        {
            "avro": "AvroCodec",
            "by_schema": "BySchema",
            "cloudevents": "CloudEvent CloudEvents",
            "json_schema": "JsonSchemaCodec",
            "protobuf": "ProtobufCodec",
            "registry": "SchemaRegistry",
            "rules": "ByField ByFunction ByHeader Deleted Only TypeRule",
        },
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
