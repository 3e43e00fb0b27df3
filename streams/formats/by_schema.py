"""The rule that finds the types of records by the schemas of their values."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec

from streams.errors import ConfigError, DecodeError
from streams.formats.registry import HEADER, SchemaRegistry
from streams.formats.registry_http import Schema
from streams.formats.rules import Deleted, Found, TypeRule
from streams.formats.schema_codecs import VERSION_PROPERTY
from streams.model.reasons import reason
from streams.outcomes import ErrorPolicy
from streams.records import TYPE_HEADER, VERSION_HEADER, IncomingRecord


class BySchema(TypeRule):
    """The schema of a record's value names its type: ``types=BySchema(registry)``. The full name of an Avro schema, of
    a message of Protobuf, or the title of a JSON Schema is the name of the event type, or one of its ``aliases``.

    The id stands in front of the value, or in the header ``__value_schema_id``. While the schema of an id is fetched
    its partition waits. ``subjects``: those whose versions are all fetched at the start.
    ``missing``: the policy of records without an id.
    """

    def __init__(
        self,
        registry: SchemaRegistry,
        *,
        subjects: Iterable[str] = (),
        missing: ErrorPolicy | None = None,
        nulls: ErrorPolicy | type[Deleted] | None = None,
    ) -> None:
        super().__init__("BySchema(registry)", nulls, missing)
        given: Any = registry
        if not isinstance(given, SchemaRegistry) or isinstance(subjects, str):
            raise ConfigError("BySchema takes a SchemaRegistry, and subjects= names of subjects")
        self.registry, self.subjects = registry, tuple(subjects)

    def prepare(self) -> None:
        """Fetch all versions of the subjects. Blocks. Raises ``RegistryUnavailable``, ``ConfigError``."""
        self.registry.fetch_subjects(self.subjects)

    def unknown(self, record: IncomingRecord) -> bytes | None:
        """Return the id of a record whose schema is to be fetched before the record is read."""
        return self.registry.unknown(_whole(record))

    def _find(self, record: IncomingRecord) -> Found:
        value = _whole(record)
        if value is None:
            return None, None
        if value[:1] not in (b"\0", b"\1"):
            return None, record.value
        key = self.registry.key_of(value)
        name, version = type_of(self.registry.find(key), value[len(key) :])
        of_version = () if version == 1 else ((VERSION_HEADER, b"%d" % version),)
        return ((TYPE_HEADER, name.encode()), *of_version), value


def type_of(schema: Schema, rest: bytes) -> tuple[str, int]:
    """Return the name and version of the event type that a schema names; ``rest``: of the value. Raises
    ``DecodeError``."""
    if schema.kind == "PROTOBUF":
        from streams.formats.protobuf import message_name  # with a library that only its users have

        return message_name(schema, rest), 1
    return _named(schema)


@lru_cache(4096)
def _named(schema: Schema) -> tuple[str, int]:
    if schema.kind not in ("AVRO", "JSON"):
        raise DecodeError(f"schemas of the kind {schema.kind[:40]!r} are not read")
    is_avro = schema.kind == "AVRO"
    try:
        plain = msgspec.json.decode(schema.text)
        name, version = plain["name" if is_avro else "title"], plain.get(VERSION_PROPERTY, 1)
        space = plain.get("namespace", "") if is_avro else ""
        if not (isinstance(name, str) and name and isinstance(space, str) and type(version) is int):
            raise TypeError("names are texts")
    except Exception as error:
        what = "is no record with a name" if is_avro else "has no title"
        raise DecodeError(f"the schema {what}: {reason(error)}") from error
    return name if "." in name or not space else f"{space}.{name}", version


def _whole(record: IncomingRecord) -> bytes | None:
    """Return the value with the id in front of it, wherever that stands."""
    for name, content in record.headers or ():
        if name == HEADER and content and record.value is not None:
            return content + record.value
    return record.value
