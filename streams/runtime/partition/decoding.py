"""Decode a record as its handler would have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streams.core.router import Route
from streams.errors import DecodeError
from streams.events import parse_version
from streams.model.topics import InputSpec
from streams.outcomes import ErrorPolicy
from streams.records import TYPE_HEADER, VERSION_HEADER, IncomingRecord, TypedRecord
from streams.runtime.partition.failures import describe_type
from streams.runtime.partition.splitting import split_event


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
