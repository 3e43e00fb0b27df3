"""One conformance suite for all stores: they show what a dict would, and the changelog restores them."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from streams.stores import SimpleStore, Table
from tests.property.journalled_machine import HERE, JournalledMachine

KEYS = st.sampled_from(["", "a", "ab", "b", "\x00", "a\x00", "ü", "\U0010ffff"]) | st.text(max_size=3)
# surrogates are not text for Kafka; st.text() leaves them out by itself
VALUES = st.sampled_from([b"", b"\x00"]) | st.binary(max_size=3)


class Item(msgspec.Struct):
    key: str
    data: bytes


class StoreMachine(JournalledMachine):
    """With reads in between."""

    def empty(self) -> dict[str, bytes]:
        return {}

    def put(self, key: str, value: bytes) -> None:
        self.store.put(key, value)

    def read(self, found: Any) -> bytes:
        return cast(bytes, found)

    @precondition(lambda self: self.journal is None)
    @rule()
    def begin(self) -> None:
        self.begun()

    @precondition(lambda self: self.journal is not None)
    @rule(key=KEYS, value=VALUES)
    def put_one(self, key: str, value: bytes) -> None:
        self.put(key, value)
        self.model[key] = value

    @precondition(lambda self: self.journal is not None)
    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        assert bool(self.store.delete(key)) == (self.model.pop(key, None) is not None)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        found = self.store.get(key)
        assert (None if found is None else self.read(found)) == self.model.get(key)
        assert (key in self.store) == (key in self.model)

    @invariant()
    def shows_what_the_dict_shows(self) -> None:
        if hasattr(self, "store"):
            assert len(self.store) == len(self.model)
            assert {key.decode() for key, _ in self.store.dump()} == set(self.model)


class HashTableMachine(StoreMachine):
    def make(self) -> Table[str, bytes]:
        return Table.factory(key=str, value=bytes)(HERE)

    @rule()
    def items(self) -> None:
        assert dict(self.store.items()) == self.model


class OrderedTableMachine(StoreMachine):
    def make(self) -> Table[str, bytes]:
        return Table.factory(key=str, value=bytes, ordered=True)(HERE)

    @rule(low=st.none() | KEYS, high=st.none() | KEYS, reverse=st.booleans(), include_high=st.booleans())
    def range(self, low: str | None, high: str | None, reverse: bool, include_high: bool) -> None:
        wanted = [
            (key, value)
            for key, value in sorted(self.model.items(), reverse=reverse)
            if (low is None or low <= key) and (high is None or key < high or (include_high and key == high))
        ]
        assert list(self.store.range(low, high, reverse=reverse, include_high=include_high)) == wanted

    @rule(prefix=KEYS, reverse=st.booleans())
    def prefix(self, prefix: str, reverse: bool) -> None:
        wanted = [item for item in sorted(self.model.items(), reverse=reverse) if item[0].startswith(prefix)]
        assert list(self.store.prefix(prefix, reverse=reverse)) == wanted

    @rule()
    def ends(self) -> None:
        in_order = sorted(self.model.items())
        wanted = (in_order[0], in_order[-1]) if in_order else (None, None)
        assert (self.store.first(), self.store.last()) == wanted


class SimpleStoreMachine(StoreMachine):
    def make(self) -> SimpleStore[Item]:
        return SimpleStore.factory(Item, key=lambda item: item.key)(HERE)

    def put(self, key: str, value: bytes) -> None:
        self.store.put(Item(key, value))

    def read(self, found: Item) -> bytes:
        return found.data

    @rule(prefix=KEYS, reverse=st.booleans())
    def prefix(self, prefix: str, reverse: bool) -> None:
        wanted = [key for key in sorted(self.model, reverse=reverse) if key.startswith(prefix)]
        assert [item.key for item in self.store.prefix(prefix, reverse=reverse)] == wanted
        assert [item.key for item in self.store] == sorted(self.model)


LIMITS = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHashTable = HashTableMachine.TestCase
TestHashTable.settings = LIMITS
TestOrderedTable = OrderedTableMachine.TestCase
TestOrderedTable.settings = LIMITS
TestSimpleStore = SimpleStoreMachine.TestCase
TestSimpleStore.settings = LIMITS
