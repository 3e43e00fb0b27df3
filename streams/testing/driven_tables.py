"""The topics of joined tables and lookups, as a test writes them; and the rows of a partition, as the changelog has
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streams.errors import ConfigError
from streams.model.topics import InputSpec
from streams.records import IncomingRecord, Record
from streams.runtime.changelog import JOIN_PREFIX
from streams.source.lookups import Lookup
from streams.stores.joined import Joined
from streams.testing.simulation.broker import Log


class DrivenTable:
    """The topic of a joined table, or of a lookup (``TestDriver.table``): records are placed as the partitioner of the
    joined table does, else by murmur2."""

    def __init__(
        self, declared: Joined[Any, Any] | Lookup[Any, Any], send: Callable[[Record, bool], IncomingRecord]
    ) -> None:
        self._declared = declared
        self._send = send

    def put(self, key: Any, value: Any, *, wait: bool = True) -> IncomingRecord:
        """Write a row, and run as ``TestDriver.send`` does. Returns the record."""
        return self._send(self._declared.record(key, value), wait)

    def delete(self, key: Any, *, wait: bool = True) -> IncomingRecord:
        """Write a tombstone, and run as ``put``."""
        return self._send(self._declared.record(key, None), wait)


def declared_table(
    inputs: dict[str, InputSpec], lookups: dict[str, Lookup[Any, Any]], topic: str
) -> Joined[Any, Any] | Lookup[Any, Any]:
    """Return the declaration of a joined table, or of a lookup. Raises ``ConfigError``."""
    if topic in lookups:
        return lookups[topic]
    spec = inputs.get(topic)
    if spec is None or spec.table is None:
        known = ", ".join(name for name, one in inputs.items() if one.table is not None) or "none"
        looked = f", and looks into {', '.join(lookups)}" if lookups else ""
        raise ConfigError(f"{topic!r} is no joined table of this source; it joins {known}{looked}")
    found: Joined[Any, Any] = spec.table
    return found


def committed_rows(changelog: Log, topic: str) -> dict[bytes, bytes]:
    """Return the rows of a joined table as a partition's changelog has them."""
    prefix, rows = JOIN_PREFIX + topic.encode() + b"\0", dict[bytes, bytes]()
    for record in changelog.committed(0, changelog.end):
        if record.key is not None and record.key.startswith(prefix):
            key = record.key[len(prefix) :]
            if record.value is None:
                rows.pop(key, None)
            else:
                rows[key] = record.value
    return rows
