"""Decode a record as its handler would have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import anyio

from streams.core.router import Route
from streams.errors import DecodeError, RegistryUnavailable
from streams.events import parse_version
from streams.model.topics import InputSpec
from streams.outcomes import ErrorPolicy
from streams.records import TYPE_HEADER, VERSION_HEADER, IncomingRecord, TypedRecord
from streams.runtime.partition.failures import describe_type
from streams.runtime.partition.splitting import split_event


class UnknownSchema(NamedTuple):
    """The id of a schema that is to be fetched before a record is read (``formats.SchemaRegistry``)."""

    registry: Any
    key: bytes


Unknown = Callable[[IncomingRecord], UnknownSchema | None]
"""Looks for the schema that a record waits for; ``None``: it can be read."""


def unknown_schemas(rule: Any, routes: Mapping[bytes, Route]) -> Unknown | None:
    """Return what finds the records of an input that wait for a registry; ``None``: none does. ``rule``: of the
    input."""
    if hasattr(rule, "unknown"):

        def by_rule(record: IncomingRecord) -> UnknownSchema | None:
            key = rule.unknown(record)
            return None if key is None else UnknownSchema(rule.registry, key)

        return by_rule
    needy: dict[bytes, Any] = {
        name: route.event_type.codec
        for name, route in routes.items()
        if route.event_type is not None and hasattr(route.event_type.codec, "unknown")
    }
    if not needy:
        return None
    codecs: list[Any] = [*needy.values()]

    def by_type(record: IncomingRecord) -> UnknownSchema | None:
        # The rule has not run yet, which may know more; an id too many is fetched then.
        found = codecs if rule is not None else [needy.get(record.header(TYPE_HEADER) or b"")]
        for codec in filter(None, found):
            key = codec.unknown(record.value)
            if key is not None:
                return UnknownSchema(codec.registry, key)
        return None

    return by_type


async def wait_for_schema(unknown: Unknown, record: IncomingRecord) -> None:
    """Wait until a record can be read, which does not come from an input now. Raises ``ConfigError``."""
    while (found := unknown(record)) is not None:
        fetch: Callable[[bytes], str | None] = found.registry.fetch
        try:
            missing = await anyio.to_thread.run_sync(fetch, found.key, abandon_on_cancel=True)
        except RegistryUnavailable:
            await anyio.sleep(1.0)
        else:
            if missing is not None:  # it was there when the record came
                found.registry.refuse(found.key, missing)


def decode_policy(
    spec: InputSpec | None, routes: Mapping[bytes, Route], record: IncomingRecord, otherwise: ErrorPolicy
) -> ErrorPolicy:
    """Return the policy of a record that cannot be read: that of its input (``spec``), of its type, or the source's."""
    found = None if spec is None else spec.policy(record)
    if found is None:
        route = routes.get(record.header(TYPE_HEADER) or b"")
        found = None if route is None else route.decode_policy
    return otherwise if found is None else found


def read_event(
    routes: Mapping[bytes, Route], default: Route | None, record: IncomingRecord, where: str = ""
) -> tuple[Route | None, Any, DecodeError | None]:
    """Decode a record as its handler would have it: return (route, event, None), or the reason why there is none;
    ``where``: the record's name in errors."""
    if isinstance(record, TypedRecord) and record.is_refused:
        return None, None, DecodeError(f"{where or record.where}: {record.reason}")
    name = record.header(TYPE_HEADER)
    route = routes.get(name) if name is not None else None
    if route is None:
        route = default
        if route is None:
            advice = "register a handler for it, or a default handler"
            return None, None, DecodeError(f"{where or record.where}: {describe_type(record)}; {advice}")
    versions = [content for header, content in record.headers or () if header == VERSION_HEADER]
    try:
        version = parse_version(versions[0]) if versions else 1
        if route.event_type is not None and route.event_type.splits and version < route.version:
            return *split_event(routes, route, record.value, version), None
        return route, route.decode(record.value, version), None
    except DecodeError as error:
        return route, None, DecodeError(f"{where or record.where}: {error}")
