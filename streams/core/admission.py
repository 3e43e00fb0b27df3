"""Adding up what a poll brings and what a transaction takes in. A leaf (``sak/leaves.py``)."""

from __future__ import annotations

from typing import Final

from streams.records import Change, Headers, IncomingRecord, Output, ReceivedHeaders
from streams.sak import leaves

CLASSES: Final = (Change, IncomingRecord, Output)
"""Whose fields are read by their places in memory when this is compiled."""


def headers_bytes(headers: ReceivedHeaders | None) -> int:
    """Estimate the bytes of headers (names count by letters). 0 for a value that is no headers: clients refuse it, and
    name the fault."""
    size = 0
    try:
        for name, value in headers or ():
            size += len(name) + len(value or b"")
    except (TypeError, ValueError):
        return 0
    return size


def size_of_records(records: list[IncomingRecord]) -> int:
    """Return the bytes of keys, values and headers. Records in a row mostly have the same headers: priced once."""
    size = price = 0
    headers: ReceivedHeaders | None = None
    for record in records:
        if record.headers is not headers:
            headers = record.headers
            price = headers_bytes(headers)
        size += len(record.value or b"") + len(record.key or b"") + price
    return size


def size_of_changes(changes: list[Change], latest: dict[bytes, Change]) -> int:
    """Return the bytes of keys and values, and note the last change of each key."""
    size = 0
    for change in changes:
        key, value = change.key, change.value
        latest[key] = change  # the last one wins: one record per key and transaction goes to the changelog
        size += len(key) if value is None else len(key) + len(value)
    return size


def size_of_outputs(outputs: list[Output]) -> int:
    """Return the bytes of keys, values and headers."""
    size = price = 0
    headers: Headers | None = None  # those of the output before, which mostly has the same list
    for output in outputs:
        if output.headers is not headers:
            headers = output.headers
            price = headers_bytes(headers)
        size += len(output.value or b"") + len(output.key or b"") + price
    return size


leaves.use(globals())
