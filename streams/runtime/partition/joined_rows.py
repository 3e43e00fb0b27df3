"""The rows of one partition's joined tables: kept in its changelog, as part of its state. ``joining`` changes them.

A row changes by a record of the changelog in the transaction that moves the position in the table's topic. So any state
that is restored from the changelog has exactly the rows up to its position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol, TypeVar

from streams.model.topics import InputSpec
from streams.records import Change, IncomingRecord
from streams.runtime.changelog import JOIN_PREFIX

_log = logging.getLogger(__name__)

ROUTE_PREFIX: Final = "kes.join."
"""Names of the routes of joined tables begin with it; the table's topic follows. It is the type of their records."""


TableT_co = TypeVar("TableT_co", covariant=True)


class JoinedTopic(Protocol[TableT_co]):
    """A joined table as it is declared (``stores.joined.Joined``)."""

    @property
    def topic(self) -> str: ...

    def rows(self, partition: int, store: object, prefix: bytes) -> TableT_co:
        """Make the empty table of a partition with this store; keys of its rows begin with ``prefix``."""
        ...


class RowTable(Protocol):
    """The rows of one joined table in one partition (``stores.joined_table.JoinedTable``)."""

    @property
    def joined(self) -> Any: ...
    def row(self, key: bytes) -> bytes | None: ...
    def row_keys(self) -> set[bytes]: ...
    def set_row(self, key: bytes, change: Change) -> None:
        """Set a row, or delete it. A row on disk stays in memory until this very change, which is committed or was
        received, is written."""
        ...

    def exchange_row(self, key: bytes, change: Change) -> Any: ...
    def put_back_row(self, key: bytes, change: Change, before: Any) -> None: ...
    def read(self, record: IncomingRecord, size_limit: int) -> Any: ...
    def update(self, row: Any, old: bytes | None) -> Any: ...
    def revoked(self) -> None: ...


class JoinedRows:
    """The joined tables of one partition, by their topics. ``goals``: the ends up to which tables are to be read before
    any event; a table that is read has none. Owned by one thread at a time, as the store."""

    def __init__(self, tables: Mapping[str, RowTable] | None = None) -> None:
        self.tables: dict[str, RowTable] = dict(tables or {})
        self.goals: dict[str, int] = {}
        self.unknown: set[str] = set()
        """Tables whose rows are in the changelog, and which the source does not join (any more)."""
        self._by_name = {name.encode(): table for name, table in self.tables.items()}
        self._begun: list[Change] = []
        self._is_over = False

    @classmethod
    def of(cls, inputs: Iterable[InputSpec], partition: int, store: object = None) -> JoinedRows:
        """Make the empty tables of a partition with this store. Raises ``ConfigError`` for one that does not fit."""
        specs = [spec for spec in inputs if spec.table is not None]
        return cls({spec.topic: spec.table.rows(partition, store, row_key(spec.topic, b"")) for spec in specs})

    def receive(self, change: Change) -> None:
        """Take a change of the changelog."""
        key, value = change.key, change.value
        # With a zero byte it is the key of a row, without one that of the table's goal.
        name, is_row, row = key[len(JOIN_PREFIX) :].partition(b"\0")
        table = self._by_name.get(name)
        if table is None:
            self.unknown.add(name.decode(errors="replace"))
        elif is_row:
            table.set_row(row, change)
        elif value is None:
            self.goals.pop(name.decode(), None)
        else:
            self.goals[name.decode()] = int(value)

    def begin(self, topic: str, low: int, high: int) -> bool:
        """Begin with a table that has no position yet, and is to be read up to ``high`` first. ``False``: the topic is
        no table."""
        if topic not in self.tables:
            return False
        if low < high:
            # Also in the changelog: after a crash within the first load an event would meet half of the table.
            self.goals[topic] = high
            self._begun.append(Change(JOIN_PREFIX + topic.encode(), b"%d" % high))
        return True

    def begun(self) -> list[Change]:
        """Return the changes that keep what ``begin`` began with; once."""
        begun, self._begun = self._begun, []
        return begun

    def read_up(self, topic: str) -> Change:
        """Note that a table is read up to its goal. Returns the change that keeps that."""
        self.goals.pop(topic, None)
        return Change(JOIN_PREFIX + topic.encode(), None)

    def of_table(self, joined: Any) -> RowTable | None:
        """Return the rows of a declared table; ``None``: it is of another source."""
        table = self.tables.get(getattr(joined, "topic", ""))
        return table if table is not None and table.joined is joined else None

    def warn(self, warned: set[str], begun: Callable[[str], bool]) -> None:
        """Log the tables that are not known, once each. ``begun``: whether there is a position in a table; of one that
        was forgotten (``kes state forget``) there is none."""
        for name in sorted(filter(begun, self.unknown - warned)):
            warned.add(name)
            _log.warning(
                "the changelog has rows of the table %s, which this source does not join: they are left there, and are "
                "used again when source.join(%r, ...) is back; `kes state forget SOURCE --join %s` removes them",
                name,
                name,
                name,
            )

    def revoked(self) -> None:
        """Free everything; a handler that kept a table gets ``StoreError``. Harmless the second time."""
        if not self._is_over:
            self._is_over = True
            for table in self.tables.values():
                table.revoked()


def row_key(topic: str, key: bytes) -> bytes:
    """Return the key of a row in the changelog."""
    return JOIN_PREFIX + topic.encode() + b"\0" + key
